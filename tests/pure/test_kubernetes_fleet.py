"""Many pods on Kubernetes: as many as the load needs, and what kustomize builds from the files."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from levserve.observe.metrics import Metrics
from levserve.web.ops import OPS_PATHS
from tests.documents import ROOT
from tests.kubectl import find_kubectl
from tests.kustomize import build, container_of, find_kind, read

FOLDER = ROOT / "deploy" / "kubernetes"
MONITORING = FOLDER / "components" / "monitoring"
DEVICES = ("cpu", "nvidia", "tpu")
VERSIONS = ("1.30", "1.37")
EXTENSIONS = {"ServiceMonitor", "InferencePool", "HTTPRoute", "LeaderWorkerSet"}
"""Kinds that have no schema: tests assert their fields."""


@pytest.fixture
def replicas() -> dict[str, Any]:
    return {resource["kind"]: resource for resource in build(FOLDER / "replicas").values()}


def average(metric: Any) -> float:
    value = metric["pods"]["target"]["averageValue"]
    return float(value.removesuffix("m")) / (1000 if value.endswith("m") else 1)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("folder", ["replicas", "gateway"])
def test_every_resource_is_valid(folder: str, version: str) -> None:
    kinds = set()
    for resource in build(FOLDER / folder).values():
        kinds.add(resource["kind"])
        if resource["kind"] not in EXTENSIONS:
            kubernetes_validate.validate(resource, version, strict=True)
    assert {"Deployment", "HorizontalPodAutoscaler", "PodDisruptionBudget"} <= kinds


def test_the_service_monitor_finds_the_services_port(replicas: dict[str, Any]) -> None:
    monitor, service = replicas["ServiceMonitor"], replicas["Service"]
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["spec"].keys() == {"selector", "endpoints"}
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    (port,) = service["spec"]["ports"]
    assert endpoint["port"] == port["name"] and endpoint["path"].encode() in OPS_PATHS


@pytest.mark.parametrize("path", [MONITORING / "autoscaler.yaml", FOLDER / "replicas" / "autoscaler.yaml"])
def test_the_autoscaler_reads_metrics_that_the_adapter_makes_of_levserves(path: Path) -> None:
    exported = set(re.findall(r"^(levserve_\w+) ", Metrics().render().decode(), re.MULTILINE))
    made = set()
    for rule in read(MONITORING / "adapter-values.yaml")["rules"]["custom"]:
        series = rule["seriesQuery"].partition("{")[0]
        made.add(rule["name"]["as"] if "name" in rule else series)
        query = rule["metricsQuery"].replace("<<.Series>>", series)
        assert set(re.findall(r"levserve_\w+", query)) <= exported, "a series that levserve does not have"
    wanted = [metric["pods"]["metric"]["name"] for metric in read(path)["spec"]["metrics"]]
    assert wanted[0] == "levserve_requests_waiting" and set(wanted) <= made


def test_the_autoscaler_owns_the_number_of_pods(replicas: dict[str, Any]) -> None:
    autoscaler, deployment = replicas["HorizontalPodAutoscaler"], replicas["Deployment"]
    target = autoscaler["spec"]["scaleTargetRef"]
    expected = {key: deployment[key] for key in ("apiVersion", "kind")}
    assert target == {**expected, "name": deployment["metadata"]["name"]}
    assert "replicas" not in deployment["spec"]


def test_pods_are_added_before_all_rows_are_taken(replicas: dict[str, Any]) -> None:
    by_name = {
        metric["pods"]["metric"]["name"]: average(metric)
        for metric in replicas["HorizontalPodAutoscaler"]["spec"]["metrics"]
    }
    environ = {one["name"]: one.get("value") for one in container_of(replicas["Deployment"])["env"]}
    assert by_name["levserve_requests_running"] == 0.75 * int(environ["LEVSERVE_MAX_RUNNING"])
    assert 0 < by_name["levserve_kv_pages_share"] < 1


def test_pods_are_given_up_more_slowly_than_they_are_added(replicas: dict[str, Any]) -> None:
    behavior = replicas["HorizontalPodAutoscaler"]["spec"]["behavior"]
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] >= 600
    (down,) = behavior["scaleDown"]["policies"]
    slowest_up = behavior["scaleUp"]["policies"][0]
    assert down["type"] == slowest_up["type"] == "Pods" and down["value"] == slowest_up["value"] == 1
    assert down["periodSeconds"] > slowest_up["periodSeconds"]


def test_pods_are_spread_over_zones_and_nodes(replicas: dict[str, Any]) -> None:
    template = replicas["Deployment"]["spec"]["template"]
    spread = {one["topologyKey"]: one for one in template["spec"]["topologySpreadConstraints"]}
    assert spread.keys() == {"topology.kubernetes.io/zone", "kubernetes.io/hostname"}
    for constraint in spread.values():
        assert constraint["labelSelector"]["matchLabels"] == template["metadata"]["labels"]


def test_a_part_of_the_pods_may_leave_at_a_time(replicas: dict[str, Any]) -> None:
    budget = replicas["PodDisruptionBudget"]["spec"]
    assert budget["maxUnavailable"] == "10%" and "minAvailable" not in budget
    assert budget["selector"]["matchLabels"] == replicas["Deployment"]["spec"]["selector"]["matchLabels"]


def write_kustomization(folder: Path, base: str, components: list[str]) -> None:
    (folder / "kubernetes").symlink_to(FOLDER)
    kustomization = {
        "resources": [f"kubernetes/{base}"],
        "components": [f"kubernetes/components/{name}" for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_is_added_to_replicas(device: str, tmp_path: Path) -> None:
    write_kustomization(tmp_path, "replicas", [device])
    container = container_of(find_kind(build(tmp_path), "Deployment"))
    names = {variable["name"] for variable in container["env"]}
    assert {"LEVSERVE_DEVICE", "LEVSERVE_MAX_RUNNING"} <= names


@pytest.mark.kubectl
@pytest.mark.parametrize(
    "base, components",
    [
        *[(f"overlays/{device}", []) for device in DEVICES],
        ("overlays/cpu", ["monitoring"]),
        ("replicas", ["nvidia"]),
        ("gateway", ["nvidia"]),
        ("gateway", ["istio"]),
        ("multi-host", []),
    ],
)
def test_kustomize_builds_what_these_tests_check(base: str, components: list[str], tmp_path: Path) -> None:
    write_kustomization(tmp_path, base, components)
    command = [find_kubectl(), "kustomize", "--load-restrictor=LoadRestrictionsNone", tmp_path]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    expected = build(tmp_path)
    for name in [
        resource["metadata"]["name"] for resource in expected.values() if resource["kind"] == "ConfigMap"
    ]:
        output = re.sub(rf"\b{name}-[a-z0-9]{{10}}\b", name, output)  # strips the hash of the content
    found = {f"{one['kind']}/{one['metadata']['name']}": one for one in yaml.safe_load_all(output)}
    assert found == expected
