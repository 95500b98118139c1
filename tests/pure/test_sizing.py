"""Sizes from settings and machine: sensible defaults, and refusals that show the sum."""

from __future__ import annotations

import errno
import functools
import resource
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from levserve.device.host import free_memory, peak_memory, process_memory
from levserve.device.memory_error import check_address_space, explained
from levserve.device.sizing import Sizes, plan_sizes
from levserve.device.text_sizing import plan_text_sizes
from levserve.errors import ConfigError, StartupError
from levserve.model.traits import CPU_TRAITS, GPU_KERNEL_TRAITS, GPU_TRAITS, Traits
from levserve.settings.parse import parse_settings

GIB = 1 << 30


def plan(
    *flags: str,
    traits: Traits = CPU_TRAITS,
    free: int = 8 * GIB,
    rows: int = 32,
    page_bytes: int = 1 << 20,
    peak_bytes: int = 0,
    draft_page_bytes: int = 0,
    byte_pages: Sequence[int] = (),
    scratch_bytes: int = 0,
) -> Sizes:
    settings = parse_settings(list(flags), {})
    return plan_sizes(
        settings,
        traits,
        free_bytes=free,
        rows=rows,
        max_position=8192,
        page_bytes=page_bytes,
        weight_bytes=GIB,
        peak_bytes=peak_bytes,
        draft_weight_bytes=GIB // 8 if draft_page_bytes else 0,
        draft_page_bytes=draft_page_bytes,
        byte_pages=byte_pages,
        scratch_bytes=scratch_bytes,
    )


def test_kv_pages_leave_what_prompts_need_for_widened_matrices() -> None:
    whole, less = (
        plan(traits=GPU_TRAITS, free=20 * GIB, rows=4096, scratch_bytes=each) for each in (0, 2 * GIB)
    )
    assert whole.kv_bytes - less.kv_bytes > 1.5 * GIB
    assert less.reserve_bytes - whole.reserve_bytes == whole.kv_bytes - less.kv_bytes
    with pytest.raises(ConfigError, match="does not hold one KV page"):
        plan(traits=GPU_TRAITS, free=GIB, scratch_bytes=2 * GIB)


def test_a_cpu_gets_a_long_chat_per_row_and_the_models_whole_context() -> None:
    sizes = plan()
    assert (sizes.num_pages, sizes.max_seq_len, sizes.table_width) == (1024, 8192, 256)
    assert sizes.row_sizes == (2, 4, 8, 16, 32) and sizes.chunk_sizes == (8, 16, 128)


def test_little_memory_shortens_the_context_nobody_asked_for() -> None:
    sizes = plan(free=400 << 20)
    assert sizes.num_pages == 100 and sizes.max_seq_len == 3200


def test_a_gpu_gets_most_of_what_is_free() -> None:
    sizes = plan(traits=GPU_TRAITS, free=100 * GIB, rows=512)
    assert sizes.num_pages == 92160 and sizes.round_steps == 8 and sizes.chunk_sizes[-1] == 4096


@pytest.mark.parametrize("layer_page", [1 << 10, 24 << 10, 40 << 10])
@pytest.mark.parametrize("draft_page", [0, 1 << 10, 30 << 10])
@pytest.mark.parametrize("free", [10 * GIB, 100 * GIB, 300 * GIB])
def test_gpu_kernels_never_get_a_page_of_one_byte_values_that_they_would_address_wrongly(
    layer_page: int, draft_page: int, free: int
) -> None:
    pages = [layer_page, draft_page] if draft_page else [layer_page]
    sizes = plan(traits=GPU_KERNEL_TRAITS, free=free, rows=4096, page_bytes=32 * sum(pages), byte_pages=pages)
    for page in pages:
        assert not 2 * GIB < sizes.num_pages * page <= 4 * GIB
    told = any(f"{sizes.num_beyond} more would fit" in line for line in sizes.describe())
    assert told == (sizes.num_beyond > 0)
    unbounded = plan(traits=GPU_TRAITS, free=free, rows=4096, page_bytes=32 * sum(pages), byte_pages=pages)
    assert unbounded.num_pages == sizes.num_pages + sizes.num_beyond


def test_pools_with_pages_beyond_4_gib_a_layer_are_addressed_with_64_bits() -> None:
    sizes = plan(
        traits=GPU_KERNEL_TRAITS, free=100 * GIB, rows=4096, page_bytes=1 << 17, byte_pages=[1 << 13]
    )
    assert sizes.num_pages << 13 > 4 * GIB and not sizes.num_beyond


def test_where_a_kernel_reads_pages_in_place_prompts_share_prefill_programs_in_pieces() -> None:
    sizes = plan("--prefill-chunk", "1000", traits=GPU_KERNEL_TRAITS, free=100 * GIB)
    assert sizes.chunk_sizes == (64, 128, 256, 512, 1024) and sizes.chunk_costs == tuple(range(64, 1025, 64))
    assert [sizes.prefill_rows(size) for size in sizes.chunk_sizes] == [
        (1, 64),
        (2, 64),
        (4, 64),
        (8, 64),
        (16, 64),
    ]


def test_a_gpu_gets_no_more_than_its_rows_can_fill() -> None:
    assert plan(traits=GPU_TRAITS, free=100 * GIB, rows=4).num_pages == 4 * 256


def test_drafts_are_checked_for_few_rows_and_cost_nothing_where_nobody_asks_for_them() -> None:
    assert plan().num_draft == 0 and plan().verify_sizes == ()
    sizes = plan("--speculate", "7")
    assert sizes.num_draft == 7 and sizes.verify_sizes == (1, 4)
    assert any("drafts of 7 tokens for at most 4 rows" in line for line in sizes.describe())
    assert plan("--speculate", "7", rows=2).verify_sizes == (1, 2)
    assert plan("--speculate", "15", rows=1).verify_sizes == (1,)
    assert plan("--speculate", "7", traits=GPU_TRAITS, free=100 * GIB).verify_sizes == (1, 4, 16, 32)


def test_a_draft_model_drafts_as_often_in_a_round_as_makes_about_its_steps() -> None:
    sizes = plan(traits=GPU_TRAITS, free=100 * GIB, draft_page_bytes=1 << 17)
    assert (sizes.num_draft, sizes.draft_turns, sizes.verify_sizes) == (4, 2, (2, 16, 32))
    assert plan("--speculate", "7", draft_page_bytes=1 << 17).verify_sizes == (2, 4)
    assert plan(draft_page_bytes=1 << 17).draft_turns == 1 and plan("--speculate", "7").draft_turns == 0
    described = "\n".join(plan(draft_page_bytes=1 << 17).describe())
    assert "weights     1 GiB, of which the draft model's 128 MiB" in described
    assert "32768 tokens, 1 GiB, of which the draft model's 128 MiB" in described
    assert repr(plan(draft_page_bytes=1 << 17)) != repr(plan("--speculate", "4"))


def test_a_gpus_decode_programs_differ_by_few_rows() -> None:
    gpu = functools.partial(plan, traits=GPU_KERNEL_TRAITS, free=100 * GIB)
    assert gpu(rows=1).row_sizes == (2,) and gpu(rows=20).row_sizes == (8, 16, 20)
    assert gpu(rows=256).row_sizes == (8, 16, 32, 64, 96, 128, 160, 192, 224, 256)
    assert gpu(rows=500).row_sizes[-5:] == (256, 320, 384, 448, 500)


def test_one_row_is_decoded_as_two() -> None:
    assert plan(rows=1).row_sizes == (2,)


def test_chunks_are_no_longer_than_the_context() -> None:
    assert plan("--max-seq-len", "100").chunk_sizes == (8, 16, 100)


@pytest.mark.parametrize(
    ("flags", "free", "words"),
    [
        (("--max-seq-len", "9000"), 8 * GIB, ("--max-seq-len 9000", "8192 positions")),
        (("--max-seq-len", "8192", "--kv-pages", "100"), 8 * GIB, ("256 pages", "has 100")),
        (("--kv-pages", "9000"), 8 * GIB, ("--kv-pages 9000", "8.789 GiB", "8 GiB")),
        (("--kv-memory", "1KiB"), 8 * GIB, ("--kv-memory 1 KiB", "1 MiB")),
        ((), 1 << 20, ("25% of the free 1 MiB",)),
    ],
)
def test_what_cannot_be_is_refused_with_its_arithmetic(
    flags: tuple[str, ...], free: int, words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        plan(*flags, free=free)
    for word in words:
        assert word in str(refusal.value)


def test_the_plan_can_be_read() -> None:
    assert any("1024 x 32 tokens = 32768 tokens, 1 GiB" in line for line in plan().describe())


def test_on_a_cpu_the_plan_adds_up_to_what_a_container_needs() -> None:
    sizes = plan()
    assert (sizes.kv_bytes, sizes.overhead_bytes, sizes.reserve_bytes) == (GIB, GIB, 0)
    assert sizes.total_bytes == 3 * GIB, "1 GiB of weights, 1 of pages and 1 of overhead"
    lines = sizes.describe()
    assert any(line.startswith("overhead    1 GiB") for line in lines)
    assert any(line.startswith("memory      3 GiB at most") for line in lines)


def test_the_plan_covers_what_loading_the_weights_took() -> None:
    little = plan(peak_bytes=2 * GIB)
    assert little.overhead_bytes == GIB, "there are no pages yet while the weights are read"
    much = plan(peak_bytes=5 * GIB)
    assert 5 * GIB < much.total_bytes < 5.1 * GIB


def test_on_a_gpu_the_plan_is_about_the_devices_memory() -> None:
    sizes = plan(traits=GPU_TRAITS, free=10 * GIB, rows=512)
    assert sizes.overhead_bytes == 0
    assert sizes.reserve_bytes == GIB and sizes.total_bytes == 11 * GIB
    assert any(line == "memory      11 GiB of the device" for line in sizes.describe())


def test_memory_that_is_left_over_is_no_part_of_a_programs_key() -> None:
    assert repr(plan()) == repr(plan(peak_bytes=5 * GIB))


def test_the_peak_of_memory_is_not_below_what_is_taken_now() -> None:
    taken = process_memory()
    assert peak_memory() >= taken > 1 << 20


def test_free_memory_is_a_sensible_number() -> None:
    assert 1 << 20 < free_memory() < 1 << 46


@pytest.mark.parametrize(
    ("group", "free"),
    [
        ({}, 9_000),
        ({"memory.max": "max", "memory.current": "1"}, 9_000),
        (
            {
                "memory.max": "8192000",
                "memory.current": "3072000",
                "memory.stat": "anon 5\nfile_mapped 1024000\n",
            },
            5_000,
        ),
        (
            {
                "memory.max": "8192000",
                "memory.current": "3072000",
                "memory.stat": "anon 5\nfile_mapped 24000\n",
            },
            4_023.4375,
        ),
        ({"memory.max": "8192000", "memory.current": "3072000"}, 4_000),
        (
            {
                "memory.max": "8192000",
                "memory.current": "3072000",
                "memory.stat": "anon 5\nfile_mapped 1024000\ninactive_file 2048000\n",
            },
            6_000,
        ),
        ({"a/memory.max": "8192000", "a/memory.current": "3072000"}, 4_000),
        ({"memory/b/memory.limit_in_bytes": "8192000", "memory/b/memory.usage_in_bytes": "3072000"}, 4_000),
    ],
)
def test_mapped_weights_are_not_free_although_linux_could_read_them_again(
    group: dict[str, str], free: float, tmp_path: Path
) -> None:
    """Of 10,000 kB available, 1,000 are mapped files; a control group counts all of them, some or none.

    Linux reclaims files that no process maps. The process's own group may be below the first.
    """
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("5:memory:/b\n0::/a\n")
    (tmp_path / "self/status").write_text("Name:\tx\nRssAnon:\t 7 kB\nRssFile:\t 1000 kB\n")
    (tmp_path / "meminfo").write_text("MemTotal:  90000 kB\nMemAvailable:  10000 kB\n")
    for name, text in group.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_memory(tmp_path, tmp_path) == free * 1024


def test_limits_of_the_process_count_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(kind: int) -> tuple[int, int]:
        return (process_memory() + (64 << 20), -1) if kind == resource.RLIMIT_DATA else (-1, -1)

    assert resource.RLIM_INFINITY == -1
    monkeypatch.setattr(resource, "getrlimit", limit)
    assert free_memory() < 4 * GIB
    with pytest.raises(StartupError, match="takes up to 384 MiB, and the process's limit leaves .*ulimit -v"):
        check_address_space()


def by_import() -> None:
    try:
        raise ImportError("libjax.so: failed to map segment from shared object")
    except ImportError as error:
        raise ImportError("Importing failed.\nWhat to do ...") from error


def by(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (by(MemoryError()), "MemoryError"),
        (by(MemoryError("no 5 bytes")), "no 5 bytes"),
        (by(OSError(errno.ENOMEM, "Cannot allocate memory", "x.gguf")), "Cannot allocate memory"),
        (by(RuntimeError("INTERNAL\nRESOURCE_EXHAUSTED: 8 GB\nmore")), "RESOURCE_EXHAUSTED: 8 GB"),
        (by(RuntimeError("std::bad_alloc")), "std::bad_alloc"),
        (by_import, "libjax.so: failed to map segment from shared object"),
    ],
)
def test_every_way_to_run_out_of_memory_becomes_one_line(fail: Callable[[], None], reason: str) -> None:
    with pytest.raises(StartupError) as refusal, explained("2 GiB for x", "lower x", lambda: GIB):
        fail()
    assert refusal.value.exit_code == 1
    line = str(refusal.value)
    assert line.startswith("out of memory: 2 GiB for x were asked for and 1 GiB are free; lower x (")
    assert reason in line and "\n" not in line


@pytest.mark.parametrize("error", [ValueError("no"), OSError(errno.ENOSPC, "No space"), ConfigError("no")])
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, explained("2 GiB for x", "lower x", lambda: GIB):
        raise error
    assert raised.value is error


def test_programs_are_few_and_chunks_of_many_sizes_where_padding_costs_nothing() -> None:
    traits = replace(CPU_TRAITS, leaves_out_padding=True)
    sizes = plan(rows=32, traits=traits)
    assert (sizes.row_sizes, sizes.chunk_sizes) == ((2, 8, 32), (128,))
    assert sizes.chunk_costs == tuple(range(8, 129, 8))
    assert plan("--prefill-chunk", "10", rows=1, traits=traits).chunk_costs == (8, 10), (
        "the last one holds any chunk"
    )
    assert plan("--prefill-chunk", "3", rows=1, traits=traits).chunk_costs == (3,)


def test_prompts_are_mixed_with_decoding_where_it_costs_nothing_and_changes_nothing() -> None:
    for given, mixed in (
        ({"leaves_out_padding": True, "mixed_context": 256}, 128),
        ({"leaves_out_padding": True}, 0),
        ({"mixed_context": 256}, 0),
    ):
        assert plan(rows=32, traits=replace(CPU_TRAITS, **given)).mixed_tokens == mixed


@pytest.mark.parametrize(
    ("max_seq_len", "lengths"),
    [
        (20, (32,)),
        (40, (32, 64)),
        (100, (32, 64, 128)),
        (200, (32, 64, 128, 224)),
        (300, (32, 64, 128, 256, 512)),
    ],
)
def test_texts_are_padded_to_whole_pages_and_limited_to_what_was_asked_for(
    max_seq_len: int, lengths: tuple[int, ...]
) -> None:
    sizes = plan_text_sizes(
        GPU_KERNEL_TRAITS, rows=64, max_seq_len=max_seq_len, vocab_size=96, weight_bytes=0
    )
    assert sizes.lengths == lengths
    assert sizes.max_seq_len == max_seq_len
    assert sizes.num_tokens == 64 * max_seq_len
    assert any(line.startswith(f"context     {max_seq_len} tokens") for line in sizes.describe())
