"""Parts of `x` in shared memory for the kernel of `ring_kernel`, copied ahead of their use, in PTX.

One thread copies a whole part with one instruction. Barriers in shared memory tell when a part has
arrived and when all warps are done with it, so no warp waits for another as long as parts are copied
ahead, and the tensor cores that read them need no fence. A part is laid out as instructions read it,
eight inputs of each row side by side (`ring_kernel.in_parts`).
"""

from __future__ import annotations

from levserve.model.gpu.assembly import Assembly

CHUNK = 8
"""Inputs of a row that lie side by side."""
CHUNK_BYTES = 2 * CHUNK
BARRIER_BYTES = 8
LAG = 2
"""A part is replaced when the second part after it has begun, so warps may be up to one part apart."""


class RowParts:
    """A ring of parts that the threads of a program share."""

    def __init__(self, asm: Assembly, *, part_bytes: int, num_parts: int, num_warps: int) -> None:
        self.asm, self.part_bytes, self.num_parts, self.num_warps = asm, part_bytes, num_parts, num_warps
        self.num_bytes = num_parts * (part_bytes + 2 * BARRIER_BYTES)

    def begin(self, memory: str, source: str, thread: str, first: str, last: str) -> None:
        """Begins to copy parts from `first` to `last` of rows at `source` to shared memory at `memory`."""
        asm = self.asm
        self.memory, self.source, self.last = memory, source, last
        self.is_there = asm.set("add.u32", memory, self.num_parts * self.part_bytes, name="barriers")
        self.is_free = asm.set("add.u32", self.is_there, self.num_parts * BARRIER_BYTES, name="barriers")
        is_first = asm.set("setp.eq.u32", thread, 0, kind="pred", name="p")
        for number in range(self.num_parts):
            for barriers, count in ((self.is_there, 1), (self.is_free, self.num_warps)):
                at = f"[{barriers}+{number * BARRIER_BYTES}]"
                asm(f"@{is_first} mbarrier.init.shared::cta.b64 {at}, {count}")
        asm(f"@{is_first} fence.mbarrier_init.release.cluster")
        asm("bar.sync 0")
        self.lane = asm.set("and.b32", thread, 31, name="lane")
        self.is_lane = asm.set("setp.eq.u32", self.lane, 0, kind="pred", name="p")
        # True in a warp's first lane, once there is a part before the one that was taken.
        self.has_taken = asm.set("setp.gt.u32", self.lane, 31, kind="pred", name="p")
        self.is_other_warp = asm.set("setp.gt.u32", thread, 31, kind="pred", name="p")
        self.part = asm.set("mov.b32", first, name="part")
        self.slot_in = asm.set("mov.u32", 0, name="slot")
        self.slot_out = asm.set("mov.u32", 0, name="slot")
        self.slot_free = asm.set("mov.u32", self.num_parts - 1, name="slot")
        # On a new barrier, a wait for the phase before the first one returns at once.
        self.phase_in = asm.set("mov.u32", 1, name="phase")
        self.phase_out = asm.set("mov.u32", 0, name="phase")
        for _ in range(self.num_parts - LAG):
            self._copy()

    def take(self) -> str:
        """Waits for the next part and returns its address."""
        at = self.asm.set("mad.lo.u32", self.slot_out, self.part_bytes, self.memory)
        self._wait(self._barrier(self.is_there, self.slot_out), self.phase_out)
        self._advance(self.slot_out, self.phase_out)
        return at

    def release(self) -> None:
        """Frees, for this warp, the part before the one that was taken last, and copies the next part."""
        asm = self.asm
        barrier = self._barrier(self.is_free, self.slot_free)
        asm(f"@{self.has_taken} mbarrier.arrive.shared::cta.b64 _, [{barrier}]")
        asm(f"setp.eq.u32 {self.has_taken}, {self.lane}, 0")
        self._advance(self.slot_free)
        self._copy()

    def _copy(self) -> None:
        """The first warp waits until the next place is free, and its first thread copies a part there."""
        asm = self.asm
        skip = asm.new_label("COPIED")
        asm(f"@{self.is_other_warp} bra {skip}")
        is_past = asm.set("setp.gt.u32", self.part, self.last, kind="pred", name="p")
        asm(f"@{is_past} bra {skip}")
        self._wait(self._barrier(self.is_free, self.slot_in), self.phase_in)
        offset = asm.set("mul.wide.u32", self.part, self.part_bytes, kind="b64", name="wide")
        source = asm.set("add.u64", offset, self.source, kind="b64", name="wide")
        to = asm.set("mad.lo.u32", self.slot_in, self.part_bytes, self.memory)
        barrier = self._barrier(self.is_there, self.slot_in)
        asm(f"@{self.is_lane} mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], {self.part_bytes}")
        asm(
            f"@{self.is_lane} cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
            f"[{to}], [{source}], {self.part_bytes}, [{barrier}]"
        )
        asm(f"add.u32 {self.part}, {self.part}, 1")
        self._advance(self.slot_in, self.phase_in)
        asm.label(skip)

    def _barrier(self, barriers: str, slot: str) -> str:
        return self.asm.set("mad.lo.u32", slot, BARRIER_BYTES, barriers)

    def _wait(self, barrier: str, phase: str) -> None:
        asm, is_through = self.asm, self.asm.new("p", "pred")
        wait = asm.new_label("WAIT")
        asm.label(wait)
        asm(f"mbarrier.try_wait.parity.shared::cta.b64 {is_through}, [{barrier}], {phase}")
        asm(f"@!{is_through} bra {wait}")

    def _advance(self, slot: str, phase: str | None = None) -> None:
        asm = self.asm
        asm(f"add.u32 {slot}, {slot}, 1")
        is_end = asm.set("setp.ge.u32", slot, self.num_parts, kind="pred", name="p")
        asm(f"@{is_end} mov.u32 {slot}, 0")
        if phase is not None:
            asm(f"@{is_end} xor.b32 {phase}, {phase}, 1")
