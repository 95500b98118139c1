"""All layers of a plain model in one call on a CPU: norms, products, rotation, KV write, attention and
activation.

Left to XLA, a step of one row has some 500 operations, and to begin and share each of them takes longer than
many of them need. Here the threads are called once. Each layer is ten works, one after the other; what one
leaves for the next lies in memory that stays in the cache.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from levserve.jit.builder import F32, I16, I32, Builder, Value
from levserve.jit.target import Target
from levserve.jit.xla_call import Call, Kernel, Work, register
from levserve.model.cache import Place
from levserve.model.cpu.attention import attend_part, join, num_pieces, own_bytes
from levserve.model.cpu.heads import Given, Heads, exp
from levserve.model.cpu.linear import Matrix, block_range, multiply_block, num_blocks, used_rows
from levserve.model.cpu.products import Product, product_for
from levserve.model.rotary import Angles

LANES = 16
X, NUM_USED, TABLE, POSITIONS, JOINED, COS, SIN, WINDOWS, FIRST = range(9)
"""Arguments; after them come those of each layer."""
LARGEST_POWER = 80.0
"""Of e, that the activation needs: beyond, it is 0 to the last bit."""
ROUNDING, QUIET_NAN = 0x7FFF, 0x7FC0

Do = Callable[[Call, Value, Value, Value], None]
"""As in `Work`."""
Keep = Callable[[Value, Value, Value], None]
"""As in `multiply_block`."""


@dataclass(frozen=True)
class Plan:
    """What is known of a model when its kernel is written."""

    heads: Heads
    num_layers: int
    hidden: int
    intermediate: int
    rotated: int
    """Numbers of a head that turn, from the first on."""
    eps: float
    scale: float
    """Of queries."""
    fields: tuple[str, ...]
    """The arrays of a layer, in the order of the arguments."""
    matrices: jnp.dtype
    """What numbers they have."""

    @property
    def target(self) -> Target:
        return self.heads.target

    @property
    def mixed(self) -> int:
        return self.heads.kv_heads * self.heads.group * self.heads.size

    @property
    def qkv(self) -> int:
        return self.mixed + 2 * self.heads.kv_heads * self.heads.size

    @property
    def name(self) -> str:
        """That no other plan has, and this one in every process: programs that were compiled before call
        it."""
        return f"levserve_layers_{hashlib.sha256(repr(self).encode()).hexdigest()[:16]}"

    def product(self, size: int) -> Product:
        return product_for(self.matrices, size, self.target)


def refuse_unservable(head_dim: int, rotated: int, numbers: jnp.dtype) -> str | None:
    """Why this kernel cannot serve a model, or None; its matrices are not looked at."""
    if head_dim % LANES or rotated % 8 or (head_dim - rotated) % _lanes(rotated):
        return f"heads of {head_dim} numbers, of which {rotated} turn"
    return None if numbers in (jnp.float32, jnp.bfloat16) else f"a KV cache in {numbers}"


def run_layers(
    plan: Plan,
    x: jax.Array,
    pools: Sequence[jax.Array],
    place: Place,
    angles: Angles,
    windows: Sequence[int],
    layers: Sequence[Mapping[str, jax.Array]],
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """x [row, chunk, hidden] after all layers, and the pools, written in place."""
    name = register(kernel_for(plan))
    arguments = [
        x,
        place.num_used,
        place.table,
        place.positions,
        join(place, plan.heads),
        *angles,
        jnp.asarray(windows, jnp.int32),
    ]
    aliases = {X: 0}
    for number, (pool, layer) in enumerate(zip(pools, layers, strict=True)):
        aliases[len(arguments)] = number + 1
        arguments += [pool, *(layer[field] for field in plan.fields)]
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (x, *pools)]
    x, *written = jax.ffi.ffi_call(name, results, input_output_aliases=aliases)(*arguments)
    return x, tuple(written)


def kernel_for(plan: Plan) -> Kernel:
    """Shared memory: rows that are prepared for a product, then queries, keys and values, what was mixed, and
    gate and up."""
    heads, hidden, size, item = plan.heads, plan.hidden, plan.heads.size, plan.heads.numbers.itemsize
    by_hidden, by_mixed, by_activated = map(plan.product, (hidden, plan.mixed, plan.intermediate))
    prepared_bytes = max(product.row_bytes for product in (by_hidden, by_mixed, by_activated))
    widths = prepared_bytes, 4 * plan.qkv, 4 * plan.mixed, 8 * plan.intermediate

    def num_tokens(call: Call) -> Value:
        return call.argument_size(X, 0) * call.argument_size(X, 1)

    def num_rows(call: Call) -> Value:
        return used_rows(call, NUM_USED).least(num_tokens(call))

    def parts(call: Call, shared: Value) -> list[Value]:
        """Where each part of the shared memory begins."""
        return [shared + num_tokens(call) * sum(widths[:index]) for index in range(len(widths))]

    def of_layer(call: Call, field: str) -> Value:
        return call.argument(_place_of(plan, call, field))

    def norm_row(norm: str) -> Do:
        def do(call: Call, shared: Value, own: Value, row: Value) -> None:
            builder, x, weight = call.builder, call.result(X) + row * (4 * hidden), of_layer(call, norm)
            squares = builder.variable(builder.zeros(F32, LANES))
            with builder.loop(0, hidden, LANES) as at:
                each = builder.load(x + at * 4, F32, LANES)
                squares.set(each.times_plus(each, squares.get()))
            factor = _one_over_root(builder, squares.get().total(), hidden, plan.eps).splat(LANES)
            with builder.loop(0, hidden, LANES) as at:
                each = (
                    builder.load(x + at * 4, F32, LANES) * factor * builder.load(weight + at * 4, F32, LANES)
                )
                builder.store(own + at * 4, each)
            by_hidden.prepare(builder, own, own, parts(call, shared)[0] + row * by_hidden.row_bytes)

        return do

    def prepare_mixed(call: Call, shared: Value, own: Value, row: Value) -> None:
        memory = parts(call, shared)
        by_mixed.prepare(call.builder, memory[2] + row * widths[2], own, memory[0] + row * by_mixed.row_bytes)

    def activate_row(call: Call, shared: Value, own: Value, row: Value) -> None:
        builder, memory = call.builder, parts(call, shared)
        gates = memory[3] + row * widths[3]
        ups = gates + 4 * plan.intermediate
        with builder.loop(0, plan.intermediate, LANES) as at:
            gate, up = (builder.load(each + at * 4, F32, LANES) for each in (gates, ups))
            builder.store(own + at * 4, gate * up / (exp((gate * -1.0).least(LARGEST_POWER)) + 1.0))
        by_activated.prepare(builder, own, own, memory[0] + row * by_activated.row_bytes)

    def multiply(product: Product, field: str, num_out: int, keeper: Callable[[Call, Value], Keep]) -> Work:
        """What `keeper` looks up, it looks up once for a piece: LLVM could not tell."""

        def do(call: Call, shared: Value, _: Value, piece: Value) -> None:
            matrix = Matrix(
                of_layer(call, field), of_layer(call, f"{field}_scale") if product.has_scales else None
            )
            outs = block_range(product, piece, call.builder.number(num_out))
            multiply_block(
                call.builder,
                product,
                matrix,
                parts(call, shared)[0],
                num_rows(call),
                outs,
                keeper(call, shared),
            )

        return Work(lambda call: num_blocks(product, call.builder.number(num_out)), do)

    def keep_in(part: int, bias: str | None = None) -> Callable[[Call, Value], Keep]:
        """A part of the shared memory."""

        def keeper(call: Call, shared: Value) -> Keep:
            builder, into = call.builder, parts(call, shared)[part]
            added = of_layer(call, bias) if bias in plan.fields else None

            def keep(row: Value, out: Value, products: Value) -> None:
                sums = (
                    products
                    if added is None
                    else products + builder.load(added + out * 4, F32, products.lanes)
                )
                builder.store(into + row * widths[part] + out * 4, sums)

            return keep

        return keeper

    def add_to_x(call: Call, _: Value) -> Keep:
        x = call.result(X)

        def keep(row: Value, out: Value, products: Value) -> None:
            at = x + row * (4 * hidden) + out * 4
            call.builder.store(at, call.builder.load(at, F32, products.lanes) + products)

        return keep

    def place_token(call: Call, shared: Value, _: Value, token: Value) -> None:
        """Turns a token's queries and keys, and writes its keys and values to their page."""
        builder = call.builder
        qkv = parts(call, shared)[1] + token * widths[1]
        position = builder.index(call.argument(POSITIONS), token)
        with builder.when(position >= 0):
            row = token // call.argument_size(X, 1)
            width = call.argument_size(TABLE, 1)
            page = builder.index(call.argument(TABLE), row * width + position // heads.page_size)
            cos, sin = (call.argument(which) + token * (2 * plan.rotated) for which in (COS, SIN))
            with builder.loop(0, heads.kv_heads * heads.group) as head:
                place = qkv + head * (4 * size)
                for at, turned in _turned(plan, call, place, "q_norm", cos, sin):
                    builder.store(place + 4 * at, turned * plan.scale)
            with builder.when(page < call.argument_size(_place_of(plan, call, "pool"), 0)):
                with builder.loop(0, heads.kv_heads) as head:
                    key = qkv + (head + heads.kv_heads * heads.group) * (4 * size)
                    value = key + 4 * heads.kv_heads * size
                    lanes = _lanes(plan.rotated)
                    plain = [(at, builder.load(value + 4 * at, F32, lanes)) for at in range(0, size, lanes)]
                    for half, numbers in enumerate((_turned(plan, call, key, "k_norm", cos, sin), plain)):
                        tile = (
                            of_layer(call, "pool")
                            + ((page * 2 + half) * heads.kv_heads + head) * heads.tile_bytes
                        )
                        slot = tile + (position % heads.page_size) * (size * item)
                        for at, number in numbers:
                            builder.store(slot + at * item, _stored(number, heads.numbers))

    def given(call: Call, shared: Value) -> Given:
        builder, memory = call.builder, parts(call, shared)
        window = builder.index(call.argument(WINDOWS), call.turn)
        sizes = call.argument_size(X, 1), call.argument_size(TABLE, 1)
        return Given(
            memory[1],
            memory[2],
            widths[1],
            widths[2],
            of_layer(call, "pool"),
            call.argument(TABLE),
            call.argument(POSITIONS),
            window,
            builder.number(0.0, F32),
            *sizes,
            call.argument(JOINED),
        )

    def num_parts(call: Call) -> Value:
        chunk = call.argument_size(X, 1)
        return num_pieces(heads, given(call, call.frame), (num_rows(call) + chunk - 1) // chunk)

    def attend(call: Call, shared: Value, own: Value, piece: Value) -> None:
        attend_part(call.builder, heads, given(call, shared), own, piece)

    works = (
        Work(num_rows, norm_row("input_norm")),
        multiply(by_hidden, "qkv", plan.qkv, keep_in(1, "qkv_bias")),
        Work(num_rows, place_token),
        Work(num_parts, attend),
        Work(num_rows, prepare_mixed),
        multiply(by_mixed, "out", hidden, add_to_x),
        Work(num_rows, norm_row("mlp_norm")),
        multiply(by_hidden, "gate_up", 2 * plan.intermediate, keep_in(3)),
        Work(num_rows, activate_row),
        multiply(by_activated, "down", hidden, add_to_x),
    )
    row_bytes = 4 * max(hidden, plan.mixed, plan.intermediate)
    return Kernel(
        plan.name,
        plan.target,
        works,
        plan.num_layers,
        shared_bytes=lambda call: num_tokens(call) * sum(widths),
        own_bytes=lambda call: own_bytes(heads, given(call, call.frame)).most(row_bytes),
    )


def _place_of(plan: Plan, call: Call, field: str) -> Value:
    """An argument's number, for the layer whose turn it is."""
    fields = ("pool", *plan.fields)
    return call.turn * len(fields) + (FIRST + fields.index(field))


def _turned(
    plan: Plan, call: Call, head: Value, norm: str, cos: Value, sin: Value
) -> list[tuple[int, Value]]:
    """A head's numbers, normed if the model does that and turned by their position: vectors, and where each
    begins."""
    builder, lanes, half = call.builder, _lanes(plan.rotated), plan.rotated // 2
    numbers = {at: builder.load(head + 4 * at, F32, lanes) for at in range(0, plan.heads.size, lanes)}
    if norm in plan.fields:
        weight = call.argument(_place_of(plan, call, norm))
        squares = builder.zeros(F32, lanes)
        for each in numbers.values():
            squares = each.times_plus(each, squares)
        factor = _one_over_root(builder, squares.total(), plan.heads.size, plan.eps).splat(lanes)
        numbers = {
            at: each * factor * builder.load(weight + 4 * at, F32, lanes) for at, each in numbers.items()
        }
    turned = dict(numbers)
    for at in range(0, half, lanes):
        low, high = numbers[at], numbers[at + half]
        cosine, sine = (builder.load(which + 4 * at, F32, lanes) for which in (cos, sin))
        turned[at], turned[at + half] = low * cosine - high * sine, high * cosine + low * sine
    return list(turned.items())


def _one_over_root(builder: Builder, squares: Value, count: int, eps: float) -> Value:
    """What a norm multiplies with."""
    return builder.number(1.0, F32) / (squares / float(count) + eps).call("llvm.sqrt")


def _stored(numbers: Value, dtype: jnp.dtype) -> Value:
    if dtype == jnp.float32:
        return numbers
    bits = numbers.convert("bitcast", I32)
    rounded = (bits + ((bits >> 16) & 1) + ROUNDING) >> 16
    is_number = numbers >= -math.inf
    return is_number.choose(rounded, QUIET_NAN).convert("trunc", I16)


def _lanes(rotated: int) -> int:
    """Of vectors that each half of what turns is made of."""
    return math.gcd(rotated // 2, LANES)
