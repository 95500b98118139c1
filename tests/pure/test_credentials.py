"""Passwords and signatures in addresses of models stay out of logs, messages and --print-config."""

from __future__ import annotations

import pytest

from levserve.errors import StartupError
from levserve.settings.credentials import without_credentials
from levserve.settings.parse import parse_settings
from levserve.weights.store import Store, as_startup_error
from tests.fake_server import ServerProcess

ADDRESS = "http://user:pass@127.0.0.1:9/models/m.gguf?X-Amz-Signature=signed&x=1"
SHOWN = "http://***@127.0.0.1:9/models/m.gguf?***"
SECRETS = ("pass", "signed")


def has_secret(text: str) -> bool:
    return any(secret in text for secret in SECRETS)


@pytest.mark.parametrize(
    "text, shown",
    [
        (ADDRESS, SHOWN),
        (f"403 at {ADDRESS}, and {ADDRESS}", f"403 at {SHOWN} and {SHOWN}"),
        ("https://token@host/m", "https://***@host/m"),
        ("gs://bucket/a@b/model", "gs://bucket/a@b/model"),
        ("http://host:8000", "http://host:8000"),
        ("/srv/what?/a@b", "/srv/what?/a@b"),
        ("org/name", "org/name"),
    ],
)
def test_an_address_is_shown_without_its_user_and_its_query(text: str, shown: str) -> None:
    assert without_credentials(text) == shown


def test_settings_show_addresses_without_credentials(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", ADDRESS, "--tokenizer", ADDRESS]
    shown = {row.name: row.value for row in parse_settings(argv, {}).describe()}
    assert shown["model"] == shown["tokenizer"] == SHOWN
    with pytest.raises(SystemExit):
        parse_settings([*argv, "--print-config"], {})
    assert not has_secret(capsys.readouterr().out)


def test_the_log_of_a_start_has_no_credentials() -> None:
    with ServerProcess("--model", ADDRESS).wait_ready() as server:
        lines = "\n".join(server.log.seen)
    assert f"loading {SHOWN}" in lines and not has_secret(lines)


def test_errors_of_a_store_have_no_credentials() -> None:
    """Some libraries put the whole address into their reasons."""
    with pytest.raises(StartupError, match="cannot fetch") as refused:
        Store(ADDRESS).read("")
    assert SHOWN in str(refused.value) and not has_secret(str(refused.value))
    with pytest.raises(StartupError) as failed, as_startup_error(ADDRESS):
        raise OSError(f"404, url='{ADDRESS}'")
    assert not has_secret(str(failed.value))
