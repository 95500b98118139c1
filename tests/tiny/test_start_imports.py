"""A start imports only what its model needs, and does not collect garbage again and again."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import GOLDEN
from tests.pure.test_floors import imported_by


def test_a_start_does_without_what_only_other_models_need(tmp_path: Path) -> None:
    """That is tensorstore, for Levanter's checkpoints, and transformers, for other tokenizer files."""
    (tmp_path / "template").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    flags = [
        "--dry-run",
        "--model",
        str(GOLDEN / "qwen3"),
        "--chat-template",
        str(tmp_path / "template"),
        "--cache-dir",
        str(tmp_path),
        "--max-running",
        "2",
        "--prefill-chunk",
        "16",
    ]
    imported = imported_by(
        "import gc; from levserve.cli import main\n"
        "def num_searches(): return sum(generation['collections'] for generation in gc.get_stats())\n"
        f"before = num_searches(); assert main({flags!r}) == 0\n"
        "assert num_searches() - before < 100, num_searches() - before"
    )
    assert "jax" in imported
    assert imported.isdisjoint({"tensorstore", "torch", "transformers"})
