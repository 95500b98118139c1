"""One model over several hosts on Kubernetes: a LeaderWorkerSet, whose kind is an extension."""

from __future__ import annotations

import re
from typing import Any

import kubernetes_validate
import pytest

from levserve.server import EXIT_SECONDS
from levserve.settings.parse import parse_settings
from tests.documents import ROOT
from tests.kustomize import build, templates_of

FOLDER = ROOT / "deploy" / "kubernetes" / "multi-host"
VERSIONS = ("1.30", "1.37")
SET_LABEL = "leaderworkerset.sigs.k8s.io/"
LWS_VARIABLES = {"LWS_LEADER_ADDRESS": "levserve-hosts-0.levserve-hosts.default", "LWS_GROUP_SIZE": "2"}


@pytest.fixture(scope="module")
def hosts() -> dict[str, Any]:
    return {resource["kind"]: resource for resource in build(FOLDER).values()}


@pytest.fixture(scope="module")
def templates(hosts: dict[str, Any]) -> list[Any]:
    """The pod templates of host 0 and of the other hosts."""
    return templates_of(hosts["LeaderWorkerSet"])


def container_in(template: Any) -> Any:
    (container,) = template["spec"]["containers"]
    return container


def test_the_group_has_the_fields_of_its_kind(hosts: dict[str, Any]) -> None:
    group = hosts["LeaderWorkerSet"]
    assert group["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    spec = group["spec"]
    assert spec.keys() == {"replicas", "startupPolicy", "rolloutStrategy", "leaderWorkerTemplate"}
    assert spec["startupPolicy"] == "LeaderCreated", "host 0 is ready only when the others are there"
    assert spec["rolloutStrategy"].keys() == {"type", "rollingUpdateConfiguration"}
    assert spec["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxUnavailable": 1, "maxSurge": 0}
    template = spec["leaderWorkerTemplate"]
    assert template.keys() == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    assert template["size"] > 1 and template["restartPolicy"] == "RecreateGroupOnPodRestart"


@pytest.mark.parametrize("version", VERSIONS)
def test_pods_and_other_resources_are_valid(
    hosts: dict[str, Any], templates: list[Any], version: str
) -> None:
    for template in templates:
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        pod["metadata"] = {**template["metadata"], "name": "levserve-0"}
        kubernetes_validate.validate(pod, version, strict=True)
    for resource in hosts.values():
        if resource["kind"] != "LeaderWorkerSet":
            kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize("host_id", [0, 1])
def test_the_sets_variables_become_levserves_settings(templates: list[Any], host_id: int) -> None:
    """LeaderWorkerSet puts its variables before those of the template, so that these can refer to them."""
    environ = {**LWS_VARIABLES, "LWS_WORKER_INDEX": str(host_id)}
    for variable in container_in(templates[host_id])["env"]:
        if "value" in variable:
            environ[variable["name"]] = re.sub(
                r"\$\((\w+)\)", lambda found: environ[found[1]], variable["value"]
            )
    settings = parse_settings(["--config", str(FOLDER / "serve.ini")], environ)
    assert settings.coordinator == "levserve-hosts-0.levserve-hosts.default:8890"
    assert (settings.num_hosts, settings.host_id) == (2, host_id)


def test_all_hosts_have_the_same_settings_devices_and_rights(templates: list[Any]) -> None:
    first, other = (container_in(template) for template in templates)
    for key in ("image", "args", "env", "resources", "securityContext", "volumeMounts"):
        assert first[key] == other[key], key
    assert first["securityContext"]["readOnlyRootFilesystem"] is True
    for template in templates:
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        assert template["spec"]["enableServiceLinks"] is False, "a Service would set LEVSERVE_PORT"


def test_host_0_alone_gets_requests(hosts: dict[str, Any], templates: list[Any]) -> None:
    first, other = (container_in(template) for template in templates)
    assert first["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert {key for key in other if key.endswith("Probe")} == {"livenessProbe"}
    assert first["livenessProbe"] == other["livenessProbe"]
    assert first["livenessProbe"]["httpGet"]["path"] == "/healthz"
    labels = {**templates[0]["metadata"]["labels"], f"{SET_LABEL}worker-index": "0"}
    assert hosts["Service"]["spec"]["selector"] == labels
    name = hosts["LeaderWorkerSet"]["metadata"]["name"]
    assert name != hosts["Service"]["metadata"]["name"], "the set makes a headless Service of its own name"
    ports = {port["name"]: port["containerPort"] for port in first["ports"]}
    address = first["env"][0]["value"]
    assert address.endswith(f":{ports['hosts']}") and ports["jax"] == ports["hosts"] + 1
    selector = hosts["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]
    assert all(selector == template["metadata"]["labels"] for template in templates)


def test_hosts_wait_for_each_other_as_long_as_the_group_may_take_to_start(templates: list[Any]) -> None:
    settings = parse_settings(["--config", str(FOLDER / "serve.ini")], {})
    startup = container_in(templates[0])["startupProbe"]
    start_seconds = startup["periodSeconds"] * startup["failureThreshold"]
    assert start_seconds / 2 <= settings.hosts_timeout < start_seconds


def test_every_host_has_the_time_to_drain(templates: list[Any]) -> None:
    settings = parse_settings(["--config", str(FOLDER / "serve.ini")], {})
    for template in templates:
        _, seconds = container_in(template)["lifecycle"]["preStop"]["exec"]["command"]
        needed = int(seconds) + settings.drain_seconds + EXIT_SECONDS
        assert template["spec"]["terminationGracePeriodSeconds"] > needed
