"""The files for Kubernetes and Cloud Run: valid, as the API server would read them, and in step with levserve."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from levserve.observe.metrics import Metrics
from levserve.server import EXIT_SECONDS
from levserve.settings.parse import parse_settings
from levserve.settings.settings import BY_KEY
from levserve.web.ops import OPS_PATHS
from tests.documents import ROOT
from tests.kubectl import find_kubectl

FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "nvidia", "tpu")
MONITORING = FOLDER / "components" / "monitoring"
CLOUD_RUN_STARTUP_SECONDS = 240
CLOUD_RUN_STOP_SECONDS = 10
VERSIONS = ("1.30", "1.37")
"""The oldest release of Kubernetes that the files are for, and the newest that the schemas are there for."""


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def merge(base: Any, patch: Any) -> Any:
    """A strategic merge, as far as these files need one: lists of named things are merged by name."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{key: merge(base.get(key), value) for key, value in patch.items()}}
    if isinstance(base, list) and isinstance(patch, list) and all("name" in item for item in patch):
        merged = {item["name"]: item for item in base}
        patched = {item["name"]: merge(merged.get(item["name"]), item) for item in patch}
        return list(
            {**patched, **{name: item for name, item in merged.items() if name not in patched}}.values()
        )
    return patch


def build(overlay: str) -> dict[str, Any]:
    """What an overlay makes of the base, by kind; without the map that kustomize makes of the settings file."""
    kustomization = read(FOLDER / "overlays" / overlay / "kustomization.yaml")
    assert kustomization["resources"] == ["../../base"]
    base = FOLDER / "base"
    found = {}
    for name in read(base / "kustomization.yaml")["resources"]:
        resource = read(base / name)
        found[resource["kind"]] = resource
    for patch in kustomization["patches"]:
        change = read(FOLDER / "overlays" / overlay / patch["path"])
        found[change["kind"]] = merge(found[change["kind"]], change)
    (image,) = kustomization["images"]
    assert container_of(found["Deployment"])["image"].startswith(f"{image['name']}:")
    container_of(found["Deployment"])["image"] = f"{image['newName']}:{image['newTag']}"
    return found


def container_of(deployment: Any) -> Any:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return container


@pytest.fixture(params=OVERLAYS)
def built(request: pytest.FixtureRequest) -> dict[str, Any]:
    return build(request.param)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_resource_is_valid(built: dict[str, Any], version: str) -> None:
    assert built.keys() == {"Deployment", "Service", "PodDisruptionBudget"}
    for resource in built.values():
        kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_autoscaler_is_valid_and_reads_a_metric_that_levserve_has(version: str) -> None:
    autoscaler = read(MONITORING / "autoscaler.yaml")
    kubernetes_validate.validate(autoscaler, version, strict=True)
    (metric,) = autoscaler["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    assert f"\n{name} " in Metrics().render().decode()
    (rule,) = read(MONITORING / "adapter-values.yaml")["rules"]["custom"]
    assert rule["seriesQuery"].startswith(f"{name}{{")
    deployment = read(FOLDER / "base" / "deployment.yaml")
    target = autoscaler["spec"]["scaleTargetRef"]
    assert target == {key: deployment[key] for key in ("apiVersion", "kind")} | {
        "name": deployment["metadata"]["name"]
    }
    assert "replicas" not in deployment["spec"], "the autoscaler owns it"


def test_a_mistake_would_be_found(built: dict[str, Any]) -> None:
    built["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriod"] = 60
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(built["Deployment"], VERSIONS[-1], strict=True)


def test_the_service_monitor_finds_the_services_port() -> None:
    """Its kind is an extension, which no schema is there for."""
    monitor, service = read(MONITORING / "service-monitor.yaml"), read(FOLDER / "base" / "service.yaml")
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "ServiceMonitor")
    assert monitor["spec"].keys() == {"selector", "endpoints"}
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    (port,) = service["spec"]["ports"]
    assert endpoint["port"] == port["name"] and endpoint["path"].encode() in OPS_PATHS


def test_labels_bring_the_resources_together(built: dict[str, Any]) -> None:
    labels = built["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert built["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert built["Service"]["spec"]["selector"] == labels
    assert built["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    (port,) = built["Service"]["spec"]["ports"]
    assert port["targetPort"] in {named["name"] for named in container_of(built["Deployment"])["ports"]}


def test_probes_ask_for_readiness_and_for_life(built: dict[str, Any]) -> None:
    container = container_of(built["Deployment"])
    (port,) = container["ports"]
    for name, path in (("startup", "/readyz"), ("readiness", "/readyz"), ("liveness", "/healthz")):
        probe = container[f"{name}Probe"]
        assert probe["httpGet"] == {"path": path, "port": port["name"]}
        assert path.encode() in OPS_PATHS
    startup = container["startupProbe"]
    start_seconds = startup["periodSeconds"] * startup["failureThreshold"]
    assert start_seconds >= 1800 and built["Deployment"]["spec"]["progressDeadlineSeconds"] > start_seconds
    assert port["containerPort"] == BY_KEY["port"].default


def test_a_pod_has_the_time_to_drain(built: dict[str, Any]) -> None:
    pod = built["Deployment"]["spec"]["template"]["spec"]
    _, seconds = container_of(built["Deployment"])["lifecycle"]["preStop"]["exec"]["command"]
    settings = parse_settings(["--config", str(FOLDER / "base" / "serve.ini")], {})
    assert pod["terminationGracePeriodSeconds"] > int(seconds) + settings.drain_seconds + EXIT_SECONDS


def test_a_pod_has_no_more_rights_than_it_needs(built: dict[str, Any]) -> None:
    pod = built["Deployment"]["spec"]["template"]["spec"]
    assert pod["enableServiceLinks"] is False, "a Service named levserve would set LEVSERVE_PORT"
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001
    container = container_of(built["Deployment"])
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/var/cache/levserve", "/tmp"}


def test_settings_of_a_pod_are_levserves(built: dict[str, Any]) -> None:
    container = container_of(built["Deployment"])
    given = {variable["name"] for variable in container["env"] if variable["name"].startswith("LEVSERVE_")}
    assert given <= {setting.variable for setting in BY_KEY.values()}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    (generated,) = read(FOLDER / "base" / "kustomization.yaml")["configMapGenerator"]
    assert container["args"] == ["--config", f"{mounts['settings']}/{generated['files'][0]}"]


@pytest.mark.parametrize(
    ("overlay", "device", "resource", "tag"),
    [
        ("cpu", "cpu", "memory", "cpu"),
        ("nvidia", "gpu", "nvidia.com/gpu", "cuda"),
        ("tpu", "tpu", "google.com/tpu", "tpu"),
    ],
)
def test_an_overlay_asks_for_its_device(overlay: str, device: str, resource: str, tag: str) -> None:
    container = container_of(build(overlay)["Deployment"])
    assert {"name": "LEVSERVE_DEVICE", "value": device} in container["env"]
    assert resource in container["resources"]["limits"] and container["image"] == f"levserve:{tag}"
    assert f"AS {tag}\n" in (ROOT / "deploy" / "docker" / "Dockerfile").read_text()


def test_a_pod_on_a_cpu_computes_with_the_cores_it_asks_for() -> None:
    container = container_of(build("cpu")["Deployment"])
    assert {"name": "LEVSERVE_THREADS", "value": container["resources"]["requests"]["cpu"]} in container[
        "env"
    ]


@pytest.mark.kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize_builds_what_these_tests_checked(overlay: str) -> None:
    command = [find_kubectl(), "kustomize", FOLDER / "overlays" / overlay]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {resource["kind"]: resource for resource in yaml.safe_load_all(output)}
    settings = found.pop("ConfigMap")
    assert "drain-seconds" in settings["data"]["serve.ini"]
    expected = build(overlay)
    pod = expected["Deployment"]["spec"]["template"]["spec"]
    for volume in pod["volumes"]:
        if "configMap" in volume:
            volume["configMap"]["name"] = settings["metadata"]["name"]
    for resource in expected.values():
        resource["metadata"]["labels"]["app.kubernetes.io/part-of"] = "levserve"
    assert found == expected


@pytest.mark.kubectl
def test_kustomize_adds_the_monitoring(tmp_path: Path) -> None:
    (tmp_path / "kubernetes").symlink_to(FOLDER)
    kustomization = {
        "resources": ["kubernetes/overlays/cpu"],
        "components": ["kubernetes/components/monitoring"],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    command = [find_kubectl(), "kustomize", "--load-restrictor=LoadRestrictionsNone", tmp_path]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kinds = {resource["kind"] for resource in yaml.safe_load_all(output)}
    assert {"ServiceMonitor", "HorizontalPodAutoscaler", "Deployment"} <= kinds


@pytest.fixture
def cloud_run() -> Any:
    return read(ROOT / "deploy" / "cloudrun" / "service.yaml")


def test_cloud_runs_service_starts_and_stops_in_the_time_it_has(cloud_run: Any) -> None:
    assert (cloud_run["apiVersion"], cloud_run["kind"]) == ("serving.knative.dev/v1", "Service")
    container = container_of(cloud_run)
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] <= CLOUD_RUN_STARTUP_SECONDS
    assert startup["httpGet"]["path"] == "/readyz"
    environ = {variable["name"]: variable["value"] for variable in container["env"]}
    settings = parse_settings([], environ)
    assert settings.drain_seconds < CLOUD_RUN_STOP_SECONDS
    assert settings.max_running >= cloud_run["spec"]["template"]["spec"]["containerConcurrency"]
    assert settings.request_timeout >= cloud_run["spec"]["template"]["spec"]["timeoutSeconds"]
    (port,) = container["ports"]
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == port["containerPort"]


def test_cloud_build_makes_the_image_that_cloud_run_serves(cloud_run: Any) -> None:
    cloud_build = read(ROOT / "deploy" / "cloudrun" / "cloudbuild.yaml")
    names = cloud_build["substitutions"]
    image = f"{names['_IMAGE'].replace('${PROJECT_ID}', 'PROJECT')}:{names['_TARGET']}"
    assert container_of(cloud_run)["image"] == image
    (step,) = cloud_build["steps"]
    assert (ROOT / step["args"][2]).exists()
    command = re.search(r"sed .*", (ROOT / "deploy" / "cloudrun" / "service.yaml").read_text())
    assert (
        command is not None
        and command[0] in (ROOT / "docs" / "pages" / "how-to" / "cloud-run.md").read_text()
    )
