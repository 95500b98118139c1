"""Runs the PTX of our kernels, without a GPU: the instructions that they use, for whole warps at once.

Warps of a program take turns at barriers. Branches must be taken by all threads of a warp or by none.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

Registers = dict[str, np.ndarray]
LANES = 32
MASK = np.uint64(0xFFFFFFFF)
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
PLACE = 1 << 32
"""Arrays begin at multiples of this address."""


def run(
    text: str, arrays: Sequence[np.ndarray], out: np.ndarray, grid: tuple[int, int, int], num_warps: int
) -> None:
    """Runs every program of the grid; `out` is written to."""
    lines = [line.strip() for line in re.split(r";|(?<=:) ", text.strip()[1:-1]) if line.strip()]
    lines = [line for line in lines if not line.startswith((".reg", ".shared"))]
    found = re.search(r"memory\[(\d+)\]", text)
    memories = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    memories.append(out.reshape(-1).view(np.uint8))
    for place in itertools.product(*map(range, grid)):
        shared = Shared(int(found[1]) if found else 0)
        warps = [Warp(lines, number, place, memories, shared).steps() for number in range(num_warps)]
        while warps:
            warps = [warp for warp in warps if next(warp, None) is not None]


class WideProduct(NamedTuple):
    """An instruction of tensor cores that has begun: its registers, and the factors as they were then."""

    into: list[str]
    left: list[str]
    a: np.ndarray
    descriptor: int
    b: np.ndarray


class Shared:
    """Memory that the warps of a program share."""

    def __init__(self, size: int) -> None:
        self.bytes = np.full(size, 0xAA, np.uint8)
        self.is_fenced = np.zeros(size, bool)
        """What tensor cores may read: bytes for which the warp that wrote them has made a fence since."""


class Warp:
    def __init__(
        self,
        lines: list[str],
        number: int,
        place: tuple[int, ...],
        memories: list[np.ndarray],
        shared: Shared,
    ) -> None:
        self.lines, self.memories, self.shared = lines, memories, shared
        self.labels = {line[:-1]: index for index, line in enumerate(lines) if line.endswith(":")}
        self.registers: Registers = {"%tid.x": np.arange(LANES, dtype=np.uint64) + LANES * number}
        for axis, value in zip("xyz", place, strict=True):
            self.registers[f"%ctaid.{axis}"] = np.full(LANES, value, np.uint64)
        for index in range(len(memories)):
            self.registers[f"${index + 1}"] = np.full(LANES, (index + 1) * PLACE, np.uint64)
        self.registers["memory"] = np.zeros(LANES, np.uint64)
        self.copies: list[list[Callable[[], None]]] = [[]]
        self.unfenced: list[slice] = []
        """Shared memory that this warp has written since its last fence."""
        self.written: set[str] = set()
        """Registers, likewise."""
        self.products: list[list[WideProduct]] = [[]]
        """Those that tensor cores are at, by the groups in which they are waited for."""
        self.loaded: set[int] = set()
        self.fetched: set[int] = set()
        """Addresses outside of shared memory, of loads and of fetches into a cache."""

    def steps(self) -> Iterator[bool]:
        """Yields at every barrier."""
        at = 0
        while at < len(self.lines):
            line = self.lines[at]
            at += 1
            if line.endswith(":"):
                continue
            mask = np.ones(LANES, bool)
            if line.startswith("@"):
                guard, line = line.split(" ", 1)
                mask = self.registers[guard[1:]].astype(bool)
            name, _, rest = line.partition(" ")
            if name == "bra":
                assert mask.all() or not mask.any(), "a warp stays together"
                at = self.labels[rest] if mask.all() else at
            elif name == "bar.sync":
                yield True
            elif mask.any():
                self._step(name, OPERAND.findall(rest), mask)
        assert self.fetched <= self.loaded, "nothing is fetched that the warp does not load"

    def _step(self, name: str, operands: list[str], mask: np.ndarray) -> None:
        if name.startswith(("ld.", "st.")):
            self._move(name, operands, mask)
        elif name == "prefetch.global.L2":
            self.fetched.update(self._address(operands[0])[mask].tolist())
        elif name.startswith("cp.async"):
            self._copy(name, operands, mask)
        elif name.startswith("mma."):
            self._multiply(operands)
        elif name == "fence.proxy.async.shared::cta":
            for place in self.unfenced:
                self.shared.is_fenced[place] = True
            self.unfenced = []
        elif name.startswith("wgmma."):
            self._multiply_wide(name, operands)
        elif name == "mov.b64" and operands[1].startswith("{"):
            low, high = map(self.value, names(operands[1]))
            self.registers[operands[0]] = low | high << np.uint64(32)
        elif name == "mov.b32" and operands[0].startswith("{"):
            low, high = names(operands[0])
            value = self.value(operands[1])
            self.registers[low], self.registers[high] = value & np.uint64(0xFFFF), value >> np.uint64(16)
        else:
            into, *given = operands
            operation, kind = name.split(".", 1)
            result = compute(operation, kind, [self.value(each) for each in given])
            before = self.registers.get(into, result)
            self.registers[into] = np.where(mask, result, before)
            self.written.add(into)

    def value(self, operand: str) -> np.ndarray:
        if operand in self.registers:
            return self.registers[operand]
        if operand.startswith("0f"):
            return np.full(LANES, int(operand[2:], 16), np.uint64)
        return np.full(LANES, int(operand, 0), np.uint64)

    def _address(self, operand: str) -> np.ndarray:
        register, _, offset = operand.strip("[]").partition("+")
        return self.value(register) + np.uint64(int(offset or 0))

    def _memory(self, address: int, is_shared: bool) -> tuple[np.ndarray, int]:
        if is_shared:
            return self.shared.bytes, address
        return self.memories[address // PLACE - 1], address % PLACE

    def _move(self, name: str, operands: list[str], mask: np.ndarray) -> None:
        is_load = name.startswith("ld.")
        at, part = operands[::-1] if is_load else operands
        registers, addresses = names(part), self._address(at)
        size = 4 * len(registers)
        values = np.stack([self.registers.get(each, np.zeros(LANES, np.uint64)) for each in registers], 1)
        for lane in np.flatnonzero(mask):
            memory, start = self._memory(int(addresses[lane]), ".shared" in name)
            assert start % size == 0 and start + size <= len(memory), (name, start, size, len(memory))
            if is_load:
                values[lane] = memory[start : start + size].view(np.uint32)
            else:
                memory[start : start + size] = values[lane].astype(np.uint32).view(np.uint8)
        if is_load:
            if ".global" in name:
                self.loaded.update(addresses[mask].tolist())
            for number, register in enumerate(registers):
                self.registers[register] = values[:, number]

    def _copy(self, name: str, operands: list[str], mask: np.ndarray) -> None:
        if name.endswith("commit_group"):
            self.copies.append([])
        elif name.endswith("wait_group"):
            left = int(operands[0])
            # What was begun last is not committed yet.
            while len(self.copies) - 1 > left:
                for copy in self.copies.pop(0):
                    copy()
        else:
            to, source = self._address(operands[0]), self._address(operands[1])

            def copy() -> None:
                for lane in np.flatnonzero(mask):
                    memory, start = self._memory(int(source[lane]), False)
                    assert start % 16 == 0 and start + 16 <= len(memory) and int(to[lane]) % 16 == 0
                    place = slice(int(to[lane]), int(to[lane]) + 16)
                    self.shared.bytes[place] = memory[start : start + 16]
                    self.shared.is_fenced[place] = False
                    self.unfenced.append(place)

            self.copies[-1].append(copy)

    def _left_factor(self, registers: list[str]) -> np.ndarray:
        a = np.zeros((16, 16), np.float32)
        lane = np.arange(LANES)
        g, t = lane // 4, lane % 4
        for number, register in enumerate(registers):
            pairs = halves(self.registers[register])
            for half in range(2):
                a[g + 8 * (number % 2), 2 * t + half + 8 * (number // 2)] = pairs[:, half]
        return a

    def _multiply_wide(self, name: str, operands: list[str]) -> None:
        """An instruction of four warps; each of them has its own outputs, so here it does its part alone."""
        if name == "wgmma.fence.sync.aligned":
            self.written = set()
        elif name == "wgmma.commit_group.sync.aligned":
            self.products.append([])
        elif name == "wgmma.wait_group.sync.aligned":
            while len(self.products) - 1 > int(operands[0]):
                for product in self.products.pop(0):
                    self._finish(product)
        else:
            found = re.fullmatch(r"wgmma.mma_async.sync.aligned.m64n(\d+)k16.f32.bf16.bf16", name)
            assert found and operands[3:] == [operands[3], "1", "1", "0"] and self.value(operands[3]).all()
            into, left = names(operands[0]), names(operands[1])
            assert len(into) == int(found[1]) // 2
            assert not self.written & {*into, *left}, "a fence comes after what was written to registers"
            descriptor = int(self.value(operands[2])[0])
            right = self._right_factor(descriptor, int(found[1]))
            product = WideProduct(into, left, self._left_factor(left), descriptor, right)
            self.products[-1].append(product)

    def _right_factor(self, descriptor: int, num_rows: int) -> np.ndarray:
        """[input, row] from shared memory, 128 bytes of a row side by side, swizzled."""
        assert descriptor >> 62 == 1 and descriptor >> 32 & 0x3FFF == 1024 >> 4
        start = (descriptor & 0x3FFF) << 4
        rows, inputs = np.arange(num_rows)[:, None], np.arange(16)[None, :]
        at = start + rows // 8 * 1024 + rows % 8 * 128 + 2 * inputs
        at ^= (at >> 7 & 7) << 4
        places = np.stack([at, at + 1], -1)
        assert self.shared.is_fenced[places].all()
        found = self.shared.bytes[places].view(ml_dtypes.bfloat16)[..., 0]
        return found.astype(np.float32).T

    def _finish(self, product: WideProduct) -> None:
        """Adds a product to its sums; until now its factors must have stayed where they were."""
        assert np.array_equal(product.a, self._left_factor(product.left))
        assert np.array_equal(product.b, self._right_factor(product.descriptor, product.b.shape[1]))
        lane = np.arange(LANES)
        g, t = lane // 4, lane % 4
        d = product.a @ product.b
        for number, register in enumerate(product.into):
            tile, place = divmod(number, 4)
            found = d[g + 8 * (place // 2), 8 * tile + 2 * t + place % 2]
            self.registers[register] = as_bits(as_float(self.registers[register]) + found)

    def _multiply(self, operands: list[str]) -> None:
        into, left, right, given = map(names, operands)
        a, b = self._left_factor(left), np.zeros((16, 8), np.float32)
        c = np.zeros((16, 8), np.float32)
        lane = np.arange(LANES)
        g, t = lane // 4, lane % 4
        for number, register in enumerate(right):
            pairs = halves(self.registers[register])
            for half in range(2):
                b[2 * t + half + 8 * number, g] = pairs[:, half]
        for number, register in enumerate(given):
            c[g + 8 * (number // 2), 2 * t + number % 2] = as_float(self.registers[register])
        d = a @ b + c
        for number, register in enumerate(into):
            self.registers[register] = as_bits(d[g + 8 * (number // 2), 2 * t + number % 2])


def names(part: str) -> list[str]:
    return [each.strip() for each in part.strip("{}").split(",")]


def halves(register: np.ndarray) -> np.ndarray:
    """Two bfloat16 of each lane, as float32."""
    words = register.astype(np.uint32)
    return words.view(ml_dtypes.bfloat16).reshape(-1, 2).astype(np.float32)


def as_float(register: np.ndarray) -> np.ndarray:
    return register.astype(np.uint32).view(np.float32)


def as_bits(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.float32).view(np.uint32).astype(np.uint64)


def compute(operation: str, kind: str, given: list[np.ndarray]) -> np.ndarray:
    if kind == "f32.f16":
        return as_bits(given[0].astype(np.uint16).view(np.float16).astype(np.float32))
    if kind == "rn.bf16x2":
        first, second, third = map(halves, given)
        result = (first * second + third).astype(ml_dtypes.bfloat16)
        return result.reshape(-1).view(np.uint32).astype(np.uint64)
    if kind == "rn.bf16x2.f32":
        pairs = np.stack([as_float(each) for each in given[::-1]], -1).astype(ml_dtypes.bfloat16)
        return pairs.reshape(-1).view(np.uint32).astype(np.uint64)
    if kind.endswith("f32") and operation != "mov":
        numbers = [as_float(each) for each in given]
        exact = [each.astype(np.float64) for each in numbers]
        results = {
            "add": lambda: exact[0] + exact[1],
            "mul": lambda: exact[0] * exact[1],
            "fma": lambda: exact[0] * exact[1] + exact[2],
        }
        return as_bits(results[operation]())
    result = INTEGERS[f"{operation}.{kind}" if operation == "setp" else operation](*given)
    is_long = kind.endswith("64") or kind.startswith("wide")
    return result.astype(np.uint64) & (MASK if not is_long else ~np.uint64(0))


def combine(first: np.ndarray, second: np.ndarray, third: np.ndarray, table: np.ndarray) -> np.ndarray:
    assert (table == 0xEA).all()
    return first & second | third


def permute(first: np.ndarray, second: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both = first | second << np.uint64(32)
    result = np.zeros(LANES, np.uint64)
    for number in range(4):
        which = selector >> np.uint64(4 * number) & np.uint64(7)
        result |= (both >> which * np.uint64(8) & np.uint64(255)) << np.uint64(8 * number)
    return result


INTEGERS: dict[str, Callable[..., np.ndarray]] = {
    "mov": lambda value: value,
    "add": lambda first, second: first + second,
    "sub": lambda first, second: first - second,
    "mul": lambda first, second: first * second,
    "mad": lambda first, second, third: first * second + third,
    "div": lambda first, second: first // second,
    "rem": lambda first, second: first % second,
    "min": np.minimum,
    "and": lambda first, second: first & second,
    "or": lambda first, second: first | second,
    "xor": lambda first, second: first ^ second,
    "shr": lambda value, count: value >> count,
    "shl": lambda value, count: value << count,
    "lop3": combine,
    "prmt": permute,
    "setp.eq.u32": lambda first, second: first == second,
    "setp.ge.u32": lambda first, second: first >= second,
    "setp.gt.u32": lambda first, second: first > second,
    "setp.lt.u32": lambda first, second: first < second,
}
