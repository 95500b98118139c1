"""Python's bytecode is kept in the cache folder if it would otherwise be compiled at every start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from levserve.device.bytecode import NUM_FOLDERS

PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from levserve.device.bytecode import keep_bytecode
keep_bytecode(Path(sys.argv[2]), "heavy")
import heavy
"""


def import_package(tmp_path: Path, *flags: str, **variables: str) -> list[Path]:
    """Imports a package in a new process that keeps bytecode; returns the files beside it or in the cache."""
    package = tmp_path / "environment" / "heavy"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environ["PYTHONPATH"] = str(Path(__file__).parents[2])  # where levserve is
    command = [
        sys.executable,
        *flags,
        "-c",
        PROGRAM,
        str(package.parent),
        str(tmp_path / "cache" / "bytecode"),
    ]
    subprocess.run(command, env=environ | variables, check=True, timeout=60)
    return [path.relative_to(tmp_path) for path in tmp_path.rglob("__init__*.pyc") if "heavy" in path.parts]


def test_bytecode_that_may_not_be_written_beside_its_source_is_kept_in_the_cache(tmp_path: Path) -> None:
    (kept,) = import_package(tmp_path, "-B")
    assert kept.parts[:2] == ("cache", "bytecode")


def test_bytecode_in_the_cache_that_a_full_disk_has_cut_short_is_replaced(tmp_path: Path) -> None:
    (kept,) = import_package(tmp_path, "-B")
    num_bytes = (tmp_path / kept).stat().st_size
    os.truncate(tmp_path / kept, num_bytes - 10)
    assert import_package(tmp_path, "-B") == [kept]
    assert (tmp_path / kept).stat().st_size == num_bytes


@pytest.mark.parametrize("flags", [(), ("-B",)], ids=["written", "found"])
def test_bytecode_beside_its_source_stays_there(flags: tuple[str, ...], tmp_path: Path) -> None:
    beside = import_package(tmp_path)
    assert [path.parts[0] for path in beside] == ["environment"]
    assert import_package(tmp_path, *flags) == beside


def test_other_versions_of_packages_have_bytecode_of_their_own(tmp_path: Path) -> None:
    """Another version's files may have the same time and size, and Python would take them for unchanged."""
    found = [import_package(tmp_path, "-B")]
    for version in range(NUM_FOLDERS):
        (tmp_path / "environment" / f"heavy-{version}.dist-info").mkdir()
        found.append(import_package(tmp_path, "-B"))
    assert [len(paths) for paths in found] == [1, 2, 3, NUM_FOLDERS] and NUM_FOLDERS == 3
    assert found[0][0] in found[2] and found[0][0] not in found[3]


def test_a_folder_that_the_user_has_named_is_used(tmp_path: Path) -> None:
    (kept,) = import_package(tmp_path, PYTHONPYCACHEPREFIX=str(tmp_path / "named"))
    assert kept.parts[0] == "named"
