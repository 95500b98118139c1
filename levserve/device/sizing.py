"""How large everything is: rows, pages, context and the shapes that get compiled, from the settings and the machine.

Pure arithmetic, done once at start. What cannot be is refused with the sum in the message.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from levserve.errors import ConfigError
from levserve.settings.settings import Settings

PIECE_TOKENS = 64
"""Tokens of a row of prefill where several prompts share a program: little is lost at the end of each."""
TOKENS_PER_ROW = 1024
"""KV room per row when nothing is asked for: a long chat each; the pool is shared, so one row may have much more."""

CPU_CHUNKS = (8, 16)
"""Of a prompt on a CPU, beside those of `--prefill-chunk`: every program takes some 40 MB, so there are few."""
CHUNK_STEP = 8
"""Tokens by which chunks differ where a program takes no longer than what is in it needs."""
CPU_VERIFY_TOKENS = 32
VERIFY_TOKENS = 256
"""Drafted and newest tokens of all rows that are checked together: beyond, a step takes longer with each of them."""

ROW_STEP = 32
"""By which decode programs differ on a GPU, where from some 64 rows on those that are not filled take time too. An 8B model on an
H200 with 130 / 200 rows: 9.8 / 11.0 ms a step in a program of 256, 8.0 / 10.0 in one of 160 or 224."""

FLOOR_TOKENS = 4 * TOKENS_PER_ROW
"""Below this a pool of one among several models is not worth having: rather unload another."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the sizes are made for."""

    backend: str
    """cpu, gpu or tpu"""
    free_bytes: int
    """Memory left once the weights are loaded."""
    has_kernel: bool = False
    """Whether attention is a kernel that reads pages in place, so that rows of one prompt cost no more than one long row."""
    skips_padding: bool = False
    """Whether a program takes as long as what is in it needs, so that few of them serve all."""
    mixed_context: int = 0
    """Where a prompt's chunk may begin, at most, to be computed beside the rows of a decode program; 0: none is."""

    @property
    def is_cpu(self) -> bool:
        return self.backend == "cpu"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The plan that `--dry-run` prints and the engine is built from."""

    rows: int
    max_seq_len: int
    page_size: int
    num_pages: int
    page_bytes: int
    weight_bytes: int
    row_sizes: tuple[int, ...]
    chunk_sizes: tuple[int, ...]
    """Tokens of the prefill programs."""
    round_steps: int
    has_all_modes: bool = True
    """Whether greedy and plain decoding have programs of their own, or full mode does their work."""
    num_draft: int = 0
    """Tokens of a draft; 0 without speculation."""
    verify_sizes: tuple[int, ...] = ()
    """Rows of the programs that check drafts."""
    piece_tokens: int | None = None
    """If set, a prefill program's rows are pieces of so many tokens, of one prompt or of several; else it is one row."""
    skips_padding: bool = False
    """Whether a program takes as long as what is in it needs."""
    mixed_context: int = 0
    """Where a prompt's chunk may begin, at most, to be computed beside the rows of a decode program."""

    @property
    def takes_longest_first(self) -> bool:
        """Whether rows are computed in their order, many at a time, as on a GPU: a long one that began last would keep all waiting."""
        return self.piece_tokens is not None

    @property
    def table_width(self) -> int:
        return -(-self.max_seq_len // self.page_size)

    def prefill_rows(self, num_tokens: int) -> tuple[int, int]:
        """Rows and tokens of each in a prefill program of so many tokens."""
        return (
            (1, num_tokens)
            if self.piece_tokens is None
            else (num_tokens // self.piece_tokens, self.piece_tokens)
        )

    @property
    def mixed_tokens(self) -> int:
        """Of prompts, that the widest decode program computes beside its rows."""
        return (
            self.chunk_sizes[-1] if self.skips_padding and self.mixed_context and self.round_steps == 1 else 0
        )

    @property
    def chunk_costs(self) -> tuple[int, ...]:
        """What a prompt's chunk may count as, ascending: its program, or what it has of that where only that matters."""
        if self.skips_padding:
            return (*range(CHUNK_STEP, self.chunk_sizes[-1], CHUNK_STEP), self.chunk_sizes[-1])
        if self.piece_tokens is None:
            return self.chunk_sizes
        return tuple(range(self.piece_tokens, self.chunk_sizes[-1] + 1, self.piece_tokens))

    @property
    def num_tokens(self) -> int:
        """That the KV pool holds."""
        return self.num_pages * self.page_size

    def describe(self) -> list[str]:
        """The plan as lines for people."""
        drafts = (
            f"; drafts of {self.num_draft} tokens for at most {self.verify_sizes[-1]} rows"
            if self.num_draft
            else ""
        )
        return [
            f"weights     {human(self.weight_bytes)}",
            f"KV pages    {self.num_pages} x {self.page_size} tokens = {self.num_tokens} tokens, "
            f"{human(self.num_pages * self.page_bytes)}",
            f"context     {self.max_seq_len} tokens",
            f"rows        {self.rows}; decode shapes {', '.join(map(str, self.row_sizes))}; {self.round_steps} step(s) a round{drafts}",
            f"prefill     chunks of {', '.join(map(str, self.chunk_sizes))} tokens",
        ]


def plan_sizes(
    settings: Settings, machine: Machine, *, rows: int, max_position: int, page_bytes: int, weight_bytes: int
) -> Sizes:
    """Raises `ConfigError` for sizes that cannot be."""
    max_seq_len = settings.max_seq_len or max_position
    if max_seq_len > max_position:
        raise ConfigError(f"--max-seq-len {max_seq_len} is more than the model's {max_position} positions")
    num_pages = _num_pages(settings, machine, rows, max_seq_len, page_bytes)
    room = num_pages * settings.page_size
    if room < max_seq_len:
        if settings.max_seq_len:
            raise ConfigError(
                f"--max-seq-len {max_seq_len} needs {-(-max_seq_len // settings.page_size)} pages of {settings.page_size} tokens "
                f"({human(page_bytes)} each), but the pool has {num_pages}: raise --kv-memory or lower --max-seq-len"
            )
        max_seq_len = room
    most_verified = (CPU_VERIFY_TOKENS if machine.is_cpu else VERIFY_TOKENS) // (settings.speculate + 1)
    largest_chunk = settings.prefill_chunk or (128 if machine.is_cpu else 4096)
    return Sizes(
        rows=rows,
        max_seq_len=max_seq_len,
        page_size=settings.page_size,
        num_pages=num_pages,
        page_bytes=page_bytes,
        weight_bytes=weight_bytes,
        row_sizes=_row_sizes(machine, rows),
        num_draft=settings.speculate,
        verify_sizes=_doublings(1, min(rows, most_verified), by=4) if settings.speculate else (),
        chunk_sizes=_chunk_sizes(machine, largest_chunk, max_seq_len),
        piece_tokens=PIECE_TOKENS if machine.has_kernel else None,
        skips_padding=machine.skips_padding,
        mixed_context=machine.mixed_context,
        round_steps=settings.round_steps or (1 if machine.is_cpu else 8),
        has_all_modes=not machine.is_cpu,  # there full mode skips what nobody asks for, and compiling is what takes long
    )


def kv_floor(settings: Settings, *, max_position: int, page_bytes: int) -> int:
    """Bytes of KV pages that a model must have beside others: what was asked for, or a long chat."""
    if settings.kv_memory:
        return settings.kv_memory
    tokens = min(settings.max_seq_len or min(max_position, FLOOR_TOKENS), max_position)
    return page_bytes * (settings.kv_pages or -(-tokens // settings.page_size))


def free_memory() -> int:
    """Bytes this process may still take: the machine's, or what its control group leaves."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - used)


def cpu_features() -> str:
    """The CPU's kind and what it can do: x86 lists that as flags, ARM as Features."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(
        sorted({line for line in lines if line.startswith(("flags", "Features", "CPU part", "model name"))})
    )


def process_memory() -> int:
    """Bytes of the host's memory that this process takes now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _num_pages(settings: Settings, machine: Machine, rows: int, max_seq_len: int, page_bytes: int) -> int:
    if settings.kv_pages or settings.kv_memory:
        num_pages = settings.kv_pages or settings.kv_memory // page_bytes
        asked = (
            f"--kv-pages {settings.kv_pages}"
            if settings.kv_pages
            else f"--kv-memory {human(settings.kv_memory)}"
        )
    elif machine.is_cpu:
        wanted = -(-max(rows * TOKENS_PER_ROW, max_seq_len) // settings.page_size)
        num_pages = min(wanted, machine.free_bytes // 4 // page_bytes)
        asked = f"a quarter of the free {human(machine.free_bytes)}"
    else:
        every_row = rows * -(
            -max_seq_len // settings.page_size
        )  # more than all rows can fill would only slow the start
        num_pages = min(every_row, machine.free_bytes * 9 // 10 // page_bytes)
        asked = f"nine tenths of the free {human(machine.free_bytes)}"
    if num_pages < 1:
        raise ConfigError(
            f"{asked} does not hold one KV page of {settings.page_size} tokens, which takes {human(page_bytes)}"
        )
    if num_pages * page_bytes > machine.free_bytes:
        raise ConfigError(
            f"{asked} asks for {num_pages} pages x {human(page_bytes)} = {human(num_pages * page_bytes)}, "
            f"but only {human(machine.free_bytes)} are free after the weights"
        )
    return num_pages


def _row_sizes(machine: Machine, rows: int) -> tuple[int, ...]:
    if not machine.is_cpu:
        return _row_steps(8, max(rows, 2))
    return _doublings(
        2, max(rows, 2), by=4 if machine.skips_padding else 2
    )  # one update of the pool alone would copy all of it


def _chunk_sizes(machine: Machine, largest: int, max_seq_len: int) -> tuple[int, ...]:
    if machine.skips_padding:
        return (min(largest, max_seq_len),)
    if (
        machine.is_cpu
    ):  # a token takes about as long in any of them, and small ones keep the streams beside them waiting less
        return (*(size for size in CPU_CHUNKS if size < min(largest, max_seq_len)), min(largest, max_seq_len))
    if not machine.has_kernel:
        return _doublings(64, min(largest, max_seq_len))
    return _doublings(PIECE_TOKENS, -(-largest // PIECE_TOKENS) * PIECE_TOKENS)


def _doublings(smallest: int, largest: int, by: int = 2) -> tuple[int, ...]:
    """Powers of `by` times `smallest` below `largest`, and `largest` itself."""
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= by
    return (*sizes, largest)


def _row_steps(smallest: int, largest: int) -> tuple[int, ...]:
    """Doublings as long as they are `ROW_STEP` at most, then such steps, or quarters of the last power of two; and `largest` itself."""
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size += max(min(size, ROW_STEP), 1 << (size.bit_length() - 3))
    return (*sizes, largest)


def human(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
