"""Weights read for a reload: the leaves that a start would make, and no more than the host can hold."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from levserve.errors import ConfigError, StartupError
from levserve.model.parameter_shapes import parameter_shapes
from levserve.models.checks import check_host_memory, sum_bytes
from levserve.models.describe import describe, in_order
from levserve.models.reload import settings_for
from levserve.settings.parse import parse_settings
from levserve.weights.checkpoint import load_arrays, read_arrays, read_config
from levserve.weights.source import find_source
from tests.conftest import FAMILIES, GOLDEN


@pytest.mark.parametrize("family", FAMILIES)
def test_the_leaves_on_the_host_are_those_on_the_device(family: str) -> None:
    folder, dtype = GOLDEN / family, jnp.dtype(jnp.bfloat16)
    config = read_config(folder)
    on_host = in_order(read_arrays(folder, config, dtype, report=lambda _: None))
    on_device = load_arrays(folder, config, dtype, report=lambda _: None)
    for one, name in zip(on_host, sorted(on_device), strict=True):
        np.testing.assert_array_equal(one, np.asarray(on_device[name]))


def test_weights_that_the_host_cannot_hold_are_refused() -> None:
    config, dtype = read_config(GOLDEN / "llama"), jnp.dtype(jnp.float32)
    check_host_memory(sum_bytes(parameter_shapes(config), dtype), 1 << 20)
    with pytest.raises(
        StartupError, match="the new weights take 0.0 GB of the host's memory and 0.0 GB are free"
    ):
        check_host_memory(sum_bytes(parameter_shapes(config), dtype), 100_000)


@pytest.mark.parametrize(
    ("folder", "flags"),
    [
        ("llama", ()),
        ("llama", ("--quantize", "int8")),
        ("qwen3-moe", ()),
        ("quantized/awq", ("--quantize", "keep")),
        ("quantized/awq", ("--quantize", "int4-blocks")),
    ],
)
def test_new_weights_are_expected_to_take_what_they_take(folder: str, flags: tuple[str, ...]) -> None:
    settings = parse_settings(["--model", str(GOLDEN / folder), "--device", "cpu", *flags], {})
    files = find_source(settings, lambda _: None)
    described = describe(settings, files)
    leaves = described.read_leaves(settings, files, lambda _: None)
    assert described.host_weight_bytes == sum(each.nbytes for each in leaves)


@pytest.mark.parametrize(
    ("named", "model", "revision"),
    [
        (("", ""), "org/name", "v1"),
        (("", "v2"), "org/name", "v2"),
        (("org/name@v2", ""), "org/name", "v2"),
        (("org/name@v2", "v2"), "org/name", "v2"),
        (("org/name", ""), "org/name", ""),
        (("org/other", ""), "org/other", ""),
        (("org/other", "v3"), "org/other", "v3"),
    ],
)
def test_a_reload_names_a_model_as_the_settings_do(named: tuple[str, str], model: str, revision: str) -> None:
    settings = parse_settings(["--model", "org/name@v1"], {})
    found = settings_for(settings, named[0], "", named[1])
    assert (found.model, found.revision) == (model, revision)


def test_a_reload_that_names_two_revisions_is_refused() -> None:
    settings = parse_settings(["--model", "org/name@v1"], {})
    with pytest.raises(ConfigError, match=r"a different revision than --revision v3 \(in the request\)"):
        settings_for(settings, "org/name@v2", "", "v3")
