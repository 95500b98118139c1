"""The CPUs that kernels are tested for: those whose code this machine can run, and those for which it can only be compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from levserve.jit.target import AMX, Target, detect_target

HOST = detect_target()
NAMED = {name: Target.named(name) for name in ("narrow", "avx2", "avx512", "amx", "neon")}
WIDTHS = {f"{width}-byte vectors": dataclasses.replace(HOST, vector_bytes=width) for width in (16, 32, 64)}
"""This CPU with other vectors than its own: LLVM splits those that are too wide, so that all ways of a kernel are run."""
LIKE_HOST: set[str] = set()
if HOST.arch == "aarch64" and HOST.has_dot_product:
    LIKE_HOST = {"neon"}
elif HOST.vector_bytes == 64 and HOST.has("avx512vnni") and not HOST.has_amx_int8:
    LIKE_HOST = {"avx512"}
"""The code that is written for this target is that for this CPU, to the letter, as a test of kernels shows."""
RUNNABLE = {
    "host": HOST,
    **{name: target for name, target in NAMED.items() if target.runs_on(HOST) and name not in LIKE_HOST},
    **{name: target for name, target in WIDTHS.items() if target != HOST},
    **({"host without AMX": HOST.without(*AMX)} if HOST.has_amx_int8 else {}),
}
FOREIGN = {name: target for name, target in NAMED.items() if not target.runs_on(HOST)}
OTHERS = {name: target for name, target in RUNNABLE.items() if name != "host"}

on_each_target = pytest.mark.parametrize("target", RUNNABLE.values(), ids=RUNNABLE)
on_other_targets = pytest.mark.parametrize("target", OTHERS.values(), ids=OTHERS)


def with_examples(
    max_examples: int, *strategies: st.SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[[Target], None]]:
    """A test of a target and drawn values: with all examples for this CPU, and a quarter of them for each other target."""

    def decorate(check: Callable[..., None]) -> Callable[[Target], None]:
        @on_each_target
        def test(target: Target) -> None:
            @settings(max_examples=max_examples if target == HOST else max_examples // 4, deadline=None)
            @given(st.tuples(*strategies))
            def examine(drawn: tuple[Any, ...]) -> None:
                check(target, *drawn)

            examine()

        return test

    return decorate
