"""Interprets the PTX of our kernels without a GPU: the instructions that they use, a whole warp at a time.

Warps of a program take turns at barriers. Branches must be taken by all threads of a warp or by none.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from levserve.model.gpu.assembly import Kernel
from tests.ptx_memory import Barrier, Pause, Shared, run_together
from tests.ptx_numbers import ARITHMETIC, LANES, as_bits, as_float, compute, halves

Registers = dict[str, np.ndarray]
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
ALL = np.ones(LANES, bool)
NONE = np.zeros(LANES, np.uint64)
PLACE = 1 << 32
"""Arrays begin at multiples of this address."""


def run(
    kernel: Kernel, arrays: Sequence[np.ndarray], out: np.ndarray, grid: tuple[int, int, int], num_warps: int
) -> None:
    """Runs every program of the grid; `out` is written to."""
    text = kernel.text
    lines = [line.strip() for line in re.split(r";|(?<=:) ", text.strip()[1:-1]) if line.strip()]
    lines = [line for line in lines if not line.startswith((".reg", ".shared"))]
    found = re.search(r"memory\[(\d+)\]", text)
    memories = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    memories.append(out.reshape(-1).view(np.uint8))
    for place in itertools.product(*map(range, grid)):
        shared = Shared(int(found[1]) if found else kernel.asked_bytes)
        warps = [Warp(lines, number, place, memories, shared) for number in range(num_warps)]
        run_together([warp.steps() for warp in warps], shared)


@functools.cache
def parse(line: str) -> tuple[str, str, list[str]]:
    """The guard of an instruction (empty if it has none), its name and its operands."""
    guard, _, line = line.partition(" ") if line.startswith("@") else ("", "", line)
    name, _, rest = line.partition(" ")
    return guard, name, OPERAND.findall(rest)


@functools.cache
def constant(text: str) -> np.ndarray:
    """The constant in every lane, read-only."""
    number = np.full(LANES, int(text[2:], 16) if text.startswith("0f") else int(text, 0), np.uint64)
    number.flags.writeable = False
    return number


class WideProduct(NamedTuple):
    """A `wgmma` instruction that has begun: its registers, and the factors as they were at that time."""

    into: list[str]
    left: list[str]
    a: np.ndarray
    descriptor: int
    b: np.ndarray


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
        for name in ("memory", "%reserved_smem_offset_end"):
            self.registers[name] = np.zeros(LANES, np.uint64)
        self.copies: list[list[Callable[[], None]]] = [[]]
        self.unfenced: list[slice] = []
        """Shared memory that this warp has written since its last fence."""
        self.written: set[str] = set()
        """Registers that this warp has written since its last `wgmma` fence."""
        self.products: list[list[WideProduct]] = [[]]
        """The products that tensor cores are computing, by commit group."""
        self.loaded: set[int] = set()
        self.fetched: set[int] = set()
        """Addresses outside shared memory, of loads and copies and of fetches into a cache."""

    def steps(self) -> Iterator[Pause]:
        """Yields at every barrier, and where it waits for a copy."""
        at = 0
        while at < len(self.lines):
            line = self.lines[at]
            at += 1
            if line.endswith(":"):
                continue
            guard, name, operands = parse(line)
            mask = ALL
            if guard:
                mask = self.registers[guard.lstrip("@!")].astype(bool) ^ ("!" in guard)
            if name == "bra":
                assert mask.all() or not mask.any(), "a warp stays together"
                at = self.labels[operands[0]] if mask.all() else at
            elif name == "bar.sync":
                yield Pause.FOR_ALL
            elif name.startswith("mbarrier.try_wait.parity"):
                if not self._is_through(operands):
                    yield Pause.IN_MEMORY
            elif mask is ALL or mask.any():
                self._step(name, operands, mask)
        assert self.fetched <= self.loaded, "nothing is fetched that the warp does not load"

    def _step(self, name: str, operands: list[str], mask: np.ndarray) -> None:
        if name.startswith(ARITHMETIC) and "{" not in operands[0] + operands[1]:
            into, *given = operands
            operation, kind = name.split(".", 1)
            result = compute(operation, kind, [self.value(each) for each in given])
            before = self.registers.get(into, result)
            self.registers[into] = result if mask is ALL else np.where(mask, result, before)
            self.written.add(into)
        elif name.startswith(("ld.", "st.")):
            self._move(name, operands, mask)
        elif name == "prefetch.global.L2":
            self.fetched.update(self._address(operands[0])[mask].tolist())
        elif name.startswith("cp.async.bulk."):
            self._copy_for_all(operands, mask)
        elif name.startswith("cp.async"):
            self._copy(name, operands, mask)
        elif name.startswith("mbarrier."):
            self._arrive(name, operands, mask)
        elif name == "fence.mbarrier_init.release.cluster":
            pass
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
            raise NotImplementedError(name)

    def value(self, operand: str) -> np.ndarray:
        return self.registers[operand] if operand in self.registers else constant(operand)

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
        values = np.stack([self.registers.get(each, NONE) for each in registers], 1)
        places = addresses[mask].astype(np.int64)
        memory, _ = self._memory(int(places[0]), ".shared" in name)
        if ".shared" not in name:
            assert len({*(places // PLACE).tolist()}) == 1, "a warp moves numbers of one array at a time"
            places %= PLACE
        assert not (places % size).any() and places.max() + size <= len(memory), (name, places, len(memory))
        words = memory[: len(memory) // size * size].reshape(-1, size)
        if is_load:
            values[mask] = words[places // size].view(np.uint32)
        else:
            words[places // size] = values[mask].astype(np.uint32).view(np.uint8)
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
            # The last group is not committed yet.
            while len(self.copies) - 1 > left:
                for copy in self.copies.pop(0):
                    copy()
        else:
            to, source = self._address(operands[0]), self._address(operands[1])
            self.loaded.update(source[mask].tolist())
            size = int(operands[2])

            def copy() -> None:
                for lane in np.flatnonzero(mask):
                    memory, start = self._memory(int(source[lane]), False)
                    assert start % size == 0 and start + size <= len(memory) and int(to[lane]) % size == 0
                    place = slice(int(to[lane]), int(to[lane]) + size)
                    self.shared.bytes[place] = memory[start : start + size]
                    self.shared.is_fenced[place] = False
                    self.unfenced.append(place)

            self.copies[-1].append(copy)

    def _arrive(self, name: str, operands: list[str], mask: np.ndarray) -> None:
        """One thread arrives at a barrier in shared memory, or initializes it."""
        (lane,) = np.flatnonzero(mask)
        if name == "mbarrier.init.shared::cta.b64":
            at = int(self._address(operands[0])[lane])
            assert at % 8 == 0 and at + 8 <= len(self.shared.bytes)
            self.shared.barriers[at] = Barrier(int(operands[1]))
            return
        assert operands[0] == "_"
        barrier = self.shared.barriers[int(self._address(operands[1])[lane])]
        if name == "mbarrier.arrive.shared::cta.b64":
            barrier.arrive()
        else:
            assert name == "mbarrier.arrive.expect_tx.shared::cta.b64"
            barrier.arrive(int(operands[2]))

    def _is_through(self, operands: list[str]) -> bool:
        """Whether a barrier has ended the phase of this parity; if not, its copies end now."""
        into, at, parity = operands
        places, parities = self._address(at), self.value(parity)
        assert len({*places.tolist()}) == len({*parities.tolist()}) == 1
        barrier = self.shared.barriers[int(places[0])]
        is_through = barrier.phase % 2 != int(parities[0])
        if not is_through:
            barrier.finish_copies()
        self.registers[into] = np.full(LANES, is_through, np.uint64)
        return is_through

    def _copy_for_all(self, operands: list[str], mask: np.ndarray) -> None:
        (lane,) = np.flatnonzero(mask)
        to, source, at = (int(self._address(operands[number])[lane]) for number in (0, 1, 3))
        size = int(operands[2])
        memory, start = self._memory(source, False)
        assert to % 16 == start % 16 == size % 16 == 0
        assert start + size <= len(memory) and to + size <= len(self.shared.bytes)
        place = slice(to, to + size)
        self.shared.bytes[place] = 0xFF
        self.shared.is_fenced[place] = False

        def copy() -> None:
            self.shared.bytes[place] = memory[start : start + size]
            self.shared.is_fenced[place] = True

        barrier = self.shared.barriers[at]
        assert barrier.expected == size, "it counts the bytes that are copied"
        barrier.expected = 0
        barrier.copies.append(copy)

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
        """Runs an instruction of four warps. Each has its own outputs, so here each does its part alone."""
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
        """The right factor, [input, row], from shared memory: 128 contiguous bytes of each row, swizzled, or
        contiguous tiles of eight inputs of eight rows, not swizzled."""
        start, of_inputs, of_rows = ((descriptor >> place & 0x3FFF) << 4 for place in (0, 16, 32))
        rows, inputs = np.arange(num_rows)[:, None], np.arange(16)[None, :]
        if descriptor >> 62:
            assert descriptor >> 62 == 1 and of_rows == 1024
            at = start + rows // 8 * of_rows + rows % 8 * 128 + 2 * inputs
            at ^= (at >> 7 & 7) << 4
        else:
            assert descriptor >> 46 == 0
            at = start + rows // 8 * of_rows + inputs // 8 * of_inputs + rows % 8 * 16 + inputs % 8 * 2
        places = np.stack([at, at + 1], -1)
        assert self.shared.is_fenced[places].all(), "what is multiplied has been copied, with a fence since"
        found = self.shared.bytes[places].view(ml_dtypes.bfloat16)[..., 0]
        return found.astype(np.float32).T

    def _finish(self, product: WideProduct) -> None:
        """Adds a product to its sums; its factors must not have changed since it began."""
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
