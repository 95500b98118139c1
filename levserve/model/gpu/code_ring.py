"""A ring of codes, scales and zero points in shared memory, for the kernel of `ring_kernel`, in PTX.

The assembler moves loads into registers down to where the registers are used, so that a thread waits for
memory. It cannot move copies to shared memory. Each thread copies only what it reads itself, so threads do
not wait for each other.
"""

from __future__ import annotations

from typing import NamedTuple

from levserve.model.gpu.assembly import Assembly


class Stream(NamedTuple):
    """What a thread reads of one array: the same number of bytes at one or several places of each unit."""

    source: str
    """The address of its first bytes."""
    step: int
    """Bytes from one run of `units` units to the next."""
    units: int
    """How many consecutive units share the same bytes."""
    offsets: tuple[int, ...]
    """Of the places, in bytes from `source`."""
    num_bytes: int
    """The size of each place: 4, 8 or 16."""


class CodeRing:
    """A ring of `num_slots` units, beginning with the one that is being computed."""

    def __init__(self, asm: Assembly, *, unit_bytes: int, num_slots: int, num_threads: int) -> None:
        """A thread reads `unit_bytes` of each unit, from all streams together."""
        self.asm, self.num_slots, self.num_threads = asm, num_slots, num_threads
        self.slot_bytes = unit_bytes * num_threads
        self.num_bytes = num_slots * self.slot_bytes

    def begin(self, memory: str, thread: str, first: str, last: str, streams: list[Stream]) -> None:
        """Begins to copy units from `first` to `last` of the streams, to shared memory at `memory`."""
        asm = self.asm
        self.streams, self.last = streams, last
        self.bases = [asm.set("mad.lo.u32", thread, each.num_bytes, memory, name="base") for each in streams]
        self.unit = asm.set("mov.b32", first, name="unit")
        self.slot = asm.set("mov.u32", 0, name="slot")
        for _ in range(self.num_slots):
            self.refill()

    def take(self, registers: list[list[list[str]]]) -> None:
        """Reads the next unit into registers [stream][place][register]."""
        asm, before = self.asm, 0
        asm(f"cp.async.wait_group {self.num_slots - 1}")
        for stream, base, parts in zip(self.streams, self.bases, registers, strict=True):
            at = asm.set("add.u32", base, self.slot)
            for some in parts:
                into = some[0] if len(some) == 1 else f"{{{', '.join(some)}}}"
                vector = "" if len(some) == 1 else f".v{len(some)}"
                asm(f"ld.shared{vector}.b32 {into}, [{at}+{before}]")
                before += stream.num_bytes * self.num_threads

    def refill(self) -> None:
        """Begins to copy a unit over the one that was read last, whose registers must have been used."""
        asm, before = self.asm, 0
        is_past = asm.set("setp.gt.u32", self.unit, self.last, kind="pred", name="p")
        for stream, base in zip(self.streams, self.bases, strict=True):
            at = asm.set("add.u32", base, self.slot)
            place = asm.quotient(self.unit, stream.units)
            offset = asm.set("mul.wide.u32", place, stream.step, kind="b64", name="wide")
            source = asm.set("add.u64", offset, stream.source, kind="b64", name="wide")
            # Only copies of 16 bytes can bypass the first-level cache.
            kind = "cg.shared.global.L2::128B" if stream.num_bytes == 16 else "ca.shared.global"
            for offset_there in stream.offsets:
                copied = f"[{at}+{before}], [{source}+{offset_there}], {stream.num_bytes}"
                asm(f"@!{is_past} cp.async.{kind} {copied}")
                before += stream.num_bytes * self.num_threads
        asm("cp.async.commit_group")
        asm(f"add.u32 {self.unit}, {self.unit}, 1")
        asm(f"add.u32 {self.slot}, {self.slot}, {self.slot_bytes}")
        is_end = asm.set("setp.ge.u32", self.slot, self.num_bytes, kind="pred", name="p")
        asm(f"@{is_end} mov.u32 {self.slot}, 0")
