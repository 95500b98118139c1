"""How large everything is: rows, pages, context and the compiled shapes, from the settings and the device.

Pure arithmetic, done once at start. Error messages contain the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from levserve.errors import ConfigError
from levserve.model.traits import Traits
from levserve.settings.settings import Settings

TOKENS_PER_ROW = 1024
"""KV tokens per row by default: a long chat. The rows share the pool, so one of them may use much more."""

CHUNK_STEP = 8
"""The step between the costs of chunks, in tokens, if padding takes no time."""

ROW_STEP = 32
"""The step between the rows of decode programs on a GPU, where padding takes time from about 64 rows on. A
decode step of an 8B model on an H200 with 130 / 200 rows takes 9.8 / 11.0 ms in a program of 256 rows, and
8.0 / 10.0 ms in one of 160 / 224."""

DRAFT_TOKENS = 4
"""Tokens that a draft model drafts at a time by default. If it takes a sixth of the model's time and seven of
ten tokens are right, three to five gain about the same."""

ARBITER_BYTES = 64 << 20
"""More than gunicorn's arbiter takes, the process that starts the worker."""

SIGNED_BYTES, UNSIGNED_BYTES = 1 << 31, 1 << 32
FLOOR_TOKENS = 4 * TOKENS_PER_ROW
"""The fewest KV tokens that one of several models gets by default; others are unloaded to make room."""


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
    draft_turns: int = 0
    """How many times in a round a draft model drafts and the model checks; 0 without a draft model."""
    prefill_row_tokens: int | None = None
    """If set, prefill programs have rows of so many tokens, of one prompt or of several; else one row."""
    leaves_out_padding: bool = False
    """Whether padding takes a program no time."""
    mixed_context: int = 0
    """A decode program can compute prompt chunks that begin before this position; 0: none."""
    # No program depends on the fields below, and `repr` is part of a program's key.
    overhead_bytes: int = field(default=0, repr=False)
    """What the processes take besides weights and KV pages, if those are in the host's memory."""
    reserve_bytes: int = field(default=0, repr=False)
    """What weights and KV pages leave of a device's own memory, for the arrays of a step."""
    num_devices: int = field(default=1, repr=False)
    """Devices that share the model; all sizes in bytes are per device."""
    draft_weight_bytes: int = field(default=0, repr=False)
    """The part of the weights that is a draft model's."""
    draft_page_bytes: int = field(default=0, repr=False)
    """The part of a KV page that is a draft model's."""
    num_beyond: int = field(default=0, repr=False)
    """KV pages that there would be room for, but that kernels could not address."""

    @property
    def kv_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def total_bytes(self) -> int:
        """The most memory needed where the weights are. On a CPU, a container may be limited to this."""
        held_bytes = self.weight_bytes + self.kv_bytes
        if self.overhead_bytes:
            return self.num_devices * held_bytes + self.overhead_bytes
        return held_bytes + self.reserve_bytes

    @property
    def takes_longest_first(self) -> bool:
        """Whether rows run in order, many at a time: a long one that begins last then delays all."""
        return self.prefill_row_tokens is not None

    @property
    def table_width(self) -> int:
        return -(-self.max_seq_len // self.page_size)

    def prefill_rows(self, num_tokens: int) -> tuple[int, int]:
        """The rows of a prefill program of so many tokens, and the tokens of each."""
        if self.prefill_row_tokens is None:
            return 1, num_tokens
        return num_tokens // self.prefill_row_tokens, self.prefill_row_tokens

    @property
    def mixed_tokens(self) -> int:
        """Prompt tokens that the widest decode program computes beside its rows."""
        is_mixed = self.leaves_out_padding and self.mixed_context > 0 and self.round_steps == 1
        return self.chunk_sizes[-1] if is_mixed else 0

    @property
    def chunk_costs(self) -> tuple[int, ...]:
        """What a chunk may cost in a round's budget, ascending; padding counts if it takes time."""
        if self.leaves_out_padding:
            return (*range(CHUNK_STEP, self.chunk_sizes[-1], CHUNK_STEP), self.chunk_sizes[-1])
        if self.prefill_row_tokens is None:
            return self.chunk_sizes
        return tuple(range(self.prefill_row_tokens, self.chunk_sizes[-1] + 1, self.prefill_row_tokens))

    @property
    def num_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return self.num_pages * self.page_size

    def describe(self) -> list[str]:
        """The plan as lines for people."""
        drafts = ""
        if self.num_draft:
            drafts = f"; drafts of {self.num_draft} tokens for at most {self.verify_sizes[-1]} rows"
        each = f" on each of {self.num_devices} devices" if self.num_devices > 1 else ""
        weights = kv = ""
        if self.draft_turns:
            weights = f", of which the draft model's {human(self.draft_weight_bytes)}"
            kv = f", of which the draft model's {human(self.num_pages * self.draft_page_bytes)}"
        return [
            f"weights     {human(self.weight_bytes)}{each}{weights}",
            f"KV pages    {self.num_pages} x {self.page_size} tokens = {self.num_tokens} tokens, "
            f"{human(self.kv_bytes)}{each}{kv}",
            *self._describe_beyond(),
            *self._describe_memory(),
            f"context     {self.max_seq_len} tokens",
            f"rows        {self.rows}; decode shapes {', '.join(map(str, self.row_sizes))}; "
            f"{self.round_steps} step(s) a round{drafts}",
            f"prefill     chunks of {', '.join(map(str, self.chunk_sizes))} tokens",
        ]

    def _describe_beyond(self) -> list[str]:
        if not self.num_beyond:
            return []
        return [
            f"            {self.num_beyond} more would fit, but a layer's values of one byte are addressed "
            "only up to 2 GiB, or with more than 4 GiB"
        ]

    def _describe_memory(self) -> list[str]:
        total = f"memory      {human(self.total_bytes)}"
        if self.overhead_bytes:
            overhead = human(self.overhead_bytes)
            return [
                f"overhead    {overhead} for the runtime, the compiler, its programs and HTTP",
                f"{total} at most, and a container may be limited to that",
            ]
        where = "the device" if self.num_devices == 1 else "each device"
        return [f"reserve     {human(self.reserve_bytes)} for the arrays of a step", f"{total} of {where}"]


def plan_sizes(
    settings: Settings,
    traits: Traits,
    *,
    free_bytes: int,
    rows: int,
    max_position: int,
    page_bytes: int,
    weight_bytes: int,
    peak_bytes: int = 0,
    num_devices: int = 1,
    draft_weight_bytes: int = 0,
    draft_page_bytes: int = 0,
    byte_pages: Sequence[int] = (),
    scratch_bytes: int = 0,
) -> Sizes:
    """Plans for `free_bytes` that the weights leave; raises `ConfigError` for settings that do not fit.

    All bytes are per device, except `peak_bytes`, the most of the host's memory that the process has taken so
    far. Those of a draft model are included in the others. `byte_pages` has the bytes of a page in one layer,
    for each model whose keys and values take a byte each. KV pages leave `scratch_bytes` free.
    """
    max_seq_len = settings.max_seq_len or max_position
    if max_seq_len > max_position:
        raise ConfigError(f"--max-seq-len {max_seq_len} is more than the model's {max_position} positions")
    left = max(free_bytes - scratch_bytes, 0)
    num_fitting = _num_pages(settings, traits, left, rows, max_seq_len, page_bytes)
    num_pages = _num_addressed(num_fitting, byte_pages) if traits.has_short_offsets else num_fitting
    room = num_pages * settings.page_size
    if room < max_seq_len:
        if settings.max_seq_len:
            needed = -(-max_seq_len // settings.page_size)
            raise ConfigError(
                f"--max-seq-len {max_seq_len} needs {needed} pages of {settings.page_size} tokens "
                f"({human(page_bytes)} each), but the pool has {num_pages}: "
                f"raise --kv-memory or lower --max-seq-len"
            )
        max_seq_len = room
    round_steps = settings.round_steps or traits.round_steps
    num_draft = settings.speculate or (DRAFT_TOKENS if draft_page_bytes else 0)
    draft_turns = -(-round_steps // (num_draft + 1)) if draft_page_bytes else 0
    verify_sizes: tuple[int, ...] = ()
    if num_draft:
        most_verified = traits.verify_tokens // (num_draft + 1)
        verify_sizes = _verify_sizes(min(rows, most_verified), has_model=draft_turns > 0)
    largest_chunk = settings.prefill_chunk or traits.prefill_chunk
    kv_bytes = num_pages * page_bytes
    overhead_bytes = reserve_bytes = 0
    if traits.host_overhead:
        # Reading weights may take more than serving them: a matrix is in float32 before it is quantized.
        loading_bytes = peak_bytes + ARBITER_BYTES - num_devices * (weight_bytes + kv_bytes)
        overhead_bytes = max(traits.host_overhead, loading_bytes)
    else:
        reserve_bytes = free_bytes - kv_bytes
    return Sizes(
        rows=rows,
        max_seq_len=max_seq_len,
        page_size=settings.page_size,
        num_pages=num_pages,
        page_bytes=page_bytes,
        weight_bytes=weight_bytes,
        row_sizes=row_sizes(traits, rows),
        num_draft=num_draft,
        verify_sizes=verify_sizes,
        draft_turns=draft_turns,
        chunk_sizes=_chunk_sizes(traits, largest_chunk, max_seq_len),
        prefill_row_tokens=traits.prefill_row_tokens,
        leaves_out_padding=traits.leaves_out_padding,
        mixed_context=0 if draft_turns else traits.mixed_context,  # a draft model would run at every step
        round_steps=round_steps,
        has_all_modes=traits.has_all_modes,
        overhead_bytes=overhead_bytes,
        reserve_bytes=reserve_bytes,
        num_devices=num_devices,
        draft_weight_bytes=draft_weight_bytes,
        draft_page_bytes=draft_page_bytes,
        num_beyond=num_fitting - num_pages,
    )


def _verify_sizes(most: int, *, has_model: bool) -> tuple[int, ...]:
    """Rows of the programs that check drafts. With a draft model they are larger, so there are fewer, and
    they also decode, which takes at least two rows."""
    return doublings(2, max(most, 2), by=8) if has_model else doublings(1, most, by=4)


def kv_floor(settings: Settings, *, max_position: int, page_bytes: int) -> int:
    """Bytes of KV pages that one of several models must have: those asked for, or `FLOOR_TOKENS`."""
    if settings.kv_memory:
        return settings.kv_memory
    tokens = min(settings.max_seq_len or min(max_position, FLOOR_TOKENS), max_position)
    return page_bytes * (settings.kv_pages or -(-tokens // settings.page_size))


def _num_pages(
    settings: Settings, traits: Traits, free_bytes: int, rows: int, max_seq_len: int, page_bytes: int
) -> int:
    if settings.kv_pages:
        num_pages, asked = settings.kv_pages, f"--kv-pages {settings.kv_pages}"
    elif settings.kv_memory:
        num_pages, asked = settings.kv_memory // page_bytes, f"--kv-memory {human(settings.kv_memory)}"
    else:
        row_tokens = max_seq_len if traits.fills_memory else TOKENS_PER_ROW
        pages_per_row = -(-row_tokens // settings.page_size)
        longest = -(-max_seq_len // settings.page_size)
        wanted = max(rows * pages_per_row, longest)  # more than all rows can fill would only slow the start
        num_pages = min(wanted, int(free_bytes * traits.kv_share) // page_bytes)
        asked = f"{traits.kv_share:.0%} of the free {human(free_bytes)}"
    if num_pages < 1:
        page = f"one KV page of {settings.page_size} tokens, which takes {human(page_bytes)}"
        raise ConfigError(f"{asked} does not hold {page}")
    if num_pages * page_bytes > free_bytes:
        total = f"{num_pages} pages x {human(page_bytes)} = {human(num_pages * page_bytes)}"
        raise ConfigError(
            f"{asked} asks for {total}, but only {human(free_bytes)} are free after the weights"
        )
    return num_pages


def _num_addressed(num_pages: int, byte_pages: Sequence[int]) -> int:
    """How many of so many pages have offsets that fit; with more than 4 GiB a layer these have 64 bits."""
    is_fitting = False
    while not is_fitting:
        wraps = [page for page in byte_pages if SIGNED_BYTES < num_pages * page <= UNSIGNED_BYTES]
        num_pages = min([num_pages, *(SIGNED_BYTES // page for page in wraps)])
        is_fitting = not wraps
    return num_pages


def row_sizes(traits: Traits, rows: int) -> tuple[int, ...]:
    """Rows of the programs that decode or draw."""
    if traits.steps_rows:
        return _row_steps(8, max(rows, 2))
    # Never a program of one row: XLA would copy the whole pool for it.
    return doublings(2, max(rows, 2), by=4 if traits.leaves_out_padding else 2)


def _chunk_sizes(traits: Traits, largest: int, max_seq_len: int) -> tuple[int, ...]:
    if (row_tokens := traits.prefill_row_tokens) is not None:
        return doublings(row_tokens, -(-largest // row_tokens) * row_tokens)
    largest = min(largest, max_seq_len)
    if traits.leaves_out_padding:
        return (largest,)
    if not traits.small_chunks:
        return doublings(64, largest)
    # A token takes about as long in each of these, and small ones keep streams waiting less.
    return (*(size for size in traits.small_chunks if size < largest), largest)


def doublings(smallest: int, largest: int, by: int = 2) -> tuple[int, ...]:
    """Powers of `by` times `smallest` below `largest`, and `largest` itself."""
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= by
    return (*sizes, largest)


def _row_steps(smallest: int, largest: int) -> tuple[int, ...]:
    """From `smallest` to `largest`: doublings up to `ROW_STEP`, then steps of it; from 256 on, of a
    quarter of the power of two below."""
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
