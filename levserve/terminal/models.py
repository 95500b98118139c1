"""`levserve models` and `levserve fetch`: what can be served from here, and how to get more."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from levserve.models.catalogue import Catalogue
from levserve.settings.program import make_settings
from levserve.settings.settings import Settings
from levserve.terminal.cached import Found, find_cached, size_of
from levserve.terminal.options import add_model, make_parser, read_settings, settings_of
from levserve.weights.source import check_source, find_source

LIST_DESCRIPTION = """\
Lists the models that can be served, with the name to give to levserve, chat and generate.

  levserve models                                   what is in the cache
  levserve models --models-dir ~/models             and what is in a folder, or below an address
"""
FETCH_DESCRIPTION = """\
Downloads a model into the cache, so that it starts at once later.

  levserve fetch                                    the bundled model
  levserve fetch Qwen/Qwen3-0.6B                    from the Hugging Face Hub
  levserve fetch Qwen/Qwen3-0.6B-GGUF:Q8_0          a GGUF file from there
  levserve fetch gs://bucket/models/my-model        from a store
"""


def list_main(argv: Sequence[str]) -> int:
    options = make_parser("models", LIST_DESCRIPTION).parse_args(argv)
    settings = make_settings(settings_of(options))
    rows = [*find_cached(settings), *_in_folder(settings)]
    width = max(len(row.name) for row in rows)
    for row in rows:
        size = "" if row.num_bytes is None else f"{row.num_bytes / 1e6:,.0f} MB"
        print(f"{row.name:{width}}  {size:>12}  {row.place}")
    return 0


def fetch_main(argv: Sequence[str]) -> int:
    parser = make_parser("fetch", FETCH_DESCRIPTION)
    add_model(parser, "Model to download. [default: the bundled model]")
    options = parser.parse_args(argv)
    settings = read_settings(options)
    check_source(settings)
    files = find_source(settings, lambda line: print(line, file=sys.stderr, flush=True))
    if files.lease is not None:
        files.lease.close()
    print(files.path)
    return 0


def _in_folder(settings: Settings) -> Iterator[Found]:
    if not settings.has_several:
        return
    catalogue = Catalogue(settings)
    for name in catalogue.names():
        own = catalogue.find(name)
        path = "" if own is None else own.model
        place = f"[model.{name}]" if name in settings.models else f"{name} of --models-dir"
        yield Found(path, place, size_of(Path(path)) if Path(path).exists() else None)
