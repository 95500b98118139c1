"""Weights read for a reload: the leaves that a start would make, and no more than the host can hold."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from levserve.errors import StartupError
from levserve.model.parameter_shapes import parameter_shapes
from levserve.models.checks import check_host_memory, sum_bytes
from levserve.models.describe import in_order
from levserve.weights.checkpoint import load_arrays, read_arrays, read_config
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
