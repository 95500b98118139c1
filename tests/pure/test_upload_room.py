"""Where levserve is deployed, clients cannot fill the place of temporary files with uploads.

Without --state-dir that place has uploads that are arriving, whose keys are checked later, beside the files that are kept.
"""

from __future__ import annotations

from typing import Any

import pytest

from levserve.settings.kind import size
from levserve.settings.parse import parse_settings
from levserve.settings.settings import Settings
from levserve.wire.connections import MAX_UPLOADS
from tests.documents import ROOT
from tests.kustomize import build, container_of, read, templates_of

DEPLOY = ROOT / "deploy"


def upload_bytes(settings: Settings) -> int:
    """The most that files and arriving uploads take together."""
    assert not settings.state_dir
    return settings.files_disk + MAX_UPLOADS * settings.max_file_bytes


def read_size(text: str) -> int:
    """Of Kubernetes (2Gi), Cloud Run and Docker (2g, which means the same)."""
    return size(0).read(text.replace("g", "Gi"))


def sizes_of_tmp(resource: Any) -> list[int]:
    """The size of the volume `tmp` in each template."""
    found = []
    for template in templates_of(resource):
        (volume,) = [one for one in template["spec"]["volumes"] if one["name"] == "tmp"]
        found.append(read_size(volume["emptyDir"]["sizeLimit"]))
    return found


@pytest.mark.parametrize(
    "base, name, num_templates",
    [("base", "Deployment/levserve", 1), ("multi-host", "LeaderWorkerSet/levserve-hosts", 2)],
)
def test_uploads_fit_into_a_pods_volume(base: str, name: str, num_templates: int) -> None:
    folder = DEPLOY / "kubernetes" / base
    settings = parse_settings(["--config", str(folder / "serve.ini")], {})
    found = sizes_of_tmp(build(folder)[name])
    assert len(found) == num_templates and min(found) >= upload_bytes(settings)


def test_uploads_fit_into_the_tmpfs_of_compose() -> None:
    levserve = read(DEPLOY / "docker" / "compose.yaml")["services"]["levserve"]
    (variable,) = [one for one in levserve["environment"] if one.startswith("LEVSERVE_FILES_DISK=")]
    name, _, default = variable.partition("=${LEVSERVE_FILES_DISK:-")
    (mount,) = levserve["tmpfs"]
    place, _, options = mount.partition(":size=")
    assert place == "/tmp"
    assert read_size(options) >= upload_bytes(parse_settings([], {name: default.removesuffix("}")}))


def test_uploads_leave_the_model_most_of_the_memory_on_cloud_run() -> None:
    container = container_of(read(DEPLOY / "cloudrun" / "service.yaml"))
    environ = {variable["name"]: variable["value"] for variable in container["env"]}
    memory = read_size(container["resources"]["limits"]["memory"])
    assert upload_bytes(parse_settings([], environ)) <= memory / 8
