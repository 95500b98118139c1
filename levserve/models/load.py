"""Loads a model: finds its files, reads and sizes everything, compiles and probes it.

`load` runs on the device thread for the first model and on the loader's thread beside it for others; jax is first
imported there.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from levserve.device.malloc import tune_malloc
from levserve.device.sizing import Machine, Sizes, cpu_features, free_memory, human, kv_floor, plan_sizes
from levserve.engine.engine import Engine
from levserve.engine.served_model import ServedModel
from levserve.errors import ConfigError, StartupError
from levserve.jit.code_cache import CodeCache, open_folder, use_cache
from levserve.models.entry import Counts, Resident
from levserve.models.probe import mean, probe_request
from levserve.models.registry import MakeRoom
from levserve.observe.logs import adopt_libraries
from levserve.observe.metrics import Metrics
from levserve.schedule.budget import Budget
from levserve.schedule.pace import Pace
from levserve.schedule.pages import PagePool
from levserve.schedule.scheduler import Scheduler
from levserve.schedule.speculation import Speculation
from levserve.settings.settings import Settings

if TYPE_CHECKING:
    import jax
    import jax.numpy as jnp

    from levserve.device.runner import Runner
    from levserve.device.tasks import Attach
    from levserve.model.config import ModelConfig
    from levserve.models.reload import Origin
    from levserve.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

CPU_CHUNK_OVERHEAD = 24
"""Tokens: of the bundled model a chunk takes 12 ms to read the weights, and 0.33 for each token."""
CPU_DOUBLE_AT = 512
"""There attention takes a CPU as long as the rest of a token."""


class Loaded(NamedTuple):
    """Everything the device loop needs, ready to run."""

    model: ServedModel
    scheduler: Scheduler
    runner: Runner
    sizes: Sizes
    origin: Origin
    pace: Pace

    def attach(self) -> Attach:
        """What tells the device thread to serve it."""
        from levserve.device.tasks import Attach

        return Attach(self.model.name, self.scheduler, self.runner, self.pace)


def resident_of(engine: Engine, loaded: Loaded) -> Resident:
    """What other threads may know of a loaded model."""
    from levserve.models.reload import WeightReloader

    scheduler, sizes = loaded.scheduler, loaded.sizes

    def counts() -> Counts:
        return Counts(
            scheduler.num_running, scheduler.num_waiting, scheduler.pool.num_held, scheduler.pool.num_pages
        )

    # The pool as many times over as the queue is longer than the rows: with the longest chats each place can be taken.
    max_tokens = sizes.num_tokens * engine.max_inflight // sizes.rows
    return Resident(
        model=replace(loaded.model, max_inflight_tokens=max_tokens),
        weight_bytes=sizes.weight_bytes,
        kv_bytes=sizes.num_pages * sizes.page_bytes,
        reloader=WeightReloader(engine, loaded.origin, loaded.model),
        counts=counts,
    )


def load(
    settings: Settings,
    metrics: Metrics,
    *,
    rows: int,
    report: Callable[[str], None],
    make_room: MakeRoom | None = None,
) -> Loaded:
    """Finds, reads and compiles; slow. On the device thread, or on the loader's beside it.

    With `make_room` it may take what that gives it, else all that is free.
    """
    from levserve.weights.source import find_source

    files = find_source(settings, report)
    if "jax" not in sys.modules:
        report("importing jax")
    _set_up_jax(settings)
    import jax.numpy as jnp

    from levserve.device.runner import Runner
    from levserve.model import cache
    from levserve.model.attention import Kernel, choose_kernel
    from levserve.model.decoder import Decoder
    from levserve.model.quantize import choose_quantization
    from levserve.models.reload import Origin, parameter_bytes
    from levserve.weights.load import load_arrays, read_config

    device = _find_device(settings.device)
    log.info("device: %s", device)
    helper = ThreadPoolExecutor(1, thread_name_prefix="levserve-tokenizer")
    loading = helper.submit(
        _load_tokenizer, settings, files.tokenizer or files.path
    )  # the weights are read meanwhile
    helper.shutdown(wait=False)
    config = read_config(files.path, files.config_file)
    dtype = jnp.dtype(jnp.float32 if settings.dtype == "float32" else jnp.bfloat16)
    check_fp8(settings, device)
    narrow = choose_narrow(settings, device.platform, files.path, config)
    kernel, reason = choose_kernel(device.platform, config, cpu_features(), narrow)
    quantization = choose_quantization(narrow, device.platform, dtype, kernel)
    kept = cache.kv_dtype(settings.kv_dtype, dtype)
    storage = cache.storage_dtype(kept, device.platform)
    page_bytes = cache.page_bytes(config, settings.page_size, storage)
    who = "" if make_room is None else f"{settings.served_model_name}: "
    allowed: int | None = None
    if make_room is not None:
        kv_bytes = kv_floor(settings, max_position=config.max_position, page_bytes=page_bytes)
        needed = parameter_bytes(config, narrow or dtype) + kv_bytes
        allowed = make_room(needed, lambda: _free_bytes(device))
    with _explained("the weights", _free_bytes(device), "serve a smaller model"):
        arrays = load_arrays(files.path, config, dtype, report=report, quantization=quantization)

    log.info("%smatrices    %s", who, quantization or dtype)
    log.info("%sattention   %s: %s; keys and values in %s", who, kernel, reason, kept)
    weight_bytes = sum(array.nbytes for array in arrays.values())
    free = _free_bytes(device) if allowed is None else min(_free_bytes(device), allowed - weight_bytes)
    skips_padding = Decoder.from_arrays(
        config, arrays, kernel=kernel, quantization=quantization
    ).skips_padding(kept)
    if skips_padding:
        log.info("%slayers      one kernel for all of them, which leaves out padding", who)
    sizes = plan_sizes(
        settings,
        Machine(
            device.platform,
            free,
            kernel is Kernel.TRITON,
            skips_padding,
            _mixed_context() if skips_padding else 0,
        ),
        rows=rows,
        max_position=config.max_position,
        page_bytes=page_bytes,
        weight_bytes=weight_bytes,
    )
    for line in sizes.describe():
        log.info("%s%s", who, line)
    model = Decoder.from_arrays(
        config.stretched_for(sizes.max_seq_len), arrays, kernel=kernel, quantization=quantization
    )
    del arrays
    kv_bytes = sizes.num_pages * sizes.page_bytes
    with _explained(
        f"{human(kv_bytes)} for {sizes.num_pages} KV pages",
        free,
        "lower --kv-memory, --kv-pages or --max-running",
    ):
        runner = Runner(model, sizes, storage, metrics)
        del model
        try:
            tokenizer = loading.result()
            adopt_libraries()
            runner.warm_up(report)
        except BaseException:
            runner.free()
            raise
    speculation = Speculation(sizes.num_draft) if sizes.num_draft else None
    log.info("%sprefill     %.3g ms a token", who, runner.prefill_token_seconds * 1000)
    budget = Budget(
        sizes.rows,
        sizes.round_steps,
        sizes.chunk_costs,
        busy_tokens=sizes.num_tokens,
        idle_tokens=sizes.chunk_sizes[-1],
        chunk_overhead=CPU_CHUNK_OVERHEAD if device.platform == "cpu" and not sizes.mixed_tokens else 0,
        double_at=CPU_DOUBLE_AT if device.platform == "cpu" else None,
    )
    scheduler = Scheduler(PagePool(sizes.num_pages, sizes.page_size), budget, speculation)
    name = settings.served_model_name or files.name
    served = ServedModel(name, tokenizer, sizes.max_seq_len, config.hidden_size, int(time.time()))
    scores = _score_probe(scheduler, runner, served)
    log.info(
        "%sprobe       mean log-probability %.3f over %d tokens of a fixed text",
        who,
        mean(scores),
        len(scores),
    )
    pace = Pace(runner.prefill_token_seconds, settings.inter_token_goal_ms / 1000)
    return Loaded(
        served, scheduler, runner, sizes, Origin(settings, files, config, dtype, quantization), pace
    )


def choose_narrow(settings: Settings, platform: str, path: Path, config: ModelConfig) -> jnp.dtype | None:
    """The eight bits that matrices are served in, if they are.

    Unasked on a CPU, which is twice as fast with them, if the file has no more of them: then little is lost.
    """
    from levserve.model.quantize import NARROW
    from levserve.weights.load import is_quantized_file

    if settings.quantize == "fp8" and platform == "cpu":
        raise ConfigError("--quantize fp8 is for GPUs, and this is a cpu: use --quantize int8")
    if settings.quantize != "auto":
        return NARROW.get(settings.quantize)
    is_wanted = (
        platform == "cpu" and settings.dtype == "auto" and not config.num_experts and is_quantized_file(path)
    )
    return NARROW["int8"] if is_wanted else None


def check_fp8(settings: Settings, device: jax.Device) -> None:
    """NVIDIA's GPUs know it from Ada and Hopper on; for others the programs would not compile."""
    asked = [
        f"--{name} fp8"
        for name, value in (("kv-dtype", settings.kv_dtype), ("quantize", settings.quantize))
        if value == "fp8"
    ]
    if asked and device.platform == "gpu" and tuple(map(int, device.compute_capability.split("."))) < (8, 9):
        raise ConfigError(
            f"{asked[0]} needs a GPU of compute capability 8.9 or later, and this one has {device.compute_capability}"
        )


def _mixed_context() -> int:
    from levserve.model.cpu import attention as cpu_attention  # and LLVM with it, which others do without

    return cpu_attention.MIXED_CONTEXT


def _score_probe(scheduler: Scheduler, runner: Runner, model: ServedModel) -> list[float]:
    scheduler.add(probe_request(model))
    scores: list[float] = []
    while scheduler.has_work:
        in_flight = runner.dispatch(scheduler.plan())
        updates = scheduler.commit(in_flight.plan, *runner.read(in_flight))
        scores += [score.logprob for update in updates for score in update.batch.prompt_logprobs]
    scheduler.forget_prefixes()  # clients begin with an empty cache
    return scores


@contextmanager
def _explained(asked: str, free_bytes: int, advice: str) -> Iterator[None]:
    """Turns running out of memory into one line that says what was asked, what is there and what to do."""
    try:
        yield
    except (
        RuntimeError,
        MemoryError,
    ) as error:  # jax raises a kind of RuntimeError, with XLA's code in the text
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise StartupError(
            f"out of memory: {asked} were asked for and {human(free_bytes)} are free; {advice} ({str(error).splitlines()[0]})"
        ) from error


def _free_bytes(device: jax.Device) -> int:
    if device.platform == "cpu":
        return free_memory()
    stats = device.memory_stats()
    return int(stats["bytes_limit"] - stats["bytes_in_use"])


def _load_tokenizer(settings: Settings, path: Path) -> Tokenizer:
    from levserve.text.chat import check_template
    from levserve.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path, chat_template=_chat_template(settings))
    check_template(tokenizer)
    return tokenizer


def _set_up_jax(settings: Settings) -> None:
    """Chooses the platform and the folder of compiled programs, before jax looks at any device."""
    import jax

    tune_malloc()
    if settings.device != "auto":
        # The host is a device too: weights are arranged there before they are swapped in.
        jax.config.update(
            "jax_platforms", {"gpu": "cuda,cpu", "tpu": "tpu,cpu"}.get(settings.device, settings.device)
        )
    if settings.dtype == "float32":
        jax.config.update(
            "jax_default_matmul_precision", "highest"
        )  # a GPU would multiply with ten bits of fraction
    if settings.compile_cache:
        folder = open_folder(settings.cache_path / "programs", cpu_features())
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        use_cache(CodeCache(folder))


def _find_device(wanted: str) -> jax.Device:
    import jax

    try:
        return jax.devices()[0]
    except RuntimeError as error:
        raise StartupError(
            f"--device {wanted}: no such device here ({str(error).splitlines()[0]})"
        ) from error


def _chat_template(settings: Settings) -> str | None:
    if not settings.chat_template:
        return None
    try:
        return Path(settings.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--chat-template {settings.chat_template}: {error}") from error
