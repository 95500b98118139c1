"""Functions for the CPU at hand, written value by value; `program` compiles them.

A thin layer over llvmlite. Python's operators write instructions and Python's own loops repeat them; `loop`
and `when` write what is only known when the function runs. A pointer counts bytes. A vector may have any
number of lanes: LLVM spreads it over the registers that the CPU has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from llvmlite import ir

from levserve.jit.target import Target

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
POINTER = ir.PointerType(I8)
NUM_BYTES = {I8: 1, I16: 2, F16: 2, I32: 4, F32: 4, I64: 8}
ROUNDER = 1.5 * 2**23
"""Added to a small float it leaves no room for a fraction, and the rounded number in the lowest bits."""
LINE_BYTES = 64
"""Of the cache."""
Function: TypeAlias = ir.Function
"""One of a program, for others of it."""


class Value:
    """A number or a vector of numbers, whole or float32, that the function has at this point."""

    def __init__(self, builder: Builder, made: ir.Value) -> None:
        self._builder = builder
        self.made = made

    @property
    def kind(self) -> ir.Type:
        """The type of its numbers."""
        return self.made.type.element if isinstance(self.made.type, ir.VectorType) else self.made.type

    @property
    def lanes(self) -> int | None:
        return self.made.type.count if isinstance(self.made.type, ir.VectorType) else None

    def __add__(self, other: Value | float) -> Value:
        if self.made.type == POINTER:  # written so, LLVM finds the address modes that the CPU has
            offset = other.made if isinstance(other, Value) else ir.Constant(I64, other)
            return self._with(self._builder.ir.gep(self.made, [offset], source_etype=I8))
        return self._binary("fadd" if self.kind == F32 else "add", other)

    def __sub__(self, other: Value | float) -> Value:
        return self._binary("fsub" if self.kind == F32 else "sub", other)

    def __mul__(self, other: Value | float) -> Value:
        return self._binary("fmul" if self.kind == F32 else "mul", other)

    def __truediv__(self, other: Value | float) -> Value:
        return self._binary("fdiv", other)

    def __floordiv__(self, other: Value | int) -> Value:
        """Of what is not negative, by what is not."""
        return self._binary("udiv", other)

    def __mod__(self, other: Value | int) -> Value:
        return self._binary("urem", other)

    def __and__(self, other: Value | int) -> Value:
        return self._binary("and_", other)

    def __or__(self, other: Value | int) -> Value:
        return self._binary("or_", other)

    def __lshift__(self, other: int) -> Value:
        return self._binary("shl", other)

    def __rshift__(self, other: int) -> Value:
        """Of what is not negative."""
        return self._binary("lshr", other)

    def __lt__(self, other: Value | float) -> Value:
        return self._compare("<", other)

    def __ge__(self, other: Value | float) -> Value:
        return self._compare(">=", other)

    def is_(self, other: int) -> Value:
        return self._compare("==", other)

    def is_not(self, other: int) -> Value:
        return self._compare("!=", other)

    def least(self, other: Value | float) -> Value:
        """The smaller one; of floats, the other if this is not a number."""
        return (self < other).choose(self, other)

    def most(self, other: Value | float) -> Value:
        """The larger one; of floats, this one if it is not a number."""
        return (self < other).choose(other, self)

    def choose(self, yes: Value | float, no: Value | float) -> Value:
        """Of a comparison: one of two, lane by lane."""
        pattern = yes if isinstance(yes, Value) else no
        assert isinstance(pattern, Value)
        return self._with(self._builder.ir.select(self.made, pattern._like(yes), pattern._like(no)))

    def splat(self, lanes: int) -> Value:
        """The same number in every lane."""
        make, kind = self._builder.ir, ir.VectorType(self.made.type, lanes)
        one = make.insert_element(ir.Constant(kind, ir.Undefined), self.made, ir.Constant(I32, 0))
        return self._with(make.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)))

    def like(self, number: float) -> Value:
        """A number, or a vector of it, of this type."""
        return self._with(self._like(number))

    def swapped(self, distance: int) -> Value:
        """Each number of a vector in the place of the one at this distance, a power of two."""
        assert self.lanes is not None
        places = ir.Constant(ir.VectorType(I32, self.lanes), [lane ^ distance for lane in range(self.lanes)])
        return self._with(self._builder.ir.shuffle_vector(self.made, self.made, places))

    def signs(self, distance: int) -> Value:
        """1 where the number at this distance comes later, else -1."""
        assert self.lanes is not None
        return self._with(
            ir.Constant(self.made.type, [-1.0 if lane & distance else 1.0 for lane in range(self.lanes)])
        )

    def convert(self, instruction: str, kind: ir.Type) -> Value:
        """By LLVM's instruction of that name: zext, sext, trunc, bitcast, fpext, sitofp."""
        return self._with(getattr(self._builder.ir, instruction)(self.made, _shaped(kind, self.lanes)))

    def call(self, intrinsic: str, *others: Value) -> Value:
        """LLVM's function of that name, of this and others of the same type, which it gives too."""
        name, given = f"{intrinsic}.{_spell(self.made.type)}", (value.made for value in others)
        return self._with(self._builder.intrinsic(name, self.made.type, self.made, *given))

    def times_plus(self, factor: Value, addend: Value) -> Value:
        """Multiplied and added to, in one instruction where there is one."""
        return self.call("llvm.fmuladd", factor, addend)

    def total(self) -> Value:
        """The sum of a vector; of floats in the order of `add_up`."""
        if self.kind != F32:
            return self._with(
                self._builder.intrinsic(
                    f"llvm.vector.reduce.add.{_spell(self.made.type)}", self.kind, self.made
                )
            )
        folded = self
        for distance in (1, 2):
            folded = folded + folded.swapped(distance)
        while folded.lanes != 4:
            folded = self._builder.fold(folded)
        return self._with(self._builder.ir.extract_element(folded.made, ir.Constant(I32, 0)))

    def largest(self) -> Value:
        """The largest of a vector of floats; not a number if one of them is none."""
        return self._with(
            self._builder.intrinsic(f"llvm.vector.reduce.fmaximum.{_spell(self.made.type)}", F32, self.made)
        )

    def _with(self, made: ir.Value) -> Value:
        return Value(self._builder, made)

    def _like(self, other: Value | float) -> ir.Value:
        if isinstance(other, Value):
            return other.made
        return ir.Constant(self.made.type, other if self.lanes is None else [other] * self.lanes)

    def _binary(self, instruction: str, other: Value | float) -> Value:
        return self._with(getattr(self._builder.ir, instruction)(self.made, self._like(other)))

    def _compare(self, sign: str, other: Value | float) -> Value:
        compare = self._builder.ir.fcmp_ordered if self.kind == F32 else self._builder.ir.icmp_signed
        return self._with(compare(sign, self.made, self._like(other)))


class Variable:
    """What changes while a loop runs; LLVM keeps it in registers."""

    def __init__(self, builder: Builder, value: Value) -> None:
        self._builder = builder
        with builder.ir.goto_entry_block():
            self._place = builder.ir.alloca(value.made.type)
        self.set(value)

    def get(self) -> Value:
        return Value(self._builder, self._builder.ir.load(self._place))

    def set(self, value: Value) -> None:
        self._builder.ir.store(value.made, self._place)


class Builder:
    """Writes one function, from its first instruction to its last."""

    def __init__(self, function: ir.Function, target: Target) -> None:
        self.function = function
        self.target = target
        self.ir = ir.IRBuilder(function.append_basic_block())
        self.given = tuple(Value(self, argument) for argument in function.args)
        self.returned: Value | None = None
        """What the function gives, if not 0."""

    def number(self, number: float, kind: ir.Type = I64) -> Value:
        return Value(self, ir.Constant(kind, number))

    def zeros(self, kind: ir.Type, lanes: int) -> Value:
        return Value(self, ir.Constant(ir.VectorType(kind, lanes), [0] * lanes))

    def variable(self, value: Value) -> Variable:
        return Variable(self, value)

    def load(self, pointer: Value, kind: ir.Type, lanes: int | None = None) -> Value:
        return Value(self, self.ir.load(self._to(pointer, _shaped(kind, lanes)), align=NUM_BYTES[kind]))

    def store(self, pointer: Value, value: Value) -> None:
        self.ir.store(value.made, self._to(pointer, value.made.type), align=NUM_BYTES[value.kind])

    def word(self, pointer: Value, index: Value | int) -> Value:
        return self.load(pointer + index * 8, I64)

    def follow(self, pointer: Value, index: Value | int) -> Value:
        """A word that is a pointer."""
        return self.as_pointer(self.word(pointer, index))

    def as_pointer(self, address: Value) -> Value:
        return Value(self, self.ir.inttoptr(address.made, POINTER))

    def as_number(self, pointer: Value) -> Value:
        return Value(self, self.ir.ptrtoint(pointer.made, I64))

    def index(self, pointer: Value, index: Value) -> Value:
        """An int32 of an array, as an int64."""
        return self.load(pointer + index * 4, I32).convert("sext", I64)

    def prefetch(self, pointer: Value) -> None:
        """Asks for the cache line of what will be read soon, and need not be there."""
        self.intrinsic(
            "llvm.prefetch.p0",
            ir.VoidType(),
            pointer.made,
            *(ir.Constant(I32, option) for option in (0, 3, 1)),
        )

    def dot_into(self, sums: Value, x: Value, y: Value) -> Value:
        """int32 [n] + the products of int8 [4 n], four neighbours to a sum: one instruction, where the CPU
        has one for it."""
        wide = ir.VectorType(I32, x.lanes)
        products = self.ir.mul(self.ir.sext(x.made, wide), self.ir.sext(y.made, wide))
        name = f"llvm.vector.partial.reduce.add.{_spell(sums.made.type)}.{_spell(wide)}"
        return Value(self, self.intrinsic(name, sums.made.type, sums.made, products))

    def dot_word_into(self, sums: Value, x: Value, word: Value) -> Value:
        """int32 [n] + the products of uint8 [4 n], four neighbours to a sum, with four int8, the same ones,
        that a word holds."""
        assert sums.lanes is not None
        bits, four = 32 * sums.lanes, word.splat(sums.lanes)
        has_avx512 = bits in (256, 512) and self.target.has("avx512vnni")
        if has_avx512 or (bits == 256 and self.target.has("avxvnni")):
            signed = self.ir.bitcast(four.made, x.made.type)
            return Value(
                self,
                self.intrinsic(f"llvm.x86.avx512.vpdpbusd.{bits}", sums.made.type, sums.made, x.made, signed),
            )
        whole = Value(self, self.ir.bitcast(x.made, sums.made.type))
        for place in range(4):
            unsigned = (whole >> (8 * place)) & 0xFF
            signed = self.ir.ashr((four << (24 - 8 * place)).made, four.like(24).made)
            sums = sums + unsigned * Value(self, signed)
        return sums

    def joined(self, parts: Sequence[Value]) -> Value:
        """Vectors of as many lanes each, one after another; a power of two of them."""
        if len(parts) == 1:
            return parts[0]
        pairs = zip(parts[::2], parts[1::2])
        return self.joined([self._shuffled(x, y, range(2 * (x.lanes or 0))) for x, y in pairs])

    def totals(self, first: Value, second: Value, third: Value, fourth: Value) -> Value:
        """Of each of four vectors of as many lanes, four or more, in the order of `add_up`."""
        total = self._add_pairs(self._add_pairs(first, second), self._add_pairs(third, fourth))
        while total.lanes != 4:
            total = self.fold(total)
        return total

    def _add_pairs(self, x: Value, y: Value) -> Value:
        """In each four of the lanes, which a CPU can keep apart: the sums of neighbours in x, then of those
        in y."""
        assert x.lanes is not None
        fours = range(0, x.lanes, 4)
        even = [start + at + lane for start in fours for at in (0, x.lanes) for lane in (0, 2)]
        return self._shuffled(x, y, even) + self._shuffled(x, y, [place + 1 for place in even])

    def fold(self, x: Value) -> Value:
        """The first half of a vector and the second, added."""
        assert x.lanes is not None
        half = x.lanes // 2
        return self._shuffled(x, x, range(half)) + self._shuffled(x, x, range(half, x.lanes))

    def _shuffled(self, x: Value, y: Value, places: Sequence[int]) -> Value:
        """Lanes of x, and of y, which are counted on."""
        wanted = ir.Constant(ir.VectorType(I32, len(places)), list(places))
        return Value(self, self.ir.shuffle_vector(x.made, y.made, wanted))

    @contextmanager
    def loop(self, start: Value | int, stop: Value | int, step: int = 1) -> Iterator[Value]:
        make, first = self.ir, start if isinstance(start, Value) else self.number(start)
        before, head, body, after = make.block, *(make.append_basic_block() for _ in range(3))
        make.branch(head)
        make.position_at_end(head)
        counter = make.phi(I64)
        counter.add_incoming(first.made, before)
        index = Value(self, counter)
        make.cbranch((index < stop).made, body, after)
        make.position_at_end(body)
        yield index
        counter.add_incoming((index + step).made, make.block)
        make.branch(head)
        make.position_at_end(after)

    @contextmanager
    def repeat(self) -> Iterator[ir.Block]:
        """Again and again, until a branch goes to the block that it gives."""
        body, after = (self.ir.append_basic_block() for _ in range(2))
        self.ir.branch(body)
        self.ir.position_at_end(body)
        yield after
        self.ir.branch(body)
        self.ir.position_at_end(after)

    def leave_if(self, condition: Value, after: ir.Block) -> None:
        going_on = self.ir.append_basic_block()
        self.ir.cbranch(condition.made, after, going_on)
        self.ir.position_at_end(going_on)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        with self.ir.if_then(condition.made):
            yield

    def atomic_add(self, pointer: Value, number: int) -> Value:
        """Adds, and gives what was there; all threads agree on the order of these, and of what is written
        before and read after."""
        return Value(
            self, self.ir.atomic_rmw("add", self._to(pointer, I64), ir.Constant(I64, number), "seq_cst")
        )

    def atomic_get(self, pointer: Value) -> Value:
        return Value(self, self.ir.load_atomic(self._to(pointer, I64), "seq_cst", 8))

    def call(self, function: Value | Function, *given: Value) -> Value:
        """Of int64 to int64."""
        kind = ir.PointerType(ir.FunctionType(I64, [I64] * len(given)))
        target = self.ir.inttoptr(function.made, kind) if isinstance(function, Value) else function
        return Value(self, self.ir.call(target, [value.made for value in given]))

    def address(self, function: Function) -> Value:
        return Value(self, self.ir.ptrtoint(function, I64))

    def stack_words(self, count: int) -> Value:
        """Memory of this function's own, for so many words."""
        with self.ir.goto_entry_block():
            place = self.ir.alloca(ir.ArrayType(I64, count))
        return Value(self, self.ir.bitcast(place, POINTER))

    def text(self, text: str) -> Value:
        """A constant that ends with a zero, as C has it."""
        data = bytearray(text.encode() + b"\0")
        kind = ir.ArrayType(I8, len(data))
        constant = ir.GlobalVariable(self.function.module, kind, f"text_{len(self.function.module.globals)}")
        constant.global_constant, constant.linkage = True, "private"
        constant.initializer = ir.Constant(kind, data)
        return Value(self, self.ir.bitcast(constant, POINTER))

    def allocate(self, num_bytes: Value) -> Value:
        """Memory that begins with a cache line, since a vector across two is read twice; a null pointer if
        there is none."""
        lines = (num_bytes + (LINE_BYTES - 1)) // LINE_BYTES * LINE_BYTES
        return Value(self, self.intrinsic("aligned_alloc", POINTER, ir.Constant(I64, LINE_BYTES), lines.made))

    def free(self, pointer: Value) -> None:
        self.intrinsic("free", ir.VoidType(), pointer.made)

    def yield_processor(self) -> None:
        self.intrinsic("sched_yield", I32)

    def intrinsic(
        self, name: str, gives: ir.Type, *given: ir.Value, fastmath: Sequence[str] = ()
    ) -> ir.Value:
        module = self.function.module
        function = module.globals.get(name) or ir.Function(
            module, ir.FunctionType(gives, [value.type for value in given]), name
        )
        return self.ir.call(function, list(given), fastmath=fastmath)

    def _to(self, pointer: Value, kind: ir.Type) -> ir.Value:
        return self.ir.bitcast(pointer.made, ir.PointerType(kind))


def add_up(part: Callable[[int], Sequence[Value]], count: int) -> list[Value]:
    """Adds values that come in parts, as the lanes of a vector are added: pairs in each four, those pairs,
    and then the fours by halves.

    Floats are the same only if they are added in the same order. A part is asked for when it is needed.
    """

    def pairwise(x: Sequence[Value], y: Sequence[Value]) -> list[Value]:
        return [one + other for one, other in zip(x, y, strict=True)]

    def add(fours: Sequence[int]) -> list[Value]:
        if len(fours) > 1:
            return pairwise(add(fours[::2]), add(fours[1::2]))
        return pairwise(
            pairwise(part(fours[0]), part(fours[0] + 1)), pairwise(part(fours[0] + 2), part(fours[0] + 3))
        )

    return add(range(0, count, 4))


def _shaped(kind: ir.Type, lanes: int | None) -> ir.Type:
    return kind if lanes is None else ir.VectorType(kind, lanes)


def _spell(kind: ir.Type) -> str:
    """As in the names of LLVM's own functions."""
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{_spell(kind.element)}"
    return f"f{8 * NUM_BYTES[kind]}" if kind in (F16, F32) else f"i{8 * NUM_BYTES[kind]}"
