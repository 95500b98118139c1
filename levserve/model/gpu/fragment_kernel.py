"""A kernel in PTX that multiplies with a matrix of four or eight bits as fast as it can be read.

Tensor cores take a factor from registers in small pieces, fragments: of 16 outputs and 16 inputs, a thread
has eight values, those of two outputs and four inputs. They may be any four inputs, as long as the thread has
the same ones of `x`. So each thread loads 16 bytes of each of its outputs, which are whole fragments
(`lanes.py` gives the order in which a matrix is stored for this), and codes go from memory to tensor cores
through registers alone.

A warp multiplies 16 x `m_tiles` outputs with 8 x `n_tiles` rows of `x`. Its thread `4 g + t` has the
outputs from `2 m_tiles g` on, side by side, so it reads their scales at once. Sums over a group of inputs
are multiplied by its scale in float32. Offsets are multiplied by the sums of `x` over a group, which are
computed as a product with ones.
"""

from __future__ import annotations

from levserve.model.gpu.assembly import Assembly, Kernel
from levserve.model.gpu.fragment_dequantizer import Dequantizer, Loaded
from levserve.model.gpu.fragment_plan import FragmentTiling, Problem
from levserve.model.lanes import WORDS

LANE_BYTES = 16
UNIT_BYTES = 4 * LANE_BYTES
"""Bytes of an output that the four threads which share it load at once."""
X_STAGES = 3
SHIFTING_GROUP = 128
"""Kernels for groups of at least this many inputs divide by shifts: with fewer registers, more programs
run at once, and two rows times four-bit codes take 0.92 of the time. With groups of 32, shifts would make
it 1.03 to 1.09 of the time."""


class Writer:
    """Writes the kernel for one product."""

    alignment = 16
    """Bytes to which shared memory is aligned."""
    load = "ld.global.nc"

    def __init__(self, problem: Problem, tiling: FragmentTiling) -> None:
        self.problem, self.tiling, self.scheme = problem, tiling, problem.scheme
        group = self.scheme.columns
        self.asm = Assembly(shifts=group is not None and group >= SHIFTING_GROUP)
        self.outputs = 2 * tiling.m_tiles
        self.groups_per_unit = 1 if group is None else max(1, problem.unit // group)
        self.words_per_group = WORDS // self.groups_per_unit
        self.row_bytes = problem.inputs * 4 // problem.numbers_per_word
        self.x_bytes = 2 * problem.unit
        self.words_x = self.x_bytes // WORDS
        """Bytes of `x` that the four threads of an output need together for one word each."""
        self.x_registers = problem.numbers_per_word // 2
        self.swizzle = 128 // self.words_x - 1
        """Rows of `x` whose numbers differ in these bits have a word's inputs in different memory banks."""
        self.num_units = problem.inputs // problem.unit // tiling.splits
        names = ["x", "codes", "scale"]
        names += ["zero"] if self.scheme.has_zeros else []
        names += ["offset"] if self.scheme.has_offsets else []
        self.pointers = {name: f"${number + 1}" for number, name in enumerate([*names, "out"])}

    def write(self) -> Kernel:
        self._find_place()
        self.totals = [
            [self.asm.several("total", 4, "f32") for _ in range(self.tiling.m_tiles)]
            for _ in range(self.tiling.n_tiles)
        ]
        for register in self._all_totals():
            self.asm(f"mov.f32 {register}, 0f00000000")
        self.dequantizer = Dequantizer(self.asm, self.scheme)
        self._loop()
        if self.scheme.columns is None:
            self._scale_rows()
        if self.tiling.warps_k > 1:
            self._add_warps()
        self._store()
        self.asm.label("END")
        return self.asm.kernel(self._shared_bytes(), self.alignment)

    def _all_totals(self) -> list[str]:
        return [register for tile in self.totals for part in tile for register in part]

    def _shared_bytes(self) -> int:
        tiling = self.tiling
        staged = X_STAGES * tiling.rows * self.x_bytes if tiling.is_staged else 0
        values = 4 * tiling.n_tiles * tiling.m_tiles
        return max(staged, tiling.num_warps * 32 * 4 * values if tiling.warps_k > 1 else 0)

    # Where a thread is, and what it reads.

    def _find_place(self) -> None:
        asm, tiling, problem = self.asm, self.tiling, self.problem
        self.thread = asm.set("mov.u32", "%tid.x", name="thread")
        self.lane = asm.set("and.b32", self.thread, 31, name="lane")
        self.warp = asm.set("shr.u32", self.thread, 5, name="warp")
        self.g = asm.set("shr.u32", self.lane, 2, name="g")
        self.t = asm.set("and.b32", self.lane, 3, name="t")
        warp_m = asm.remainder(self.warp, tiling.warps_m)
        self.warp_k = asm.quotient(self.warp, tiling.warps_m)
        row_tile = asm.set("mov.u32", "%ctaid.x")
        column_tile = asm.set("mov.u32", "%ctaid.y")
        self.split = asm.set("mov.u32", "%ctaid.z", name="split")
        self.first_row = asm.set("mul.lo.u32", row_tile, tiling.rows)
        tile = asm.set("mad.lo.u32", column_tile, tiling.warps_m, warp_m)
        column = asm.set("mul.lo.u32", tile, 16 * tiling.m_tiles)
        self.column = asm.set("mad.lo.u32", self.g, self.outputs, column, name="column")
        unit = asm.set("mad.lo.u32", self.split, self.num_units, self.warp_k)
        self.unit = asm.set("mov.b32", unit, name="unit")
        left = asm.set("sub.u32", self.num_units + tiling.warps_k - 1, self.warp_k)
        self.count = asm.quotient(left, tiling.warps_k, name="count")
        self.last_unit = asm.set("sub.u32", self.count, 1)
        self.last_unit = asm.set("mad.lo.u32", self.last_unit, tiling.warps_k, unit, name="last")
        lane_at = asm.set("mul.lo.u32", self.t, LANE_BYTES)
        self.code_at = self._address("codes", [(self.column, self.row_bytes), (lane_at, 1)])
        if tiling.is_staged:
            self._find_staged()
        else:
            part = self.words_x // 4
            self.x_at = []
            for n in range(tiling.n_tiles):
                row = asm.set("add.u32", self.first_row, 8 * n)
                row = asm.set("add.u32", row, self.g)
                row = asm.set("min.u32", row, problem.rows - 1)
                self.x_at.append(self._address("x", [(row, 2 * problem.inputs), (self.t, part)]))

    def _find_staged(self) -> None:
        """Where this thread copies `x` from and to, and where it reads the copy."""
        asm, tiling = self.asm, self.tiling
        per_row = self.x_bytes // 16
        self.copy_rows = tiling.num_warps * 32 // per_row
        row = asm.quotient(self.thread, per_row)
        chunk = asm.remainder(self.thread, per_row)
        from_row = asm.set("add.u32", self.first_row, row)
        at = asm.set("mul.lo.u32", chunk, 16)
        self.copy_from = self._address("x", [(from_row, 2 * self.problem.inputs), (at, 1)])
        memory = asm.set("mov.u32", "memory", name="memory")
        word = asm.quotient(at, self.words_x)
        rest = asm.remainder(at, self.words_x)
        self.copy_to = self._staged_at(memory, row, word, rest)
        rest = asm.set("mul.lo.u32", self.t, self.words_x // 4)
        self.read_at = []
        for number in range(WORDS):
            word = asm.set("mov.u32", number)
            self.read_at.append(self._staged_at(memory, self.g, word, rest))

    def _staged_at(self, memory: str, row: str, word: str, rest: str) -> str:
        asm = self.asm
        turned = asm.set("and.b32", row, self.swizzle)
        turned = asm.set("xor.b32", turned, word)
        at = asm.set("mad.lo.u32", turned, self.words_x, rest)
        at = asm.set("mad.lo.u32", row, self.x_bytes, at)
        return asm.set("add.u32", at, memory, name="at")

    def _address(self, name: str, terms: list[tuple[str, int]]) -> str:
        asm, address = self.asm, self.pointers[name]
        for register, factor in terms:
            offset = asm.set("mul.wide.u32", register, factor, kind="b64", name="wide")
            address = asm.set("add.u64", offset, address, kind="b64", name="wide")
        return address

    # The loop.

    def _loop(self) -> None:
        asm, tiling = self.asm, self.tiling
        stages = [self._new_stage(), self._new_stage()]
        if tiling.warps_k > 1:
            nothing = asm.set("setp.eq.u32", self.count, 0, kind="pred", name="p")
            asm(f"@{nothing} bra DONE")
        done = asm.set("mov.u32", 0, name="done")
        if tiling.is_staged:
            self._begin_copies()
        self._load(stages[0])
        asm.label("NEXT")
        for number in range(2):
            asm(f"add.u32 {self.unit}, {self.unit}, {tiling.warps_k}")
            asm(f"min.u32 {self.unit}, {self.unit}, {self.last_unit}")
            self._load(stages[1 - number])
            if tiling.is_staged:
                self._take_copied()
            self._compute(stages[number])
            asm(f"add.u32 {done}, {done}, 1")
            if number == 0:
                is_done = asm.set("setp.ge.u32", done, self.count, kind="pred", name="p")
                asm(f"@{is_done} bra DONE")
        is_left = asm.set("setp.lt.u32", done, self.count, kind="pred", name="p")
        asm(f"@{is_left} bra NEXT")
        asm.label("DONE")

    def _new_stage(self) -> Loaded:
        asm, tiling = self.asm, self.tiling
        groups = 0 if self.scheme.columns is None else self.groups_per_unit
        of_scales = self.outputs * self.scheme.scale.itemsize // 4
        of_offsets = of_scales if self.scheme.has_offsets else 0
        of_zeros = self.outputs // 4 if self.scheme.has_zeros else 0
        rows = 0 if tiling.is_staged else tiling.n_tiles
        return Loaded(
            codes=[asm.several("code", WORDS) for _ in range(self.outputs)],
            scales=[asm.several("scale", of_scales) for _ in range(groups)],
            zeros=[asm.several("zero", of_zeros) for _ in range(groups)],
            offsets=[asm.several("offset", of_offsets) for _ in range(groups)],
            x=[[asm.several("x", self.x_registers) for _ in range(WORDS)] for _ in range(rows)],
        )

    def _load(self, stage: Loaded) -> None:
        asm = self.asm
        at = asm.set("mul.wide.u32", self.unit, UNIT_BYTES, kind="b64", name="wide")
        at = asm.set("add.u64", at, self.code_at, kind="b64", name="wide")
        for output, words in enumerate(stage.codes):
            self._read(".L1::no_allocate.L2::128B", words, at, output * self.row_bytes)
        if self.scheme.columns is not None:
            self._load_groups(stage)
        for n, tile in enumerate(stage.x):
            at = asm.set("mul.wide.u32", self.unit, self.x_bytes, kind="b64", name="wide")
            at = asm.set("add.u64", at, self.x_at[n], kind="b64", name="wide")
            for word, registers in enumerate(tile):
                self._read("", registers, at, word * self.words_x)

    def _load_groups(self, stage: Loaded) -> None:
        asm, columns = self.asm, self.problem.columns
        assert self.scheme.columns is not None
        units = max(1, self.scheme.columns // self.problem.unit)
        group = asm.quotient(self.unit, units)
        place = asm.set("mul.lo.u32", group, self.groups_per_unit)
        place = asm.set("mad.lo.u32", place, columns, self.column)
        size = self.scheme.scale.itemsize
        for name, parts, itemsize in (
            ("scale", stage.scales, size),
            ("zero", stage.zeros, 1),
            ("offset", stage.offsets, size),
        ):
            if parts[0]:
                at = self._address(name, [(place, itemsize)])
                for number, registers in enumerate(parts):
                    self._read("", registers, at, number * columns * itemsize)

    def _read(self, hints: str, registers: list[str], address: str, offset: int) -> None:
        """Reads from memory that nothing writes to meanwhile, at most 16 bytes at once."""
        for start in range(0, len(registers), 4):
            some = registers[start : start + 4]
            into = some[0] if len(some) == 1 else f"{{{', '.join(some)}}}"
            vector = "" if len(some) == 1 else f".v{len(some)}"
            self.asm(f"{self.load}{hints}{vector}.b32 {into}, [{address}+{offset + 4 * start}]")

    def _begin_copies(self) -> None:
        asm = self.asm
        self.staged_unit = asm.set("mov.b32", self.unit, name="staged")
        self.stage_in = asm.set("mov.u32", 0, name="stage")
        self.stage_out = asm.set("mov.u32", 0, name="stage")
        for _ in range(X_STAGES - 1):
            self._copy_x()

    def _take_copied(self) -> None:
        self.asm(f"cp.async.wait_group {X_STAGES - 2}")
        self.asm("bar.sync 0")
        self._copy_x()

    def _copy_x(self) -> None:
        """Begins to copy a unit's inputs of all rows; past the end, the last unit's again."""
        asm, tiling = self.asm, self.tiling
        asm(f"min.u32 {self.staged_unit}, {self.staged_unit}, {self.last_unit}")
        at = asm.set("mul.wide.u32", self.staged_unit, self.x_bytes, kind="b64", name="wide")
        at = asm.set("add.u64", at, self.copy_from, kind="b64", name="wide")
        to = asm.set("add.u32", self.copy_to, self.stage_in)
        for number in range(-(-tiling.rows // self.copy_rows)):
            row = number * self.copy_rows
            guard = ""
            if row + self.copy_rows > tiling.rows:
                most = asm.set("mov.u32", (tiling.rows - row) * self.x_bytes // 16)
                guard = f"@{asm.set('setp.lt.u32', self.thread, most, kind='pred', name='p')} "
            source = row * 2 * self.problem.inputs
            asm(f"{guard}cp.async.cg.shared.global [{to}+{row * self.x_bytes}], [{at}+{source}], 16")
        asm("cp.async.commit_group")
        asm(f"add.u32 {self.staged_unit}, {self.staged_unit}, 1")
        self._advance(self.stage_in)

    def _advance(self, stage: str) -> None:
        asm, size = self.asm, self.tiling.rows * self.x_bytes
        asm(f"add.u32 {stage}, {stage}, {size}")
        is_end = asm.set("setp.ge.u32", stage, X_STAGES * size, kind="pred", name="p")
        asm(f"@{is_end} mov.u32 {stage}, 0")

    # One step.

    def _compute(self, stage: Loaded) -> None:
        asm, tiling, scheme = self.asm, self.tiling, self.scheme
        read_at = []
        if tiling.is_staged:
            read_at = [asm.set("add.u32", at, self.stage_out) for at in self.read_at]
        of_rows = scheme.columns is None
        sums = self.totals if of_rows else self._new_sums()
        ones = [asm.several("ones", 4, "f32") for _ in range(tiling.n_tiles)] if scheme.has_offsets else []
        zeros: list[str] = []
        for word in range(WORDS):
            group, place = divmod(word, self.words_per_group)
            is_first = place == 0 and not of_rows
            if place == 0:
                of_group = stage.zeros[group] if scheme.has_zeros else []
                zeros = self.dequantizer.zeros(of_group, self.outputs)
            numbers = [
                self.dequantizer.unpack(stage.codes[each][word], zeros[each]) for each in range(self.outputs)
            ]
            x = [tile[word] for tile in stage.x] if stage.x else self._read_x(read_at[word])
            for half in range(len(numbers[0]) // 2):
                fresh = is_first and half == 0
                for n in range(tiling.n_tiles):
                    factor = x[n][2 * half : 2 * half + 2]
                    for m in range(tiling.m_tiles):
                        low, high = numbers[2 * m], numbers[2 * m + 1]
                        left = [low[2 * half], high[2 * half], low[2 * half + 1], high[2 * half + 1]]
                        self.dequantizer.multiply(sums[n][m], left, factor, is_fresh=fresh)
                    if ones:
                        self.dequantizer.multiply(ones[n], [self.dequantizer.one] * 4, factor, is_fresh=fresh)
            if place == self.words_per_group - 1 and not of_rows:
                self._add_group(stage, group, sums, ones)
        if tiling.is_staged:
            self._advance(self.stage_out)

    def _new_sums(self) -> list[list[list[str]]]:
        tiling = self.tiling
        return [
            [self.asm.several("sum", 4, "f32") for _ in range(tiling.m_tiles)] for _ in range(tiling.n_tiles)
        ]

    def _read_x(self, at: str) -> list[list[str]]:
        found = []
        for n in range(self.tiling.n_tiles):
            registers = self.asm.several("x", self.x_registers)
            into = f"{{{', '.join(registers)}}}"
            self.asm(f"ld.shared.v{len(registers)}.b32 {into}, [{at}+{8 * n * self.x_bytes}]")
            found.append(registers)
        return found

    def _add_group(
        self, stage: Loaded, group: int, sums: list[list[list[str]]], ones: list[list[str]]
    ) -> None:
        scales = self.dequantizer.widen_scales(stage.scales[group])
        offsets = self.dequantizer.widen_scales(stage.offsets[group]) if ones else []
        for n, tile in enumerate(self.totals):
            for m, totals in enumerate(tile):
                for place, total in enumerate(totals):
                    output = 2 * m + place // 2
                    self.asm(f"fma.rn.f32 {total}, {sums[n][m][place]}, {scales[output]}, {total}")
                    if ones:
                        self.asm(f"fma.rn.f32 {total}, {ones[n][place]}, {offsets[output]}, {total}")

    # The end.

    def _scale_rows(self) -> None:
        size = self.scheme.scale.itemsize
        registers = self.asm.several("scale", self.outputs * size // 4)
        self._read("", registers, self._address("scale", [(self.column, size)]), 0)
        scales = self.dequantizer.widen_scales(registers)
        for tile in self.totals:
            for m, totals in enumerate(tile):
                for place, total in enumerate(totals):
                    self.asm(f"mul.rn.f32 {total}, {total}, {scales[2 * m + place // 2]}")

    def _add_warps(self) -> None:
        """The first of the warps that share sums adds the others' sums to its own, in order."""
        asm, tiling = self.asm, self.tiling
        totals = self._all_totals()
        size = 32 * 4 * len(totals)
        memory = asm.set("mov.u32", "memory", name="memory")
        at = asm.set("mad.lo.u32", self.warp, size, memory)
        at = asm.set("mad.lo.u32", self.lane, 16, at)
        for start in range(0, len(totals), 4):
            asm(f"st.shared.v4.f32 [{at}+{128 * start}], {{{', '.join(totals[start : start + 4])}}}")
        asm("bar.sync 0")
        is_other = asm.set("setp.gt.u32", self.warp_k, 0, kind="pred", name="p")
        asm(f"@{is_other} bra END")
        for warp in range(1, tiling.warps_k):
            for start in range(0, len(totals), 4):
                others = asm.several("other", 4, "f32")
                offset = warp * tiling.warps_m * size + 128 * start
                asm(f"ld.shared.v4.f32 {{{', '.join(others)}}}, [{at}+{offset}]")
                for total, other in zip(totals[start : start + 4], others, strict=True):
                    asm(f"add.f32 {total}, {total}, {other}")

    def _store(self) -> None:
        asm, problem = self.asm, self.problem
        pair = asm.set("mul.lo.u32", self.t, 2)
        for n, tile in enumerate(self.totals):
            for c in range(2):
                row = asm.set("add.u32", self.first_row, 8 * n + c)
                row = asm.set("add.u32", row, pair)
                is_row = asm.set("setp.lt.u32", row, problem.rows, kind="pred", name="p")
                place = asm.set("mad.lo.u32", self.split, problem.rows, row)
                at = self._address("out", [(place, 4 * problem.columns), (self.column, 4)])
                values = [totals[2 * half + c] for totals in tile for half in range(2)]
                for start in range(0, len(values), 4):
                    some = values[start : start + 4]
                    vector = f"{{{', '.join(some)}}}"
                    asm(f"@{is_row} st.global.v{len(some)}.f32 [{at}+{4 * start}], {vector}")
