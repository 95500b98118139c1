"""A model's files on disk, and the files of its tokenizer. Imports no jax."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from levserve.errors import StartupError
from levserve.settings.settings import Settings
from levserve.weights.cache_folder import Lease
from levserve.weights.fetch import fetch_files
from levserve.weights.hub import fetch_repo, needed_files
from levserve.weights.progress import Report
from levserve.weights.store import Store, is_address


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk.

    `path` is a folder with config.json and weights, a .gguf file, a Levanter checkpoint, or the file of a
    brain's weights. `name` is the model's own name. `config_file` belongs to a Levanter run. `tokenizer` is
    set if the tokenizer is not at `path`, `draft` if there is a draft model, and `adapter` to the folder of a
    LoRA adapter that is added to the weights.
    """

    name: str
    path: Path
    config_file: Path | None = None
    tokenizer: Path | None = None
    lease: Lease | None = field(default=None, compare=False, repr=False)
    draft: ModelFiles | None = None
    adapter: Path | None = None
    tokenizer_lease: Lease | None = field(default=None, compare=False, repr=False)

    def close(self) -> None:
        """Lets the cache delete the files."""
        for lease in (self.lease, self.tokenizer_lease):
            if lease is not None:
                lease.close()
        if self.draft is not None:
            self.draft.close()


def find_tokenizer(name: str, settings: Settings, report: Report) -> tuple[Path, Lease | None]:
    """The folder or .gguf file of a tokenizer, given as a path, an address or a name on the Hub."""
    if is_address(name):
        store = Store(name)
        files = store.describe_all(needed_files(store.list_files(), with_weights=False))
        if not files:
            raise StartupError(f"tokenizer {name}: there are no tokenizer files")
        lease = fetch_files(store, files, settings.cache_path, limit_bytes=settings.cache_size, report=report)
        return lease.path, lease
    if Path(name).exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name, re.ASCII):
        return Path(name), None
    cache_path = settings.cache_path / "hub"
    return fetch_repo(name, revision="", cache_path=cache_path, report=report, with_weights=False), None
