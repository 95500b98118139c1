"""How work is best divided on a device, as its backend says. No jax here: sizing needs numbers only."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Traits:
    """How work is best divided on a device. Sizing, programs, warm-up and the scheduler's budget read it."""

    round_steps: int
    """Decode steps in one round, unless the operator sets them."""
    prefill_chunk: int
    """Prompt tokens in one program, at most, unless the operator sets them."""
    verify_tokens: int
    """Drafted and newest tokens of all rows that one step can check before it takes noticeably longer."""
    kv_share: float
    """Part of the free memory that the KV pool may take by default."""
    fills_memory: bool
    """Whether the KV pool takes its whole share by default, or only what the rows are likely to need."""
    has_all_modes: bool
    """Whether greedy and plain sampling have programs of their own; otherwise the full one serves them."""
    text_tokens: int = 1 << 15
    """The most tokens, of several texts, in one program of a model that computes whole texts."""
    host_overhead: int = 0
    """The most bytes that the processes take in the memory that holds the weights, besides weights and KV
    pages; 0 for a device with its own memory."""
    small_chunks: tuple[int, ...] = ()
    """Sizes of prefill programs below the largest; empty: they double from 64."""
    prefill_row_tokens: int | None = None
    """If set, prefill programs take rows of this many tokens, of one prompt or of several; None: one row."""
    steps_rows: bool = False
    """Whether decode programs come in fine steps of rows: unused rows cost time on a GPU."""
    leaves_out_padding: bool = False
    """Whether padding takes a program no time, so that a few programs serve all sizes."""
    score_tile: int | None = None
    """If set, prompts are scored this many positions at a time, and only where one of them is wanted. None:
    a chunk is scored as a whole if one is wanted, because a GPU would wait for the host at each decision."""
    mixed_context: int = 0
    """Chunks that begin before this position can be computed in one program with decoding rows; 0: none."""
    chunk_overhead: int = 0
    """What beginning a prefill chunk costs, in tokens."""
    double_at: int | None = None
    """The context at which attention costs a prompt's token as much as everything else."""
    has_short_offsets: bool = False
    """Whether kernels count the values of a layer's KV pool with 31 bits, unless it is larger than 4 GiB."""
    first_runs: int = 1
    """Runs that a program needs to reach its full speed."""
    warms_largest: bool = False
    """Whether the largest programs are compiled before the server is ready, besides the smallest."""
    times_all_prefill: bool = True
    """Whether the measured speed of prefill counts all prefill programs, or only the first."""


CPU_OVERHEAD_BYTES = 1 << 30
"""Python, jax, the tokenizer, HTTP threads, compiled programs, a step's arrays, and above all the compiler.
Measured: 690 to 770 MiB while a first start compiles, whatever the model (3 to 64 layers, vocabularies of 384
to 128,256, int8, bfloat16 and float32), and 420 to 560 MiB under load."""

CPU_TRAITS = Traits(
    round_steps=1,
    prefill_chunk=128,
    verify_tokens=32,
    kv_share=0.25,
    fills_memory=False,
    text_tokens=2048,  # fewer tokens keep a CPU busy, and each program takes time to compile
    has_all_modes=False,  # compiling is what takes long on a CPU
    host_overhead=CPU_OVERHEAD_BYTES,
    small_chunks=(8, 16),  # every program takes some 40 MB, so there are few
    # With the bundled model, a chunk takes 12 ms to read the weights, and 0.33 ms for each token.
    chunk_overhead=24,
    double_at=512,
    score_tile=16,
    # Chunks beside streams are small, and first runs of larger programs take longer.
    times_all_prefill=False,
)
ACCELERATOR_TRAITS = Traits(
    round_steps=8,
    prefill_chunk=4096,
    verify_tokens=256,
    kv_share=0.9,
    fills_memory=True,
    has_all_modes=True,
    steps_rows=True,
    # A GPU runs a program kernel by kernel first, then records a graph, and replays that from the third run
    # on.
    first_runs=3,
)
GPU_TRAITS = replace(ACCELERATOR_TRAITS, warms_largest=True)
"""The largest programs are compiled before serving: else a first burst would be served eight at a time."""
# Pallas' Triton backend chooses between 32 and 64 bits by an array's bytes, but counts its elements.
GPU_KERNEL_TRAITS = replace(GPU_TRAITS, prefill_row_tokens=64, has_short_offsets=True)
"""Kernels read pages in place: rows of one prompt cost no more than one long row, and waste less."""
