"""An HRM brain, and how this device serves it: every token computes its whole text, without a KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from levserve.device.kind import Planner, RoundRunner
from levserve.device.platform import kernel_platform, open_device
from levserve.device.sizing import human
from levserve.device.text_runner import TextRunner
from levserve.device.text_sizing import TextSizes, plan_text_sizes, round_tokens
from levserve.errors import ConfigError, StartupError
from levserve.model.backend import Backend
from levserve.model.hrm import Hrm
from levserve.model.hrm_config import HrmConfig, hrm_parameter_shapes
from levserve.model.select import choose_text_backend
from levserve.models.checks import check_host_memory, check_same_model, sum_bytes
from levserve.observe.metrics import Metrics
from levserve.schedule.whole_text import WholeTextScheduler, WorkBudget
from levserve.settings.settings import Settings
from levserve.text.chat import LAST_USER_MESSAGE
from levserve.weights.brain_config import read_brain_config
from levserve.weights.brain_folder import find_brain
from levserve.weights.brain_tensors import read_brain_arrays
from levserve.weights.model_files import ModelFiles


@dataclass(frozen=True, slots=True)
class BrainDescription:
    """See `ModelKind`."""

    settings: Settings
    files: ModelFiles
    config: HrmConfig
    config_lines: tuple[str, ...]
    devices: tuple[jax.Device]
    dtype: jnp.dtype
    backend: Backend

    default_chat_template = LAST_USER_MESSAGE
    has_whole_texts = True

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def expected_weight_bytes(self) -> int:
        return sum_bytes(hrm_parameter_shapes(self.config), self.dtype)

    @property
    def floor_bytes(self) -> int:
        """The logits of a few texts."""
        return 8 * self.config.vocab_size * 4

    def lines(self) -> list[str]:
        return [
            f"device      {self.devices[0]}",
            *self.config_lines,
            f"tokenizer   {self.files.tokenizer}",
            f"matrices    {self.dtype}",
            f"backend     {self.backend.describe()}",
        ]

    def load_arrays(self, report: Callable[[str], None]) -> dict[str, jax.Array]:
        arrays = read_brain_arrays(
            self.files.path, self.config, self.dtype, report=report, backend=self.backend
        )
        return {name: jax.device_put(host).block_until_ready() for name, host in arrays}

    def plan_sizes(self, *, free_bytes: int, weight_bytes: int, peak_bytes: int) -> TextSizes:
        sizes = plan_text_sizes(
            self.backend.traits,
            rows=self.settings.max_running,
            max_seq_len=self.config.max_position,
            vocab_size=self.vocab_size,
            weight_bytes=weight_bytes,
        )
        if sizes.state_bytes > free_bytes:
            raise ConfigError(
                f"the logits of {sizes.rows} rows take {human(sizes.state_bytes)}, but only "
                f"{human(free_bytes)} are free after the weights: lower --max-running"
            )
        return sizes

    def explain_memory(self, sizes: TextSizes) -> tuple[str, str]:
        return f"{human(sizes.state_bytes)} for the logits of {sizes.rows} rows", "lower --max-running"

    def make_runner(self, arrays: Mapping[str, jax.Array], sizes: TextSizes, metrics: Metrics) -> RoundRunner:
        model = Hrm.from_arrays(self.config, arrays, backend=self.backend)
        return TextRunner(model, self.backend, self.vocab_size, sizes, metrics)

    def make_planner(self, sizes: TextSizes, runner: RoundRunner) -> Planner:
        tokens = round_tokens(sizes, runner.prefill_token_seconds)
        return WholeTextScheduler(WorkBudget(sizes.rows, sizes.lengths, tokens))

    def read_leaves(
        self, settings: Settings, files: ModelFiles, report: Callable[[str], None]
    ) -> list[jax.Array]:
        config = read_brain_config(find_brain(files.path), settings).config
        check_same_model(files.path, self.config, config)
        check_host_memory(sum_bytes(hrm_parameter_shapes(config), self.dtype))
        arrays = read_brain_arrays(files.path, config, self.dtype, report=report, backend=self.backend)
        cpu = jax.local_devices(backend="cpu")[0]
        with jax.default_device(cpu):
            on_host = {name: jax.device_put(array, cpu) for name, array in arrays}
            return jax.tree.leaves(Hrm.from_arrays(config, on_host, backend=self.backend))

    def convert_leaves(self, arrays: Mapping[str, Any], report: Callable[[str], None]) -> list[jax.Array]:
        raise StartupError("the weights of an HRM brain are read from its file, not from memory")

    def with_files(self, settings: Settings, files: ModelFiles) -> BrainDescription:
        return replace(self, settings=settings, files=files)


def describe_brain(settings: Settings, files: ModelFiles) -> BrainDescription:
    """Raises `ConfigError` for settings that do not apply to a brain, `StartupError` for unusable files."""
    asked = {
        "--quantize": settings.quantize not in ("auto", "none"),
        "--kv-dtype": settings.kv_dtype in ("fp8", "int8"),
        "--speculate": settings.speculate > 0,
        "--draft-model": settings.draft_model != "",
    }
    for option, is_asked in asked.items():
        if is_asked:
            raise ConfigError(
                f"{option} does not apply to {files.name}: "
                "an HRM brain has no KV cache and cannot be quantized"
            )
    if settings.num_hosts > 1:
        raise ConfigError(f"--num-hosts does not apply to {files.name}: an HRM brain runs on one device")
    if settings.tensor_parallel > 1:
        raise ConfigError(
            f"--tensor-parallel does not apply to {files.name}: an HRM brain runs on one device"
        )
    found = read_brain_config(find_brain(files.path), settings)
    device = open_device(settings)
    # AI-OS computes in float32 whatever the weights are stored in.
    dtype = jnp.dtype(jnp.bfloat16 if settings.dtype == "bfloat16" else jnp.float32)
    return BrainDescription(
        settings=settings,
        files=files,
        config=found.config,
        config_lines=found.lines,
        devices=(device,),
        dtype=dtype,
        backend=choose_text_backend(kernel_platform(device), found.config.block, settings.kernels),
    )
