"""levserve behind Kubernetes' inference gateway: the pool, its endpoint picker and the route.

The kinds of the pool and the route are extensions.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from levserve.observe.metrics import Metrics
from levserve.observe.vllm_metrics import VllmMetrics
from levserve.web.ops import OPS_PATHS
from tests.documents import ROOT
from tests.kustomize import build, container_of, read_all

FOLDER = ROOT / "deploy" / "kubernetes" / "gateway"
POOL_KIND = {"group": "inference.networking.k8s.io", "kind": "InferencePool"}


@pytest.fixture(scope="module")
def gateway() -> dict[str, Any]:
    return build(FOLDER)


@pytest.fixture(scope="module")
def plugins() -> dict[str, Any]:
    """The parameters of the picker's plugins."""
    config = yaml.safe_load((FOLDER / "picker-config.yaml").read_text())
    assert config.keys() == {"apiVersion", "kind", "plugins", "schedulingProfiles"}
    assert (config["apiVersion"], config["kind"]) == ("llm-d.ai/v1alpha1", "EndpointPickerConfig")
    return {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}


def test_the_pool_is_levserves_pods_and_their_port(gateway: dict[str, Any]) -> None:
    pool, deployment = gateway["InferencePool/levserve"], gateway["Deployment/levserve"]
    assert pool["apiVersion"] == f"{POOL_KIND['group']}/v1"
    assert pool["spec"].keys() == {"selector", "targetPorts", "endpointPickerRef"}
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"] == {"matchLabels": labels}
    (port,) = container_of(deployment)["ports"]
    assert pool["spec"]["targetPorts"] == [{"number": port["containerPort"]}]


def test_the_pool_finds_its_picker(gateway: dict[str, Any]) -> None:
    reference = gateway["InferencePool/levserve"]["spec"]["endpointPickerRef"]
    assert reference.keys() == {"name", "port", "failureMode"} and reference["failureMode"] == "FailOpen"
    service = gateway[f"Service/{reference['name']}"]
    (port,) = service["spec"]["ports"]
    assert reference["port"] == {"number": port["port"]}
    picker = gateway[f"Deployment/{reference['name']}"]
    labels = picker["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == picker["spec"]["selector"]["matchLabels"]
    ports = {one["name"]: one["containerPort"] for one in container_of(picker)["ports"]}
    assert ports[port["targetPort"]] == port["port"]
    assert labels != gateway["Deployment/levserve"]["spec"]["template"]["metadata"]["labels"]


def test_istio_may_connect_to_a_picker_that_signs_its_own_certificate(gateway: dict[str, Any]) -> None:
    (rule,) = read_all(FOLDER.parent / "components" / "istio" / "picker-tls.yaml")
    assert (rule["apiVersion"], rule["kind"]) == ("networking.istio.io/v1", "DestinationRule")
    assert f"Service/{rule['spec']['host']}" in gateway
    assert rule["spec"]["trafficPolicy"] == {"tls": {"mode": "SIMPLE", "insecureSkipVerify": True}}


def test_the_picker_knows_its_pool_and_reads_its_file(gateway: dict[str, Any]) -> None:
    picker = gateway["Deployment/levserve-picker"]
    flags = dict(flag.split("=", 1) for flag in container_of(picker)["args"])
    pool = gateway["InferencePool/levserve"]
    assert flags["--pool-name"] == pool["metadata"]["name"] and flags["--pool-group"] == POOL_KIND["group"]
    pod = picker["spec"]["template"]["spec"]
    (volume,), (mount,) = pod["volumes"], container_of(picker)["volumeMounts"]
    (file,) = gateway[f"ConfigMap/{volume['configMap']['name']}"]["data"]
    assert flags["--config-file"] == f"{mount['mountPath']}/{file}"
    probed = {container_of(picker)[probe]["grpc"]["port"] for probe in ("livenessProbe", "readinessProbe")}
    assert probed == {int(flags["--grpc-health-port"])}


def test_the_picker_may_only_look(gateway: dict[str, Any]) -> None:
    role, binding = gateway["Role/levserve-picker"], gateway["RoleBinding/levserve-picker"]
    assert all(rule["verbs"] == ["get", "list", "watch"] for rule in role["rules"])
    watched = {resource for rule in role["rules"] for resource in rule["resources"]}
    assert {"pods", "inferencepools"} <= watched
    (subject,) = binding["subjects"]
    account = gateway["Deployment/levserve-picker"]["spec"]["template"]["spec"]["serviceAccountName"]
    assert subject == {"kind": "ServiceAccount", "name": account}
    assert f"ServiceAccount/{account}" in gateway and binding["roleRef"]["name"] == role["metadata"]["name"]


def test_the_picker_reads_metrics_that_the_routers_page_has(plugins: dict[str, Any]) -> None:
    assert plugins["metrics-data-source"]["path"] == "/metrics/router"
    assert b"/metrics/router" in OPS_PATHS
    (engine,) = plugins["core-metrics-extractor"]["engineConfigs"]
    assert engine.pop("name") == plugins["core-metrics-extractor"]["defaultEngine"]
    assert engine.pop("loraSpec") == ""
    metrics = Metrics()
    VllmMetrics(metrics, is_exported=False)
    metrics.model_info.labels("a-model", "32", "100").set(1)
    metrics.kv_pages_total.set(100)
    page = metrics.render_for_router().decode()
    for name in engine.values():
        assert f"\n{name}{{" in page, name


def test_the_picker_scores_with_plugins_that_it_has(plugins: dict[str, Any]) -> None:
    config = yaml.safe_load((FOLDER / "picker-config.yaml").read_text())
    (profile,) = config["schedulingProfiles"]
    weights = {plugin["pluginRef"]: plugin["weight"] for plugin in profile["plugins"]}
    assert weights.keys() <= plugins.keys()
    assert max(weights, key=weights.__getitem__) == "prefix-cache-scorer"


def test_the_route_leads_to_the_pool(gateway: dict[str, Any]) -> None:
    route = gateway["HTTPRoute/levserve"]
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert route["spec"].keys() == {"parentRefs", "rules"}
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"] == [
        {**POOL_KIND, "name": gateway["InferencePool/levserve"]["metadata"]["name"]}
    ]
    assert rule["timeouts"] == {"request": "0s"}, "a long stream would be cut"
