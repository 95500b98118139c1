"""Layering: a room (a top-level package or module) imports only lower floors, nothing heavy pre-fork."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import HEAVY
from tests.waiting import COMPILE_SECONDS

PACKAGE = Path(__file__).parents[2] / "levserve"
FLOORS = {
    "errors": 0,
    "settings": 1,
    "observe": 1,
    "gguf": 1,
    "hosts": 2,
    "schedule": 2,
    "jit": 2,
    "text": 3,
    "model": 3,
    "weights": 4,
    "engine": 5,
    "device": 6,
    "models": 7,
    "generation": 8,
    "request": 9,
    "answers": 10,
    "api": 10,
    "batch": 11,
    "evaluation": 11,
    "__init__": 11,  # `levserve.open`
    "wire": 11,
    "web": 12,
    "terminal": 13,
    "server": 14,
    "cli": 15,
    "__main__": 16,
}
FORBIDDEN = {
    "schedule": {"jax", "numpy", "flask", "haliax", "equinox", "transformers", "threading"},
    "hosts": {"jax", "numpy", "flask", "gunicorn"},
    "text": {"jax", "flask"},
    "model": {"threading", "queue", "flask", "pathlib"},
    "jit": {"haliax", "equinox", "flask"},
    "engine": {"jax", "numpy", "flask", "haliax", "equinox", "transformers"},
    "wire": {"jax", "flask"},
    "web": {"jax", "haliax", "equinox", "transformers"},
    "generation": {"jax", "flask"},
    "request": {"jax", "flask", "gunicorn"},
    "answers": {"jax", "flask", "gunicorn"},
    "api": {"jax", "flask", "gunicorn"},
    "batch": {"jax", "flask", "gunicorn"},
    "evaluation": {"jax", "flask", "gunicorn"},
}


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


@functools.cache
def imports_of(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def imported_by(program: str) -> set[str]:
    program += "\nimport sys; print('imported', *sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=COMPILE_SECONDS
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.partition("imported ")[2].split())


def test_a_room_imports_only_lower_floors() -> None:
    """Covers all files at once: a test for each of hundreds would cost more than reading them."""
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name in imports_of(path)
        if not may_import(room_of(path), name)
    ]
    assert not wrong, wrong
    assert may_import("web", "levserve.wire.http") and not may_import("wire", "levserve.web.app")


def may_import(room: str, name: str) -> bool:
    first, second, *_ = [*name.split("."), ""]
    is_room = first == "levserve" and second in FLOORS and second != room
    is_above = is_room and FLOORS[second] >= FLOORS[room]
    return not is_above and first not in FORBIDDEN.get(room, set())


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions and those for types alone count too."""
    files = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
    }
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        names = imports_of(path)
        graph[module] = {
            found for name in names for found in (name, name.rpartition(".")[0]) if found in files
        }
    assert graph["levserve.cli"]
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize(
    "module", ["levserve.cli", "levserve.server", "levserve.web.app", "levserve.models.catalogue"]
)
def test_nothing_heavy_is_imported_before_the_fork(module: str) -> None:
    imported = imported_by(f"import {module}")
    assert module in imported
    assert HEAVY.isdisjoint(imported)


def test_llvm_is_loaded_only_for_the_kernels_of_a_cpu() -> None:
    imported = imported_by("import levserve.device.runner")
    assert "jax" in imported
    assert "llvmlite" not in imported


def test_a_chat_with_the_bundled_model_does_without_transformers(bundled_gguf: Path) -> None:
    imported = imported_by(
        "from pathlib import Path; from levserve.text.chat import render_chat; from levserve.text.tokenizer import load_tokenizer\n"
        f"assert render_chat(load_tokenizer(Path({str(bundled_gguf)!r})), [{{'role': 'user', 'content': 'Hi'}}])"
    )
    assert "jinja2.sandbox" in imported
    assert "transformers" not in imported
