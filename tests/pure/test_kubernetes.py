"""The files for one pod on Kubernetes and for Cloud Run: valid for the API server, in step with levserve."""

from __future__ import annotations

import re
from typing import Any

import kubernetes_validate
import pytest

from levserve.server import EXIT_SECONDS
from levserve.settings.parse import parse_settings
from levserve.settings.settings import BY_KEY
from levserve.web.ops import OPS_PATHS
from tests.documents import ROOT
from tests.kustomize import build, container_of, find_kind, read

FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "nvidia", "tpu")
CLOUD_RUN_STARTUP_SECONDS = 240
CLOUD_RUN_STOP_SECONDS = 10
VERSIONS = ("1.30", "1.37")
"""The oldest Kubernetes release that the files support, and the newest that has schemas."""


@pytest.fixture(params=OVERLAYS)
def built(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The resources of an overlay by kind: it has one of each."""
    resources = build(FOLDER / "overlays" / request.param)
    return {resource["kind"]: resource for resource in resources.values()}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_resource_is_valid(built: dict[str, Any], version: str) -> None:
    assert built.keys() == {"ConfigMap", "Deployment", "Service", "PodDisruptionBudget"}
    for resource in built.values():
        kubernetes_validate.validate(resource, version, strict=True)


def test_a_mistake_would_be_found(built: dict[str, Any]) -> None:
    built["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriod"] = 60
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(built["Deployment"], VERSIONS[-1], strict=True)


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
    container = container_of(find_kind(build(FOLDER / "overlays" / overlay), "Deployment"))
    assert {"name": "LEVSERVE_DEVICE", "value": device} in container["env"]
    assert resource in container["resources"]["limits"] and container["image"] == f"levserve:{tag}"
    assert f"AS {tag}\n" in (ROOT / "deploy" / "docker" / "Dockerfile").read_text()


def test_a_pod_on_a_cpu_computes_with_the_cores_it_asks_for() -> None:
    container = container_of(find_kind(build(FOLDER / "overlays" / "cpu"), "Deployment"))
    assert {"name": "LEVSERVE_THREADS", "value": container["resources"]["requests"]["cpu"]} in container[
        "env"
    ]


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


def test_cloud_run_gets_an_image_for_the_driver_that_it_has(cloud_run: Any) -> None:
    """Driver 535 on its L4: jax for CUDA 13 needs 580."""
    assert cloud_run["spec"]["template"]["spec"]["nodeSelector"] == {
        "run.googleapis.com/accelerator": "nvidia-l4"
    }
    assert container_of(cloud_run)["image"].endswith(":cuda12")


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
