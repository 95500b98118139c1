"""All layers of a plain model in one call on a CPU: from the first norm to the last residual sum.

In XLA a step of one row has some 500 operations. Starting one and sharing it among threads often takes longer
than running it. Here XLA's threads are asked for help once. Each layer is one iteration of ten stages, which
pass their results on in shared memory that stays in the cache.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from levserve.jit.bfloat16 import round_to_bfloat16
from levserve.jit.builder import F32, I8, I32, ROUNDING_CONSTANT, Builder, Value
from levserve.jit.target import Target
from levserve.jit.xla_call import Call, Kernel, RunTask, Stage, register
from levserve.model.cache import INT8, LARGEST_INT8, SMALLEST_SCALE, Place
from levserve.model.cpu import attention, linear
from levserve.model.cpu.forms import MATRICES, AnyProduct, Form
from levserve.model.cpu.heads import AttentionArrays, HeadShape
from levserve.model.cpu.products import (
    Matrix,
    ProductTask,
    StoreProducts,
)
from levserve.model.cpu.softmax import exp
from levserve.model.cpu.tile_products import PADDING_ROWS, RowPlace, TileProduct
from levserve.model.cpu.widened_matrices import WidenedMatrix
from levserve.model.rotary import Angles

LANES = 16
X, NUM_USED, TABLE, POSITIONS, JOINED_ROWS, COS, SIN, WINDOWS, FIRST_LAYER = range(9)
"""The arguments; from `FIRST_LAYER` on come those of each layer."""
PREPARED, QKV, ATTENDED, GATE_UP = range(4)
"""The buffers in shared memory, one row of each per token: activations prepared for a product, queries with
keys and values, the output of attention, and gate with up."""
LARGEST_EXPONENT = 80.0
"""Limits the exponent of e in the activation, whose result is negligible from there on."""

MakeStore = Callable[[Call, Value], StoreProducts]
"""Given a call and its shared memory, decides where products are stored. It is called once per task, so that
pointers are loaded once: LLVM cannot know that they stay the same."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes and types of a model that a kernel is compiled for."""

    heads: HeadShape
    num_layers: int
    hidden: int
    intermediate: int
    rotary_size: int
    """How many elements of a head are rotated, starting with the first."""
    norm_eps: float
    query_scale: float
    array_names: tuple[str, ...]
    """The arrays of a layer, in the order of the arguments."""
    forms: tuple[tuple[str, Form], ...]
    """The forms that each matrix has in any layer."""

    @property
    def target(self) -> Target:
        return self.heads.target

    @property
    def attended(self) -> int:
        """Elements of all query heads of a token."""
        return self.heads.kv_heads * self.heads.group * self.heads.size

    @property
    def qkv(self) -> int:
        """Elements of all query, key and value heads of a token."""
        return self.attended + 2 * self.heads.kv_heads * self.heads.size

    @property
    def name(self) -> str:
        """Unique to this shape, and the same in every process, because programs in the code cache call it."""
        return f"levserve_layers_{hashlib.sha256(repr(self).encode()).hexdigest()[:16]}"


def unsupported_reason(head_dim: int, rotary_size: int, kv_dtype: jnp.dtype) -> str | None:
    """Why this kernel cannot serve a model with such heads, or None; `linear` decides about its matrices."""
    if head_dim % LANES or rotary_size % 8 or (head_dim - rotary_size) % _rotary_lanes(rotary_size):
        return f"head size {head_dim} with {rotary_size} rotated channels"
    return None if kv_dtype in (jnp.float32, jnp.bfloat16, INT8) else f"a KV cache in {kv_dtype}"


def run_layers(
    shape: ModelShape,
    x: jax.Array,
    pools: Sequence[jax.Array],
    place: Place,
    angles: Angles,
    windows: Sequence[int],
    layers: Sequence[Mapping[str, jax.Array]],
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """x [row, chunk, hidden] after all layers, and the pools, written in place."""
    name = register(kernel_for(shape))
    joined_rows = attention.count_joined_rows(place, shape.heads)
    arguments = [x, place.num_used, place.table, place.positions, joined_rows, *angles]
    arguments.append(jnp.asarray(windows, jnp.int32))
    aliases = {X: 0}
    for index, (pool, layer) in enumerate(zip(pools, layers, strict=True)):
        aliases[len(arguments)] = index + 1
        arguments += [pool, *(layer[array] for array in shape.array_names)]
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (x, *pools)]
    x, *written = jax.ffi.ffi_call(name, results, input_output_aliases=aliases)(*arguments)
    return x, tuple(written)


def kernel_for(shape: ModelShape) -> Kernel:
    return LayerWriter(shape).kernel()


class LayerWriter:
    """Writes the stages of a layer. A row is a token: chunks of all rows of the batch follow each other."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape, self.heads = shape, shape.heads
        sizes = dict(zip(MATRICES, (shape.hidden, shape.attended, shape.hidden, shape.intermediate)))
        self.products: dict[str, list[AnyProduct]] = {name: [] for name in MATRICES}
        for name, form in shape.forms:
            self.products[name].append(form.product(sizes[name], shape.target))
        prepared_bytes = max(product.row_bytes for each in self.products.values() for product in each)
        self.widths = prepared_bytes, 4 * shape.qkv, 4 * shape.attended, 8 * shape.intermediate
        """Bytes of a row of each buffer."""

    def kernel(self) -> Kernel:
        shape = self.shape
        row_bytes = 4 * max(shape.hidden, shape.attended, shape.intermediate)
        stages = (
            Stage(self.num_rows, self.norm("input_norm", "qkv")),
            self.multiply("qkv", shape.qkv, self.store_in(QKV, "qkv_bias")),
            Stage(self.num_rows, self.rotate_and_write),
            Stage(self.num_attention_tasks, self.attend),
            Stage(self.num_rows, self.prepare_attended),
            self.multiply("out", shape.hidden, self.add_to_x),
            Stage(self.num_rows, self.norm("mlp_norm", "gate_up")),
            self.multiply("gate_up", 2 * shape.intermediate, self.store_in(GATE_UP)),
            Stage(self.num_rows, self.activate),
            self.multiply("down", shape.hidden, self.add_to_x),
        )

        def shared_bytes(call: Call) -> Value:
            return self.num_tokens(call) * sum(self.widths) + PADDING_ROWS * self.widths[PREPARED]

        def scratch_bytes(call: Call) -> Value:
            attention_bytes = attention.scratch_bytes(self.heads, self.arrays(call, call.frame))
            num_bytes = attention_bytes.maximum(row_bytes)
            for product in itertools.chain.from_iterable(self.products.values()):
                if (by_tiles := self.by_tiles(product)) is not None:
                    num_bytes = num_bytes.maximum(by_tiles.scratch_bytes(self.num_tokens(call)))
            return num_bytes

        return Kernel(
            shape.name,
            shape.target,
            stages,
            shape.num_layers,
            shared_bytes=shared_bytes,
            scratch_bytes=scratch_bytes,
        )

    def num_tokens(self, call: Call) -> Value:
        return call.argument_size(X, 0) * call.argument_size(X, 1)

    def num_rows(self, call: Call) -> Value:
        """Rows before the padding at the end."""
        return linear.load_num_used(call, NUM_USED).minimum(self.num_tokens(call))

    def buffers(self, call: Call, shared: Value) -> list[Value]:
        """Where buffers begin. Tiles write and read past the last prepared row, so padding follows it."""
        after = shared + PADDING_ROWS * self.widths[PREPARED]
        starts = [self.num_tokens(call) * sum(self.widths[:index]) for index in range(len(self.widths))]
        return [shared, *(after + start for start in starts[1:])]

    def argument_index(self, call: Call, name: str) -> Value:
        """The number of an argument of the layer that this iteration computes."""
        names = ("pool", *self.shape.array_names)
        return call.iteration * len(names) + (FIRST_LAYER + names.index(name))

    def layer_array(self, call: Call, name: str) -> Value:
        return call.argument(self.argument_index(call, name))

    def norm(self, name: str, matrix: str) -> RunTask:
        """Normalizes a row of x and prepares it for the product with a matrix."""
        hidden = self.shape.hidden

        def run(call: Call, shared: Value, scratch: Value, row: Value) -> None:
            builder, x = call.builder, call.result(X) + row * (4 * hidden)
            weight = self.layer_array(call, name)
            squares = builder.variable(builder.zeros(F32, LANES))
            with builder.loop(0, hidden, LANES) as at:
                numbers = builder.load(x + at * 4, F32, LANES)
                squares.set(numbers.multiply_add(numbers, squares.get()))
            factor = self.inverse_rms(builder, squares.get().reduce_sum(), hidden).splat(LANES)
            with builder.loop(0, hidden, LANES) as at:
                numbers = builder.load(x + at * 4, F32, LANES) * factor
                normalized = numbers * builder.load(weight + at * 4, F32, LANES)
                builder.store(scratch + at * 4, normalized)
            self.prepare(call, matrix, scratch, scratch, shared, row)

        return run

    def by_tiles(self, product: AnyProduct) -> TileProduct | None:
        shape = self.shape
        return linear.tile_product_for(product, shape.qkv, shape.hidden, 2 * shape.intermediate)

    def prepare(self, call: Call, name: str, x: Value, scratch: Value, shared: Value, row: Value) -> None:
        into = RowPlace(self.buffers(call, shared)[PREPARED], row, self.num_rows(call))
        for product in self.product_of_layer(call, name):
            linear.prepare_row(call.builder, product, self.by_tiles(product), x, scratch, into)

    def product_of_layer(self, call: Call, name: str) -> Iterator[AnyProduct]:
        """Every product with a matrix; the code written for one runs in layers whose matrix has its form."""
        for product in self.products[name]:
            if len(self.products[name]) == 1:
                yield product
                return
            width = call.argument_size(self.argument_index(call, name), 1)
            scales = call.argument_size(self.argument_index(call, f"{name}_scale"), 1)
            # Bytes of one output: such matrices have elements of one byte or two, and scales of two bytes.
            width = width * (2 if isinstance(product, WidenedMatrix) else 1)
            is_form = (width + scales * 2).equals(product.out_bytes + product.out_scale_bytes)
            with call.builder.when(is_form):
                yield product

    def multiply(self, name: str, num_out: int, make_store: MakeStore) -> Stage:
        """Multiplies all prepared rows with a matrix of the layer."""
        first, *_ = self.products[name]
        # All forms of a matrix are divided into the same tasks.
        way = linear.way_of(first, self.by_tiles(first))

        def num_tasks(call: Call) -> Value:
            return linear.num_tasks(way, call.builder.constant(num_out))

        def run(call: Call, shared: Value, scratch: Value, task: Value) -> None:
            weight = self.layer_array(call, name)
            scales = self.layer_array(call, f"{name}_scale") if first.has_scales else None
            outs = linear.task_range(way, task, call.builder.constant(num_out))
            prepared, rows = self.buffers(call, shared)[PREPARED], self.num_rows(call)
            store, matrix = make_store(call, shared), Matrix(weight, scales)
            work = ProductTask(matrix, prepared, rows, outs, scratch, call.num_done.equals(0), store)
            for product in self.product_of_layer(call, name):
                linear.multiply_range(call.builder, product, self.by_tiles(product), work)

        return Stage(num_tasks, run)

    def store_in(self, buffer: int, bias_name: str | None = None) -> MakeStore:
        """Stores products in a buffer, after adding the bias if the layer has one."""

        def make_store(call: Call, shared: Value) -> StoreProducts:
            builder, into = call.builder, self.buffers(call, shared)[buffer]
            bias = self.layer_array(call, bias_name) if bias_name in self.shape.array_names else None

            def store(row: Value, out: Value, products: Value) -> None:
                if bias is not None:
                    products = products + builder.load(bias + out * 4, F32, products.lanes)
                builder.store(into + row * self.widths[buffer] + out * 4, products)

            return store

        return make_store

    def add_to_x(self, call: Call, _: Value) -> StoreProducts:
        x = call.result(X)

        def store(row: Value, out: Value, products: Value) -> None:
            place = x + row * (4 * self.shape.hidden) + out * 4
            call.builder.store(place, call.builder.load(place, F32, products.lanes) + products)

        return store

    def rotate_and_write(self, call: Call, shared: Value, _: Value, token: Value) -> None:
        """Rotates a token's queries and keys, and writes its keys and values to their page."""
        builder, heads = call.builder, self.heads
        head_bytes, num_queries = 4 * heads.size, heads.kv_heads * heads.group
        qkv = self.buffers(call, shared)[QKV] + token * self.widths[QKV]
        position = builder.load_int32(call.argument(POSITIONS), token)
        with builder.when(position >= 0):
            row = token // call.argument_size(X, 1)
            width = call.argument_size(TABLE, 1)
            page = builder.load_int32(call.argument(TABLE), row * width + position // heads.page_size)
            cos, sin = (call.argument(index) + token * (2 * self.shape.rotary_size) for index in (COS, SIN))
            with builder.loop(0, num_queries) as head:
                query = qkv + head * head_bytes
                for at, numbers in self.rotated(call, query, "q_norm", cos, sin):
                    builder.store(query + 4 * at, numbers * self.shape.query_scale)
            num_pages = call.argument_size(self.argument_index(call, "pool"), 0)
            with builder.when(page < num_pages), builder.loop(0, heads.kv_heads) as head:
                key = qkv + (head + num_queries) * head_bytes
                value = key + heads.kv_heads * head_bytes
                lanes = _rotary_lanes(self.shape.rotary_size)
                values = [
                    (at, builder.load(value + 4 * at, F32, lanes)) for at in range(0, heads.size, lanes)
                ]
                for half, vectors in enumerate((self.rotated(call, key, "k_norm", cos, sin), values)):
                    pool, tile = self.layer_array(call, "pool"), (page * 2 + half) * heads.kv_heads + head
                    slot = pool + tile * heads.tile_bytes + (position % heads.page_size) * heads.slot_bytes
                    _write_slot(builder, heads, slot, vectors)

    def rotated(self, call: Call, head: Value, norm: str, cos: Value, sin: Value) -> list[tuple[int, Value]]:
        """A head, normalized if the layer has that norm, and rotated: its vectors, and where each begins."""
        builder, size, half = call.builder, self.heads.size, self.shape.rotary_size // 2
        lanes = _rotary_lanes(self.shape.rotary_size)
        vectors = {at: builder.load(head + 4 * at, F32, lanes) for at in range(0, size, lanes)}
        if norm in self.shape.array_names:
            weight = self.layer_array(call, norm)
            squares = builder.zeros(F32, lanes)
            for numbers in vectors.values():
                squares = numbers.multiply_add(numbers, squares)
            factor = self.inverse_rms(builder, squares.reduce_sum(), size).splat(lanes)
            for at, numbers in vectors.items():
                vectors[at] = numbers * factor * builder.load(weight + 4 * at, F32, lanes)
        for at in range(0, half, lanes):
            low, high = vectors[at], vectors[at + half]
            cosine, sine = (builder.load(angles + 4 * at, F32, lanes) for angles in (cos, sin))
            vectors[at], vectors[at + half] = low * cosine - high * sine, high * cosine + low * sine
        return list(vectors.items())

    def inverse_rms(self, builder: Builder, squares: Value, count: int) -> Value:
        """The factor of a norm, given the sum of the squares of `count` numbers."""
        mean = squares / float(count) + self.shape.norm_eps
        return builder.constant(1.0, F32) / mean.intrinsic("llvm.sqrt")

    def arrays(self, call: Call, shared: Value) -> AttentionArrays:
        builder, buffers = call.builder, self.buffers(call, shared)
        window = builder.load_int32(call.argument(WINDOWS), call.iteration)
        chunk, table_width = call.argument_size(X, 1), call.argument_size(TABLE, 1)
        return AttentionArrays(
            q=buffers[QKV],
            output=buffers[ATTENDED],
            q_stride=self.widths[QKV],
            output_stride=self.widths[ATTENDED],
            pool=self.layer_array(call, "pool"),
            table=call.argument(TABLE),
            positions=call.argument(POSITIONS),
            window=window,
            softcap=builder.constant(0.0, F32),
            chunk=chunk,
            table_width=table_width,
            joined_rows=call.argument(JOINED_ROWS),
        )

    def num_attention_tasks(self, call: Call) -> Value:
        chunk = call.argument_size(X, 1)
        arrays = self.arrays(call, call.frame)
        return attention.num_tasks(self.heads, arrays, (self.num_rows(call) + chunk - 1) // chunk)

    def attend(self, call: Call, shared: Value, scratch: Value, task: Value) -> None:
        attention.attend_block(call.builder, self.heads, self.arrays(call, shared), scratch, task)

    def prepare_attended(self, call: Call, shared: Value, scratch: Value, row: Value) -> None:
        buffers = self.buffers(call, shared)
        attended = buffers[ATTENDED] + row * self.widths[ATTENDED]
        self.prepare(call, "out", attended, scratch, shared, row)

    def activate(self, call: Call, shared: Value, scratch: Value, row: Value) -> None:
        """Multiplies SiLU(gate) with up, and prepares the row for a product."""
        builder, buffers = call.builder, self.buffers(call, shared)
        gates = buffers[GATE_UP] + row * self.widths[GATE_UP]
        ups = gates + 4 * self.shape.intermediate
        with builder.loop(0, self.shape.intermediate, LANES) as at:
            gate, up = (builder.load(half + at * 4, F32, LANES) for half in (gates, ups))
            into = scratch + at * 4
            builder.store(into, gate * up / (exp((gate * -1.0).minimum(LARGEST_EXPONENT)) + 1.0))
        self.prepare(call, "down", scratch, scratch, shared, row)


def _write_slot(builder: Builder, heads: HeadShape, slot: Value, vectors: list[tuple[int, Value]]) -> None:
    """Writes a key or value, given as vectors and where each begins, as `cache.to_storage` does."""
    if heads.dtype != INT8:
        for at, numbers in vectors:
            builder.store(slot + at * heads.dtype.itemsize, _to_storage(numbers, heads.dtype))
        return
    largest = builder.largest_magnitude([numbers for _, numbers in vectors])
    scale = largest.maximum(SMALLEST_SCALE) / LARGEST_INT8
    builder.store(slot + heads.size, scale)
    inverse = (builder.constant(1.0, F32) / scale).splat(vectors[0][1].lanes or 0)
    for at, numbers in vectors:
        rounded = numbers * inverse + ROUNDING_CONSTANT
        builder.store(slot + at, rounded.convert("bitcast", I32).convert("trunc", I8))


def _to_storage(numbers: Value, dtype: jnp.dtype) -> Value:
    """float32 as it is, or rounded to bfloat16."""
    return numbers if dtype == jnp.float32 else round_to_bfloat16(numbers)


def _rotary_lanes(rotary_size: int) -> int:
    """The lanes of vectors that divide each half of the rotated elements evenly."""
    return math.gcd(rotary_size // 2, LANES)
