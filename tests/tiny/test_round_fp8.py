"""The GPU's kernels that round activations to FP8 with what comes before, interpreted, and their use."""

from __future__ import annotations

from types import ModuleType

import haliax as hax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from haliax import Axis
from numpy.typing import NDArray

from levserve.model.backend import Backend
from levserve.model.config import Activation, ModelConfig
from levserve.model.feed_forward import Mlp
from levserve.model.fp8_rows import Fp8Rows, round_rows
from levserve.model.gpu import backend as gpu
from levserve.model.gpu import fp8_activations
from levserve.model.gpu.backend import GpuBackend
from levserve.model.gpu.gate import Gate
from levserve.model.gpu.round_fp8 import MAX_WIDTH, find_group, round_gated, round_normed
from levserve.model.linear import Linear
from levserve.model.norm import Norm
from levserve.model.packed import Code, PackedMatrix, Scheme
from levserve.model.xla import XlaBackend
from tests.tiny.test_packed_product import random_matrix

BFLOAT16, FLOAT32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
BLOCKS = Scheme(Code.FP8, 128, 128, rounds_rows=True)
INTERPRETED = GpuBackend(interpret=True)
ROWS, CHUNK = Axis("row", 20), Axis("chunk", 2)
"""More rows than a product rounds itself."""
SILU = Gate(Activation.SILU, True, None, 0.0)

# Outside jit, jax would compile every operation separately.
round_by_xla = jax.jit(round_rows, static_argnums=1)


@jax.jit
def multiply(product: Linear, x: hax.NamedArray, norm: Norm | None = None) -> hax.NamedArray:
    return product(x if norm is None else norm(x))


def multiply_normed(product: Linear, x: hax.NamedArray, norm: Norm | None) -> hax.NamedArray:
    """Traces a new program each time, so that the backend's functions are called again."""
    made: hax.NamedArray = jax.jit(lambda product, x, norm: product.of_normed(x, norm))(product, x, norm)
    return made


def random_rows(*shape: int) -> NDArray[np.float32]:
    """Rows like those of activations: some rows and channels are far larger than others."""
    random = np.random.default_rng(sum(shape))
    spread = np.exp(random.normal(size=(*shape[:-1], 1)) + random.normal(size=shape[-1]))
    return (random.normal(size=shape) * spread).astype(np.float32)


def steps_of(rounded: Fp8Rows) -> NDArray[np.int32]:
    """Codes as integers, of which neighbouring values differ by one."""
    bits = np.asarray(rounded.codes).view(np.uint8).astype(np.int32)
    return np.where(bits < 128, bits, 128 - bits)


def check(got: Fp8Rows, exactly: NDArray[np.float64], group: int) -> None:
    """All values are rounded alike, except on the edge between two, where a last bit decides."""
    wanted = round_by_xla(exactly.astype(ml_dtypes.bfloat16), group)
    np.testing.assert_allclose(got.largest, wanted.largest, rtol=2**-7)
    apart = np.abs(steps_of(got) - steps_of(wanted))
    assert apart.max() <= 1 and (apart > 0).mean() < 0.01


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize(("width", "group"), [(384, 128), (2048, 64), (1536, 512), (1536, 1536), (328, 328)])
def test_rows_are_rounded_as_xla_rounds_them(width: int, group: int, dtype: jnp.dtype) -> None:
    x = random_rows(3, width).astype(dtype)
    x[1, :group] = 0
    got = round_gated(x, gate=None, group=group, interpret=True)
    wanted = round_by_xla(x.astype(BFLOAT16), group)
    np.testing.assert_array_equal(steps_of(got), steps_of(wanted))
    np.testing.assert_array_equal(got.largest, wanted.largest)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize(("width", "group"), [(1024, 128), (384, 128), (320, 64), (320, 320)])
def test_a_norm_is_rounded_whatever_the_width(width: int, group: int, dtype: jnp.dtype) -> None:
    """Three and five groups are not powers of two, and are padded; so is a row that is one group."""
    x, weight = random_rows(3, width).astype(dtype), random_rows(width)
    got = round_normed(x, weight, eps=0.25, group=group, interpret=True)
    wide = np.asarray(x, np.float64)
    exactly = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 0.25) * weight
    check(got, exactly, group)


@pytest.mark.parametrize(
    "gate",
    [
        SILU,
        Gate(Activation.GELU, False, None, 0.0),
        Gate(Activation.GELU_TANH, True, None, 0.0),
        Gate(Activation.GELU_QUICK, True, 2.0, 1.0),
    ],
)
@pytest.mark.parametrize("group", [128, "row"])
def test_what_a_gate_makes_is_rounded(gate: Gate, group: int | str) -> None:
    x = random_rows(3, 768)
    num_inputs = 384 if gate.is_gated else 768
    size = num_inputs if isinstance(group, str) else group
    got = round_gated(x, gate=gate, group=size, interpret=True)
    parts = tuple(np.split(x, 2 if gate.is_gated else 1, axis=1))
    wanted = np.asarray(jax.jit(gate.apply)(parts), np.float64)
    assert got.codes.shape == wanted.shape
    check(got, wanted, size)


def test_groups_that_triton_cannot_have_are_left_to_xla() -> None:
    assert find_group(384, 128) == 128 and find_group(1024, 1024) == 1024
    assert find_group(384, 96) is None, "no power of two"
    assert find_group(2048, 2048) is None, "more than a program rounds"
    assert find_group(400, 128) is None, "a last group that is smaller"


def test_a_scale_for_a_whole_row_is_found_while_a_program_can_have_the_row() -> None:
    assert find_group(1000, None) == 1000
    assert find_group(MAX_WIDTH, None) == MAX_WIDTH
    assert find_group(MAX_WIDTH + 1, None) is None


class Calls(list[str]):
    """The backend's roundings that were called."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found = Calls()

    def watch(module: ModuleType, name: str) -> None:
        inner = getattr(module, name)

        def call(*arguments: object, **options: object) -> Fp8Rows:
            found.append(name)
            rounded: Fp8Rows = inner(*arguments, **options)
            return rounded

        monkeypatch.setattr(module, name, call)

    watch(gpu, "round_normed")
    watch(gpu, "round_gated")
    watch(fp8_activations, "round_in_groups")
    return found


def matrix_of(Out: Axis, In: Axis) -> PackedMatrix:
    made = random_matrix(BLOCKS, (Out.size, In.size))
    return PackedMatrix(made.codes, made.scale, None, BLOCKS, (Out, In))


def linear(Out: Axis, In: Axis, backend: Backend, *, rounds: bool = False) -> Linear:
    return Linear(matrix_of(Out, In), backend=backend, widened=BFLOAT16, rounds=rounds)


def norm_of(In: Axis, *, is_layer_norm: bool = False) -> Norm:
    return Norm(hax.named(jnp.asarray(random_rows(In.size)), In), None, 1e-5, is_layer_norm, XlaBackend())


def close(got: hax.NamedArray, wanted: hax.NamedArray) -> bool:
    assert {axis.name for axis in got.axes} == {axis.name for axis in wanted.axes}
    return difference_of(got, wanted) < 0.003


def difference_of(got: hax.NamedArray, wanted: hax.NamedArray) -> float:
    """The difference relative to what is wanted."""
    names = [axis.name for axis in wanted.axes]
    ordered = np.transpose(wanted.array, [names.index(axis.name) for axis in got.axes])
    return float(np.linalg.norm(np.asarray(got.array) - ordered) / np.linalg.norm(ordered))


def test_a_product_takes_a_norm_rounded_by_one_kernel(calls: Calls) -> None:
    Out, In = Axis("qkv", 128), Axis("embed", 384)
    x = hax.named(jnp.asarray(random_rows(2, 20, 384)), (CHUNK, ROWS, In))
    product, norm = linear(Out, In, INTERPRETED), norm_of(In)
    got = multiply_normed(product, x, norm)
    assert calls == ["round_normed"]
    wanted = multiply(product, x, norm)
    assert close(got, wanted) and not close(got, multiply(product, x))
    by_xla = multiply_normed(linear(Out, In, XlaBackend()), x, norm)
    assert close(by_xla, wanted), "XLA does one after the other"


def test_only_plain_norms_are_rounded_by_that_kernel(calls: Calls) -> None:
    Out, In = Axis("qkv", 128), Axis("embed", 384)
    x = hax.named(jnp.asarray(random_rows(20, 384)), (ROWS, In))
    product = linear(Out, In, INTERPRETED)
    for norm in (None, norm_of(In, is_layer_norm=True)):
        got = multiply_normed(product, x, norm)
        assert close(got, multiply(product, x, norm))
    assert set(calls) == {"round_in_groups"}


def test_few_rows_of_a_narrow_matrix_are_rounded_by_the_product(calls: Calls) -> None:
    Out, In = Axis("qkv", 128), Axis("embed", 384)
    x = hax.named(jnp.asarray(random_rows(16, 384)), (Axis("row", 16), In))
    product, norm = linear(Out, In, INTERPRETED), norm_of(In)
    assert close(multiply_normed(product, x, norm), multiply(product, x, norm))
    assert calls == []


@pytest.mark.parametrize("num_rows", [20, 300])
@pytest.mark.parametrize("is_gated", [False, True])
def test_a_feed_forward_layer_rounds_once_for_each_product(
    is_gated: bool, num_rows: int, calls: Calls
) -> None:
    """Twenty rows are multiplied by the kernel, three hundred by XLA."""
    config = ModelConfig(100, 384, 256, 1, 4, 4, 96, 1e-5, 1e4, 64, False, is_gated=is_gated)
    shape = Axis("row", num_rows), Axis("chunk", 1)
    x = hax.named(jnp.asarray(random_rows(num_rows, 1, 384)), (*shape, config.Embed))

    def layer(backend: Backend) -> Mlp:
        gate_up = linear(config.GateUp, config.Embed, backend, rounds=backend.rounds_products)
        return Mlp(config, gate_up, linear(config.Embed, config.Mlp, backend))

    norm = norm_of(config.Embed)
    run = jax.jit(lambda layer, x, norm: layer(x, None, norm))
    got = run(layer(INTERPRETED), x, norm)
    assert calls == ["round_normed", "round_gated"]
    wanted = run(layer(XlaBackend()), x, norm)
    # With many rows the first product is rounded to bfloat16, so some FP8 values after it differ by a step.
    assert difference_of(got, wanted) < 0.02


@pytest.mark.parametrize("code", [Code.FP8, Code.INT8])
def test_products_of_many_rows_come_in_bfloat16_where_they_may_be_rounded(code: Code) -> None:
    Out, In = Axis("qkv", 128), Axis("embed", 256)
    made = random_matrix(Scheme(code, 128), (Out.size, In.size))
    matrix = PackedMatrix(made.codes, made.scale, None, made.scheme, (Out, In))
    for backend, rounds, num_rows, is_rounded in (
        (INTERPRETED, True, 257, True),
        (INTERPRETED, True, 256, False),
        (INTERPRETED, False, 257, False),
        (XlaBackend(), True, 257, False),
    ):
        product = Linear(matrix, backend=backend, widened=BFLOAT16, rounds=rounds)
        assert product.product_dtype(num_rows) == (BFLOAT16 if is_rounded else FLOAT32)
        x = hax.named(jnp.asarray(random_rows(num_rows, In.size)), (Axis("row", num_rows), In))
        got = np.asarray(
            product(x).array
        )  # one operation at a time: a program would skip rounding before it widens
        assert got.dtype == FLOAT32
        assert bool((got == got.astype(BFLOAT16).astype(FLOAT32)).all()) == is_rounded
