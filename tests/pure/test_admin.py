"""Who may reload a model, and what happens when a reload requested by a signal is refused."""

from __future__ import annotations

import pytest

from levserve.errors import ConfigError, StartupError
from levserve.models.entry import Reloaded, Resident
from tests.fake_app import serving


def test_admin_endpoints_are_off_without_an_admin_key() -> None:
    with serving(api_key="client") as app:
        reply = app.client.post("/admin/reload", headers={"Authorization": "Bearer client"})
        assert reply.status_code == 403 and "--admin-key-file" in reply.text


def test_a_clients_key_is_no_admin_key() -> None:
    with serving(api_key="client", admin_key="sesame") as app:
        statuses = {
            key: app.client.post("/admin/reload", headers={"Authorization": f"Bearer {key}"}).status_code
            for key in ("client", "sesame")
        }
        assert statuses == {"client": 401, "sesame": 503}  # the fake device has nothing to reload
        assert app.client.get("/v1/models", headers={"Authorization": "Bearer sesame"}).status_code == 401


class StandIn:
    """Stands in for a `Reloader`: records what was asked, then refuses if it has a `refusal`."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.refusal = refusal
        self.asked: list[dict[str, str]] = []

    def reload(self, **asked: str) -> Reloaded:
        self.asked.append(asked)
        if self.refusal is not None:
            raise self.refusal
        return Reloaded("toy", "/new", 1.0, 0.1, 31, 0.5, -1.0, -1.5)


@pytest.mark.parametrize(
    "refusal", [None, StartupError("does not fit"), ConfigError("does not exist"), ValueError("a bug")]
)
def test_a_reload_for_a_signal_runs_beside_and_ends_whatever_happens(refusal: Exception | None) -> None:
    with serving() as app:
        registry, reloader = app.registry, StandIn(refusal)
        registry.put(Resident(model=registry.default, reloader=reloader))  # type: ignore[arg-type]
        registry.begin_reload().join(timeout=10)
        assert (
            len(reloader.asked) == 1 and app.complete("t17", max_tokens=2)["choices"][0]["text"] == " t18 t19"
        )
