"""jax's own cache of compiled programs, after a disk was full."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from levserve.device.damage import CHECKED, PROGRAMS, remove_damaged_programs
from levserve.device.platform import JAX_MIN_COMPILE_SECONDS, MIN_COMPILE_SECONDS, open_device
from levserve.jit import code_cache
from levserve.settings.parse import parse_settings

OPTIONS = "jax_compilation_cache_dir", "jax_persistent_cache_min_entry_size_bytes", MIN_COMPILE_SECONDS


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """Starts as a server does, compiles a program, and returns the one entry that jax then has for it."""
    options, cache = {name: getattr(jax.config, name) for name in OPTIONS}, code_cache.current

    def compile_one() -> Path:
        jax.config.update(MIN_COMPILE_SECONDS, JAX_MIN_COMPILE_SECONDS)  # other tests change it
        open_device(parse_settings(["--cache-dir", str(tmp_path)], {}))
        reset_cache()

        def add(x: jax.Array) -> jax.Array:
            return jnp.cumsum(x, 0) + 3

        jax.jit(add).lower(jax.ShapeDtypeStruct((7, 13), jnp.float32)).compile()
        (entry,) = tmp_path.rglob(PROGRAMS)
        return entry

    yield compile_one
    for name, value in options.items():
        jax.config.update(name, value)
    code_cache.use_cache(cache)
    reset_cache()


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_an_entry_that_a_full_disk_has_cut_short_is_replaced(share: float, start: Callable[[], Path]) -> None:
    entry = start()
    num_bytes = entry.stat().st_size
    os.truncate(entry, int(num_bytes * share))
    start()  # a warning of jax would fail the test
    assert entry.stat().st_size > 0.99 * num_bytes
    whole = entry.stat()
    start()
    assert entry.stat().st_mtime_ns == whole.st_mtime_ns


def test_only_entries_that_are_newer_than_the_last_check_are_read(start: Callable[[], Path]) -> None:
    entry = start()
    os.truncate(entry, 1)
    remove_damaged_programs(entry.parent)
    assert not entry.exists()
    entry.write_bytes(b"damaged")
    os.utime(entry, (0, (entry.parent / CHECKED).stat().st_mtime - 1))
    remove_damaged_programs(entry.parent)
    assert entry.exists()
