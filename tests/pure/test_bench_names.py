"""What benchmarks and examples import from the package exists: nothing else would notice a renamed function before somebody runs them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = [*sorted((ROOT / "bench").rglob("*.py")), *sorted((ROOT / "docs").rglob("*.py"))]


def find_module(name: str) -> Path | None:
    path = ROOT.joinpath(*name.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.exists():
            return file
    return None


@functools.cache
def names_of(file: Path) -> set[str]:
    """What a module defines or imports at its top level, also under conditions, and the modules beside it if it is a package."""
    names = {path.stem for path in file.parent.iterdir()} if file.name == "__init__.py" else set()
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Import(names=found) | ast.ImportFrom(names=found):
                names |= {alias.asname or alias.name for alias in found}
    return names


def missing_names(program: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(program.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("levserve"):
            continue
        file = find_module(node.module)
        if file is None:
            yield node.module
        else:
            known = names_of(file)
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name not in known)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_every_name_that_a_program_imports_exists(program: Path) -> None:
    assert not list(missing_names(program))


def test_a_name_that_does_not_exist_is_found(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from levserve.model.select import choose_backend, missing\nfrom levserve.gone import x\n"
    )
    assert list(missing_names(program)) == ["levserve.model.select.missing", "levserve.gone"]
