"""Builds what `kubectl kustomize` builds, as far as the files in deploy/kubernetes need it.

So the tests of those files need no kubectl. Where there is one, a test compares the two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

Resources = dict[str, Any]
"""Keyed by kind and name: `Deployment/levserve`."""


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def read_all(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def build(folder: Path) -> Resources:
    """The resources of a folder with a kustomization.yaml. Names of generated maps have no hash."""
    return _apply(folder, {})


def find_kind(resources: Resources, kind: str) -> Any:
    """The only resource of a kind."""
    (found,) = [resource for resource in resources.values() if resource["kind"] == kind]
    return found


def templates_of(resource: Any) -> list[Any]:
    """The templates of a resource's pods; a LeaderWorkerSet has one for the leader and one for the others."""
    spec = resource.get("spec", {})
    group = spec.get("leaderWorkerTemplate", {})
    found = [spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate")]
    return [template for template in found if template is not None]


def container_of(resource: Any) -> Any:
    """The only container in the only pod template of a resource."""
    (template,) = templates_of(resource)
    (container,) = template["spec"]["containers"]
    return container


def _apply(folder: Path, resources: Resources) -> Resources:
    kustomization = read(folder / "kustomization.yaml")
    for name in kustomization.get("resources", []):
        if (folder / name).is_dir():
            resources = resources | build(folder / name)
            continue
        for resource in read_all(folder / name):
            resources[_key(resource)] = resource
    for generator in kustomization.get("configMapGenerator", []):
        data = {file: (folder / file).read_text() for file in generator["files"]}
        generated = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": generator["name"]},
            "data": data,
        }
        resources[_key(generated)] = generated
    for name in kustomization.get("components", []):
        resources = _apply(folder / name, resources)
    for patch in kustomization.get("patches", []):
        change = read(folder / patch["path"])
        resources[_key(change)] = merge(resources[_key(change)], change)
    for label in kustomization.get("labels", []):
        for resource in resources.values():
            resource["metadata"].setdefault("labels", {}).update(label["pairs"])
    for image in kustomization.get("images", []):
        for resource in resources.values():
            _set_image(resource, image)
    return resources


def _key(resource: Any) -> str:
    return f"{resource['kind']}/{resource['metadata']['name']}"


def _set_image(resource: Any, image: dict[str, str]) -> None:
    for template in templates_of(resource):
        for container in template["spec"]["containers"]:
            if container["image"].rpartition(":")[0] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"


def merge(base: Any, patch: Any) -> Any:
    """A strategic merge: lists of named things are merged by name, other lists are replaced."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{key: merge(base.get(key), value) for key, value in patch.items()}}
    if isinstance(base, list) and isinstance(patch, list) and all("name" in item for item in patch):
        merged = {item["name"]: item for item in base}
        patched = {item["name"]: merge(merged.get(item["name"]), item) for item in patch}
        others = {name: item for name, item in merged.items() if name not in patched}
        return [*patched.values(), *others.values()]
    return patch
