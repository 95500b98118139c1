"""Writes the instructions of one function; `program` compiles it.

A thin layer over llvmlite. Python's operators on a `Value` write one instruction each, and a Python loop
around them is unrolled. `loop`, `repeat` and `when` write control flow that is decided when the function
runs. Pointer arithmetic counts bytes. A vector may have any number of lanes: LLVM splits it over the CPU's
registers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from llvmlite import ir

from levserve.jit.target import Target

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = FLOATS = ir.HalfType(), ir.FloatType()
POINTER = ir.PointerType()
NUM_BYTES = {I8: 1, I16: 2, F16: 2, I32: 4, F32: 4, I64: 8, POINTER: 8}
ROUNDING_CONSTANT = 1.5 * 2**23
"""Adding it to a small float32 rounds the float to an integer, which is then in the lowest bits."""
CACHE_LINE_BYTES = 64
Function: TypeAlias = ir.Function
"""A function of the program that is being written; the program's other functions can call it."""


class Value:
    """A scalar, vector or pointer in the function being written; operators take integers or floats."""

    def __init__(self, builder: Builder, ir_value: ir.Value) -> None:
        self._builder = builder
        self.ir_value = ir_value

    @property
    def dtype(self) -> ir.Type:
        """The type of a scalar or pointer, or of a vector's elements."""
        kind = self.ir_value.type
        return kind.element if isinstance(kind, ir.VectorType) else kind

    @property
    def lanes(self) -> int | None:
        """How many elements a vector has; None for a scalar or pointer."""
        return self.ir_value.type.count if isinstance(self.ir_value.type, ir.VectorType) else None

    def __add__(self, other: Value | float) -> Value:
        if self.ir_value.type == POINTER:  # with getelementptr LLVM finds the CPU's addressing modes
            if isinstance(other, int) and other == 0:
                return self
            offset = other.ir_value if isinstance(other, Value) else ir.Constant(I64, other)
            return self._wrap(self._builder.ir.gep(self.ir_value, [offset], source_etype=I8))
        return self._binary("fadd" if self.dtype in FLOATS else "add", other)

    def __sub__(self, other: Value | float) -> Value:
        return self._binary("fsub" if self.dtype in FLOATS else "sub", other)

    def __mul__(self, other: Value | float) -> Value:
        return self._binary("fmul" if self.dtype in FLOATS else "mul", other)

    def __truediv__(self, other: Value | float) -> Value:
        return self._binary("fdiv", other)

    def __floordiv__(self, other: Value | int) -> Value:
        """Unsigned division: both operands must be non-negative."""
        return self._binary("udiv", other)

    def __mod__(self, other: Value | int) -> Value:
        """Unsigned remainder: both operands must be non-negative."""
        return self._binary("urem", other)

    def __and__(self, other: Value | int) -> Value:
        return self._binary("and_", other)

    def __or__(self, other: Value | int) -> Value:
        return self._binary("or_", other)

    def __xor__(self, other: Value | int) -> Value:
        return self._binary("xor", other)

    def __lshift__(self, other: int) -> Value:
        return self._binary("shl", other)

    def __rshift__(self, other: Value | int) -> Value:
        """Logical shift: zeros come in from the left."""
        return self._binary("lshr", other)

    def shift_signed(self, count: int) -> Value:
        """Arithmetic shift to the right: copies of the sign come in from the left."""
        return self._binary("ashr", count)

    def __lt__(self, other: Value | float) -> Value:
        return self._compare("<", other)

    def __ge__(self, other: Value | float) -> Value:
        return self._compare(">=", other)

    def equals(self, other: int) -> Value:
        return self._compare("==", other)

    def differs_from(self, other: int) -> Value:
        return self._compare("!=", other)

    def minimum(self, other: Value | float) -> Value:
        """The smaller of the two; `other` if either is NaN."""
        return (self < other).select(self, other)

    def maximum(self, other: Value | float) -> Value:
        """The larger of the two; `self` if either is NaN."""
        return (self < other).select(other, self)

    def select(self, if_true: Value | float, if_false: Value | float) -> Value:
        """One of two values, chosen lane by lane by this comparison."""
        pattern = if_true if isinstance(if_true, Value) else if_false
        assert isinstance(pattern, Value)
        operands = pattern._operand(if_true), pattern._operand(if_false)
        return self._wrap(self._builder.ir.select(self.ir_value, *operands))

    def splat(self, lanes: int) -> Value:
        """A vector with this number in every lane."""
        make, kind = self._builder.ir, ir.VectorType(self.ir_value.type, lanes)
        first = make.insert_element(ir.Constant(kind, ir.Undefined), self.ir_value, ir.Constant(I32, 0))
        return self._wrap(make.shuffle_vector(first, first, _lane_numbers([0] * lanes)))

    def full_like(self, number: float) -> Value:
        """A constant of this value's type and lanes."""
        return self._wrap(self._operand(number))

    def swap_lanes(self, distance: int) -> Value:
        """Swaps each lane with the one whose index differs in the bit `distance`, a power of two."""
        assert self.lanes is not None
        partners = _lane_numbers([lane ^ distance for lane in range(self.lanes)])
        return self._wrap(self._builder.ir.shuffle_vector(self.ir_value, self.ir_value, partners))

    def butterfly_signs(self, distance: int) -> Value:
        """1 in the lower lane of each pair that `swap_lanes` swaps, -1 in the upper one."""
        assert self.lanes is not None
        signs = [-1.0 if lane & distance else 1.0 for lane in range(self.lanes)]
        return self._wrap(_vector(tuple(signs), F32))

    def convert(self, instruction: str, dtype: ir.Type) -> Value:
        """Converts with the LLVM instruction of that name: zext, sext, trunc, bitcast, fpext, fptrunc,
        sitofp, fptosi."""
        return self._wrap(getattr(self._builder.ir, instruction)(self.ir_value, _type_of(dtype, self.lanes)))

    def intrinsic(self, name: str, *others: Value) -> Value:
        """Calls an LLVM intrinsic whose operands and result all have this value's type."""
        full_name, operands = f"{name}.{_suffix(self.ir_value.type)}", (value.ir_value for value in others)
        return self._wrap(self._builder.call_symbol(full_name, self.ir_value.type, self.ir_value, *operands))

    def multiply_add(self, factor: Value, addend: Value) -> Value:
        """self * factor + addend, in one instruction where the CPU has one."""
        return self.intrinsic("llvm.fmuladd", factor, addend)

    def reduce_sum(self) -> Value:
        """The sum of a vector's lanes; floats are added in the order of `sum_like_lanes`."""
        if self.dtype != F32:
            name = f"llvm.vector.reduce.add.{_suffix(self.ir_value.type)}"
            return self._wrap(self._builder.call_symbol(name, self.dtype, self.ir_value))
        sums = self
        for distance in (1, 2):
            sums = sums + sums.swap_lanes(distance)
        while sums.lanes != 4:
            sums = self._builder.add_halves(sums)
        return self._wrap(self._builder.ir.extract_element(sums.ir_value, ir.Constant(I32, 0)))

    def reduce_max(self) -> Value:
        """The largest float of a vector; NaN if any of them is NaN."""
        name = f"llvm.vector.reduce.fmaximum.{_suffix(self.ir_value.type)}"
        return self._wrap(self._builder.call_symbol(name, F32, self.ir_value))

    def magnitude(self) -> Value:
        """The bits of each float without its sign: as integers they have the order of the magnitudes, and NaN
        is the largest. Comparing integers takes one instruction where floats that may be NaN take five."""
        return self.convert("bitcast", I32) & 0x7FFFFFFF

    def reduce_magnitudes(self) -> Value:
        """The largest float of those with these `magnitude`s; NaN if any is NaN."""
        name = f"llvm.vector.reduce.smax.{_suffix(self.ir_value.type)}"
        return self._wrap(self._builder.call_symbol(name, I32, self.ir_value)).convert("bitcast", F32)

    def _wrap(self, ir_value: ir.Value) -> Value:
        return Value(self._builder, ir_value)

    def _operand(self, other: Value | float) -> ir.Value:
        """The other value, or a number as a constant of this value's type."""
        if isinstance(other, Value):
            return other.ir_value
        if self.lanes is None:
            return ir.Constant(self.ir_value.type, other)
        return _vector((other,) * self.lanes, self.dtype)

    def _binary(self, instruction: str, other: Value | float) -> Value:
        return self._wrap(getattr(self._builder.ir, instruction)(self.ir_value, self._operand(other)))

    def _compare(self, operator: str, other: Value | float) -> Value:
        compare = self._builder.ir.fcmp_ordered if self.dtype == F32 else self._builder.ir.icmp_signed
        return self._wrap(compare(operator, self.ir_value, self._operand(other)))


class Variable:
    """A value that changes while a loop runs; LLVM keeps it in registers."""

    def __init__(self, builder: Builder, value: Value) -> None:
        self._builder = builder
        with builder.ir.goto_entry_block():
            self._slot = builder.ir.alloca(value.ir_value.type)
        self.set(value)

    def get(self) -> Value:
        return Value(self._builder, self._builder.ir.load(self._slot))

    def set(self, value: Value) -> None:
        self._builder.ir.store(value.ir_value, self._slot)


class Builder:
    """Writes one function, from its first instruction to its last."""

    def __init__(self, function: ir.Function, target: Target) -> None:
        self.function = function
        self.target = target
        self.ir = ir.IRBuilder(function.append_basic_block())
        self.arguments = tuple(Value(self, argument) for argument in function.args)
        self.result: Value | None = None
        """The value that the function returns; None: it returns 0."""

    def constant(self, number: float, dtype: ir.Type = I64) -> Value:
        return Value(self, ir.Constant(dtype, number))

    def zeros(self, dtype: ir.Type, lanes: int) -> Value:
        return Value(self, _vector((0,) * lanes, dtype))

    def lane_numbers(self, lanes: int) -> Value:
        """An int32 vector of 0, 1, 2 and so on."""
        return Value(self, _lane_numbers(range(lanes)))

    def variable(self, value: Value) -> Variable:
        return Variable(self, value)

    def load(self, pointer: Value, dtype: ir.Type, lanes: int | None = None) -> Value:
        kind = _type_of(dtype, lanes)
        return Value(self, self.ir.load(pointer.ir_value, align=NUM_BYTES[dtype], typ=kind))

    def store(self, pointer: Value, value: Value) -> None:
        self.ir.store(value.ir_value, pointer.ir_value, align=NUM_BYTES[value.dtype])

    def store_words(self, pointer: Value, *words: Value) -> None:
        """Stores int64 values one after another."""
        for index, word in enumerate(words):
            self.store(pointer + 8 * index, word)

    def load_word(self, pointer: Value, index: Value | int) -> Value:
        """An element of an int64 array."""
        return self.load(pointer + index * 8, I64)

    def load_pointer(self, pointer: Value, index: Value | int) -> Value:
        """An element of an array of pointers."""
        return self.load(pointer + index * 8, POINTER)

    def load_int32(self, pointer: Value, index: Value) -> Value:
        """An element of an int32 array, widened to int64."""
        return self.load(pointer + index * 4, I32).convert("sext", I64)

    def to_pointer(self, address: Value) -> Value:
        return Value(self, self.ir.inttoptr(address.ir_value, POINTER))

    def to_address(self, pointer: Value) -> Value:
        return Value(self, self.ir.ptrtoint(pointer.ir_value, I64))

    def function_address(self, function: Function) -> Value:
        return Value(self, self.ir.ptrtoint(function, I64))

    def prefetch(self, pointer: Value, cache: int = 3) -> None:
        """Prefetches the cache line of an address that will be read soon; any address is allowed.

        `cache` is 3 for all levels of the cache, and 2 for all but the first.
        """
        read, data = ir.Constant(I32, 0), ir.Constant(I32, 1)
        self.call_symbol(
            "llvm.prefetch.p0", ir.VoidType(), pointer.ir_value, read, ir.Constant(I32, cache), data
        )

    def accumulate_dot(self, sums: Value, x: Value, y: Value) -> Value:
        """int32 [n] plus the products of two int8 [4 n], four to a sum; one instruction on some CPUs."""
        wide = ir.VectorType(I32, x.lanes)
        products = self.ir.mul(self.ir.sext(x.ir_value, wide), self.ir.sext(y.ir_value, wide))
        name = f"llvm.vector.partial.reduce.add.{_suffix(sums.ir_value.type)}.{_suffix(wide)}"
        return Value(self, self.call_symbol(name, sums.ir_value.type, sums.ir_value, products))

    def accumulate_dot_lane(self, sums: Value, x: Value, words: Value, lane: int) -> Value:
        """int32 [4] plus the products of int8 [16] with the four int8 of word `lane`, four to a sum."""
        repeated = self.shuffle(words, words, [lane] * 4)
        if self.target.has_dot_product:
            operands = sums.ir_value, x.ir_value, self.ir.bitcast(repeated.ir_value, x.ir_value.type)
            name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
            return Value(self, self.call_symbol(name, sums.ir_value.type, *operands))
        numbers = Value(self, self.ir.bitcast(x.ir_value, sums.ir_value.type))
        for byte in range(4):
            sums = sums + self.signed_byte(numbers, byte) * self.signed_byte(repeated, byte)
        return sums

    def accumulate_dot_word(self, sums: Value, x: Value, word: Value) -> Value:
        """int32 [n] plus the products of uint8 [4 n] with the four int8 of a word, four to a sum."""
        assert sums.lanes is not None
        bits, repeated = 32 * sums.lanes, word.splat(sums.lanes)
        has_avx512 = bits in (256, 512) and self.target.has("avx512vnni")
        if has_avx512 or (bits == 256 and self.target.has("avxvnni")):
            name = f"llvm.x86.avx512.vpdpbusd.{bits}"
            signed = self.ir.bitcast(repeated.ir_value, x.ir_value.type)
            return Value(self, self.call_symbol(name, sums.ir_value.type, sums.ir_value, x.ir_value, signed))
        words = Value(self, self.ir.bitcast(x.ir_value, sums.ir_value.type))
        for byte in range(4):
            unsigned = (words >> (8 * byte)) & 0xFF
            sums = sums + unsigned * self.signed_byte(repeated, byte)
        return sums

    def signed_byte(self, words: Value, byte: int) -> Value:
        """One of the four int8 of each int32."""
        highest = words << (24 - 8 * byte)
        return Value(self, self.ir.ashr(highest.ir_value, highest.full_like(24).ir_value))

    def concatenate(self, vectors: Sequence[Value]) -> Value:
        """Joins vectors, which have equally many lanes and whose number is a power of two, into one."""
        if len(vectors) == 1:
            return vectors[0]
        pairs = zip(vectors[::2], vectors[1::2])
        return self.concatenate([self.shuffle(x, y, range(2 * (x.lanes or 0))) for x, y in pairs])

    def largest_magnitude(self, vectors: Sequence[Value]) -> Value:
        """The largest magnitude of the floats in the vectors; NaN if any is NaN."""
        magnitudes = [vector.magnitude() for vector in vectors]
        return functools.reduce(lambda x, y: x.intrinsic("llvm.smax", y), magnitudes).reduce_magnitudes()

    def hide(self, pointer: Value) -> Value:
        """The same pointer, disguised from LLVM's optimizer: what it points to is loaded again."""
        kind = ir.FunctionType(POINTER, [POINTER])
        return Value(self, self.ir.asm(kind, "", "=r,0", [pointer.ir_value], True))

    def finish(self, vectors: Sequence[Value]) -> list[Value]:
        """The same vectors, behind a barrier: no later load is moved ahead of their computation.

        LLVM would otherwise do the loads of all rows of a tile first, and spill what registers cannot hold.
        """
        kinds = [vector.ir_value.type for vector in vectors]
        register = "w" if self.target.arch == "aarch64" else "x"
        places = [f"={register}"] * len(kinds) + [str(index) for index in range(len(kinds))]
        returned = kinds[0] if len(kinds) == 1 else ir.LiteralStructType(kinds)
        kind, operands = ir.FunctionType(returned, kinds), [vector.ir_value for vector in vectors]
        result = self.ir.asm(kind, "", ",".join([*places, "~{memory}"]), operands, True)
        if len(kinds) == 1:
            return [Value(self, result)]
        return [Value(self, self.ir.extract_value(result, index)) for index in range(len(kinds))]

    def reduce_sums(self, first: Value, second: Value, third: Value, fourth: Value) -> Value:
        """The `reduce_sum` of each of four vectors, as one vector; they have at least four lanes each."""
        sums = self._add_pairs(self._add_pairs(first, second), self._add_pairs(third, fourth))
        while sums.lanes != 4:
            sums = self.add_halves(sums)
        return sums

    def _add_pairs(self, x: Value, y: Value) -> Value:
        """In each block of four lanes: both sums of neighbouring lanes of x, then both of y.

        Wide registers shuffle cheaply only within blocks of four.
        """
        assert x.lanes is not None
        blocks = range(0, x.lanes, 4)
        even = [start + vector + lane for start in blocks for vector in (0, x.lanes) for lane in (0, 2)]
        return self.shuffle(x, y, even) + self.shuffle(x, y, [lane + 1 for lane in even])

    def add_halves(self, x: Value) -> Value:
        """The first half of a vector plus its second half."""
        assert x.lanes is not None
        half = x.lanes // 2
        return self.shuffle(x, x, range(half)) + self.shuffle(x, x, range(half, x.lanes))

    def shuffle(self, x: Value, y: Value, lanes: Sequence[int]) -> Value:
        """A vector of these lanes of the concatenation of x and y."""
        return Value(self, self.ir.shuffle_vector(x.ir_value, y.ir_value, _lane_numbers(lanes)))

    @contextmanager
    def loop(self, start: Value | int, stop: Value | int, step: int = 1) -> Iterator[Value]:
        """Repeats what is written inside for each index, as Python's `range` counts."""
        make, first = self.ir, start if isinstance(start, Value) else self.constant(start)
        before, head, body, after = make.block, *(make.append_basic_block() for _ in range(3))
        make.branch(head)
        make.position_at_end(head)
        counter = make.phi(I64)
        counter.add_incoming(first.ir_value, before)
        index = Value(self, counter)
        make.cbranch((index < stop).ir_value, body, after)
        make.position_at_end(body)
        yield index
        counter.add_incoming((index + step).ir_value, make.block)
        make.branch(head)
        make.position_at_end(after)

    @contextmanager
    def repeat(self) -> Iterator[ir.Block]:
        """Repeats what is written inside until `break_if` leaves for the block that this yields."""
        body, after = (self.ir.append_basic_block() for _ in range(2))
        self.ir.branch(body)
        self.ir.position_at_end(body)
        yield after
        self.ir.branch(body)
        self.ir.position_at_end(after)

    def break_if(self, condition: Value, after: ir.Block) -> None:
        rest = self.ir.append_basic_block()
        self.ir.cbranch(condition.ir_value, after, rest)
        self.ir.position_at_end(rest)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """What is written inside runs only if the condition holds."""
        with self.ir.if_then(condition.ir_value):
            yield

    def atomic_add(self, pointer: Value, number: Value | int) -> Value:
        """Adds to an int64 and returns its previous value; sequentially consistent."""
        added = number.ir_value if isinstance(number, Value) else ir.Constant(I64, number)
        return Value(self, self.ir.atomic_rmw("add", pointer.ir_value, added, "seq_cst"))

    def atomic_load(self, pointer: Value) -> Value:
        """Reads an int64; sequentially consistent."""
        return Value(self, self.ir.load_atomic(pointer.ir_value, "seq_cst", 8, typ=I64))

    def call(self, function: Value | Function, *arguments: Value) -> Value:
        """Calls a function of int64 that returns int64, given its address or as one of this program's own."""
        kind = ir.PointerType(ir.FunctionType(I64, [I64] * len(arguments)))
        callee = self.ir.inttoptr(function.ir_value, kind) if isinstance(function, Value) else function
        return Value(self, self.ir.call(callee, [value.ir_value for value in arguments]))

    def stack_words(self, count: int) -> Value:
        """Room for `count` int64 on this function's stack."""
        with self.ir.goto_entry_block():
            slot = self.ir.alloca(ir.ArrayType(I64, count))
        return self._untyped(slot)

    def string(self, text: str) -> Value:
        """A pointer to a constant string that ends with a zero byte."""
        return self.constant_bytes(text.encode() + b"\0")

    def constant_bytes(self, data: bytes) -> Value:
        """A pointer to constant bytes."""
        kind = ir.ArrayType(I8, len(data))
        module = self.function.module
        constant = ir.GlobalVariable(module, kind, f"constant_{len(module.globals)}")
        constant.global_constant, constant.linkage = True, "private"
        constant.initializer = ir.Constant(kind, bytearray(data))
        return self._untyped(constant)

    def allocate(self, num_bytes: Value) -> Value:
        """Allocates whole cache lines, because a vector that straddles two is read twice; null on failure."""
        whole_lines = (num_bytes + (CACHE_LINE_BYTES - 1)) // CACHE_LINE_BYTES * CACHE_LINE_BYTES
        alignment = ir.Constant(I64, CACHE_LINE_BYTES)
        return Value(self, self.call_symbol("aligned_alloc", POINTER, alignment, whole_lines.ir_value))

    def free(self, pointer: Value) -> None:
        self.call_symbol("free", ir.VoidType(), pointer.ir_value)

    def yield_processor(self) -> None:
        self.call_symbol("sched_yield", I32)

    def pause(self) -> None:
        """Waits a few dozen cycles, and uses little of what the threads of one core share."""
        if self.target.arch == "aarch64":  # ARM's own hint for this does nothing on many CPUs
            self.call_symbol("llvm.aarch64.isb", ir.VoidType(), ir.Constant(I32, 15))
        else:
            self.call_symbol("llvm.x86.sse2.pause", ir.VoidType())

    def call_symbol(self, name: str, returns: ir.Type, *arguments: ir.Value) -> ir.Value:
        """Calls an LLVM intrinsic or a function of the C library."""
        module = self.function.module
        kind = ir.FunctionType(returns, [value.type for value in arguments])
        function = module.globals.get(name) or ir.Function(module, kind, name)
        return self.ir.call(function, list(arguments))

    def _untyped(self, pointer: ir.Value) -> Value:
        """The same pointer without a pointee type: with one, llvmlite refuses to store any other type."""
        return self.to_pointer(Value(self, self.ir.ptrtoint(pointer, I64)))


def sum_like_lanes(part: Callable[[int], Sequence[Value]], count: int) -> list[Value]:
    """Adds `count` parts, each a list of values, in the order in which `reduce_sum` adds lanes.

    That is: pairs within each block of four, then the two sums of each block, then the blocks by halves.
    Float sums are bit-identical only if they are added in the same order. `part` is called when a part is
    needed, so that few parts are held at a time.
    """

    def add(x: Sequence[Value], y: Sequence[Value]) -> list[Value]:
        return [one + other for one, other in zip(x, y, strict=True)]

    def add_blocks(starts: Sequence[int]) -> list[Value]:
        if len(starts) > 1:
            return add(add_blocks(starts[::2]), add_blocks(starts[1::2]))
        start = starts[0]
        return add(add(part(start), part(start + 1)), add(part(start + 2), part(start + 3)))

    return add_blocks(range(0, count, 4))


def _lane_numbers(lanes: Sequence[int]) -> ir.Constant:
    return _vector(tuple(lanes), I32)


def _vector(numbers: tuple[float, ...], dtype: ir.Type) -> ir.Constant:
    """A constant vector, cached: kernels repeat the same ones, and llvmlite then formats each only once."""
    return _vector_by_text(str(numbers), numbers, dtype)


@functools.lru_cache(maxsize=1024)
def _vector_by_text(_: str, numbers: tuple[float, ...], dtype: ir.Type) -> ir.Constant:
    """Cached by text, because 0.0 and -0.0 are equal as keys."""
    return ir.Constant(ir.VectorType(dtype, len(numbers)), list(numbers))


def _type_of(dtype: ir.Type, lanes: int | None) -> ir.Type:
    return dtype if lanes is None else ir.VectorType(dtype, lanes)


def _suffix(kind: ir.Type) -> str:
    """The type as it is spelled in the names of LLVM's intrinsics."""
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{_suffix(kind.element)}"
    return f"f{8 * NUM_BYTES[kind]}" if kind in (F16, F32) else f"i{8 * NUM_BYTES[kind]}"
