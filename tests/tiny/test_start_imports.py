"""A start imports only what its model needs."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import GOLDEN
from tests.pure.test_floors import imported_by


def test_a_start_does_without_what_only_other_models_need(tmp_path: Path) -> None:
    """Which is tensorstore, for Levanter's checkpoints, and transformers, for tokenizers in files of another kind."""
    (tmp_path / "template").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    flags = [
        "--model",
        str(GOLDEN / "qwen3"),
        "--chat-template",
        str(tmp_path / "template"),
        "--cache-dir",
        str(tmp_path),
    ]
    imported = imported_by(
        "from levserve.models.startup import dry_run; from levserve.settings.parse import parse_settings\n"
        f"dry_run(parse_settings([*{flags!r}, '--max-running', '2', '--prefill-chunk', '16'], {{}}), num_threads=1)"
    )
    assert "jax" in imported
    assert imported.isdisjoint({"tensorstore", "torch", "transformers"})
