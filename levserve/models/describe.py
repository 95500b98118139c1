"""The second step of a start, for decoders: what the model is, and how this device serves it.

Reads configuration files and no weights. Every choice that depends on the kind of device is made here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from levserve.device.kind import Planner, RoundRunner
from levserve.device.mesh import choose_mesh
from levserve.device.platform import kernel_platform, open_device
from levserve.device.runner import DraftModel, Runner
from levserve.device.sizing import Sizes, human, kv_floor, plan_sizes
from levserve.model import cache
from levserve.model.backend import Backend
from levserve.model.config import ModelConfig
from levserve.model.decoder import Blueprint
from levserve.model.packed import Kept
from levserve.model.parameter_shapes import parameter_shapes
from levserve.model.placement import HostArray, shards_of
from levserve.model.quantize import (
    BLOCKS_NAME,
    IN_BLOCKS,
    IN_FOUR_BITS,
    Quantization,
    choose_quantization,
    quantized_bytes,
    widens_blocks,
)
from levserve.model.select import choose_backend
from levserve.model.sharding import Shards, local_config
from levserve.models.checks import check_draft, check_host_memory, check_same_model, sum_bytes
from levserve.models.matrices import (
    arrange,
    check_eight_bits,
    check_kept,
    choose_format,
    choose_four_bits,
    choose_kept,
    choose_narrow,
)
from levserve.observe.metrics import Metrics
from levserve.schedule.budget import Budget
from levserve.schedule.pages import PagePool
from levserve.schedule.scheduler import Scheduler
from levserve.schedule.speculation import Speculation
from levserve.settings.settings import Settings
from levserve.weights.checkpoint import (
    Tensors,
    convert_tensors,
    find_four_bit_matrices,
    is_quantized_checkpoint,
    load_arrays,
    open_tensors,
    read_config,
)
from levserve.weights.memory_tensors import tensors_in_memory
from levserve.weights.model_files import ModelFiles
from levserve.weights.prepared import WeightCache, find_cache
from levserve.weights.source import draft_settings

DRAFT = "draft."
"""The prefix of the names of a draft model's arrays."""


@dataclass(frozen=True, slots=True)
class Description:
    """See `ModelKind`.

    A reload replaces `settings` and `files`; weights that need anything else to change are refused.
    """

    settings: Settings
    files: ModelFiles
    config: ModelConfig
    """Of the whole model, not of one device's share."""
    device: jax.Device
    """The first, if several share the model."""
    mesh: Mesh | None
    dtype: jnp.dtype
    quantization: Quantization | Kept | None
    backend: Backend
    backend_reason: str
    kv_dtype: jnp.dtype
    draft: Description | None = None
    """A smaller model that drafts for this one."""

    default_chat_template = None
    has_whole_texts = False

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def shards(self) -> Shards:
        return shards_of(self.mesh)

    @property
    def local_config(self) -> ModelConfig:
        """What each device runs: the whole model, or its share."""
        return local_config(self.config, self.shards.count)

    @property
    def devices(self) -> Sequence[jax.Device]:
        if self.mesh is None:
            return (self.device,)
        return tuple(self.mesh.devices.flat[index] for index in self.shards.here)

    @property
    def storage(self) -> jnp.dtype:
        """The type that KV pages are stored in."""
        return self.backend.kv_storage(self.kv_dtype)

    @property
    def read_dtype(self) -> jnp.dtype:
        """The type in which weights are read: float32 if they will be quantized, to round them only once."""
        return jnp.dtype(jnp.float32) if isinstance(self.quantization, Quantization) else self.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of a KV page on each device, including the draft model's part of it."""
        own = cache.page_bytes(self.local_config, self.settings.page_size, self.storage)
        return own if self.draft is None else own + self.draft.page_bytes

    @property
    def _byte_pages(self) -> tuple[int, ...]:
        """Bytes of a KV page in one layer, of each model whose keys and values take a byte each."""
        own = cache.page_bytes(self.local_config, self.settings.page_size, self.storage)
        pages = (own // self.config.num_layers,) if self.storage.itemsize == 1 else ()
        return pages if self.draft is None else pages + self.draft._byte_pages

    @property
    def expected_weight_bytes(self) -> int:
        return self._own_weight_bytes + (0 if self.draft is None else self.draft.expected_weight_bytes)

    @property
    def _own_weight_bytes(self) -> int:
        if isinstance(self.quantization, Quantization):
            return quantized_bytes(self.local_config, self.dtype, self.quantization)
        shapes = parameter_shapes(self.local_config)
        schemes = {} if self.quantization is None else self.quantization.by_name()
        stored = sum(scheme.num_bytes(shapes.pop(name)) for name, scheme in schemes.items())
        return stored + sum_bytes(shapes, self.dtype)

    @property
    def host_weight_bytes(self) -> int:
        """What new weights take on this host before they replace those on the devices, at most."""
        return self._own_weight_bytes * len(self.shards.here)

    @property
    def floor_bytes(self) -> int:
        return kv_floor(self.settings, max_position=self.config.max_position, page_bytes=self.page_bytes)

    def load_arrays(self, report: Callable[[str], None]) -> dict[str, jax.Array]:
        """The weights, on the device; those of the draft model have a prefix."""
        arrays = load_arrays(
            self.files.path,
            self.config,
            self.dtype,
            report=report,
            quantization=self.quantization,
            backend=self.backend,
            mesh=self.mesh,
            prepared=self._prepared(),
            adapter=self.files.adapter,
        )
        if self.draft is not None:
            report(f"reading the draft model {self.draft.files.name}")
            for name, array in self.draft.load_arrays(report).items():
                arrays[DRAFT + name] = array
        return arrays

    def _prepared(self) -> WeightCache | None:
        """The cache of a CPU's prepared weights; None for other devices, which copy them, and for a mesh."""
        if self.device.platform != "cpu" or self.mesh is not None:
            return None
        storage = self.backend.expert_storage(self.dtype)
        made = f"{self.config}\n{self.quantization!r}\n{self.dtype}\n{storage}"
        return find_cache(self.settings, self.files, made, self._own_weight_bytes)

    def plan_sizes(self, *, free_bytes: int, weight_bytes: int, peak_bytes: int) -> Sizes:
        return plan_sizes(
            self.settings,
            self.backend.traits,
            free_bytes=free_bytes,
            rows=self.settings.max_running,
            max_position=self.config.max_position,
            page_bytes=self.page_bytes,
            weight_bytes=weight_bytes,
            peak_bytes=peak_bytes,
            num_devices=self.shards.count,
            draft_weight_bytes=0 if self.draft is None else self.draft.expected_weight_bytes,
            draft_page_bytes=0 if self.draft is None else self.draft.page_bytes,
            byte_pages=self._byte_pages,
            scratch_bytes=self._scratch_bytes,
        )

    @property
    def _scratch_bytes(self) -> int:
        """Of the larger of this model and its draft model, which do not run at the same time."""
        own = 0
        if isinstance(self.quantization, Kept):
            own = self.backend.scratch_bytes(self.local_config, self.quantization.by_name())
        return own if self.draft is None else max(own, self.draft._scratch_bytes)

    def explain_memory(self, sizes: Sizes) -> tuple[str, str]:
        asked = f"{human(sizes.kv_bytes)} for {sizes.num_pages} KV pages"
        return asked, "lower --kv-memory, --kv-pages or --max-running"

    def make_runner(self, arrays: Mapping[str, jax.Array], sizes: Sizes, metrics: Metrics) -> RoundRunner:
        own = {name: array for name, array in arrays.items() if not name.startswith(DRAFT)}
        draft = None
        if self.draft is not None:
            drafts = {
                name.removeprefix(DRAFT): array for name, array in arrays.items() if name.startswith(DRAFT)
            }
            draft = DraftModel(self.draft.blueprint(sizes), drafts, self.draft.storage)
        return Runner(self.blueprint(sizes), own, sizes, self.storage, metrics, draft)

    def blueprint(self, sizes: Sizes) -> Blueprint:
        config = self.local_config.stretched_for(sizes.max_seq_len)
        return Blueprint(config, self.backend, self.quantization)

    def make_planner(self, sizes: Sizes, runner: RoundRunner) -> Planner:
        traits = self.backend.traits
        budget = Budget(
            sizes.rows,
            sizes.round_steps,
            sizes.chunk_costs,
            busy_tokens=sizes.num_tokens,
            idle_tokens=sizes.chunk_sizes[-1],
            chunk_overhead=0 if sizes.mixed_tokens else traits.chunk_overhead,
            double_at=traits.double_at,
        )
        speculation = Speculation(sizes.num_draft, sizes.draft_turns) if sizes.num_draft else None
        return Scheduler(PagePool(sizes.num_pages, sizes.page_size), budget, speculation)

    def read_leaves(
        self, settings: Settings, files: ModelFiles, report: Callable[[str], None]
    ) -> Sequence[HostArray]:
        config = read_config(files.path, files.config_file)
        check_same_model(files.path, self.config, config)
        return self._convert(open_tensors(files.path, config, self.read_dtype, files.adapter), report)

    def convert_leaves(self, arrays: Mapping[str, Any], report: Callable[[str], None]) -> Sequence[HostArray]:
        return self._convert(tensors_in_memory(arrays, self.config), report)

    def _convert(self, tensors: Tensors, report: Callable[[str], None]) -> Sequence[HostArray]:
        check_host_memory(self.host_weight_bytes)
        arrays = convert_tensors(
            tensors,
            self.config,
            self.dtype,
            report=report,
            quantization=self.quantization,
            backend=self.backend,
            shards=self.shards,
        )
        return in_order(arrays)

    def with_files(self, settings: Settings, files: ModelFiles) -> Description:
        return replace(self, settings=settings, files=replace(files, draft=self.files.draft))

    def lines(self) -> list[str]:
        """The description for people."""
        count = self.shards.count
        others = f" and {count - 1} more, which share the model" if count > 1 else ""
        return [
            f"device      {self.device}{others}",
            *([] if self.files.adapter is None else [f"adapter     {self.files.adapter}"]),
            f"matrices    {self.quantization or self.dtype}",
            f"backend     {self.backend.describe()} ({self.backend_reason})",
            f"KV cache    keys and values in {self.kv_dtype}",
            *([] if self.draft is None else [self.draft.line_as_draft]),
        ]

    @property
    def line_as_draft(self) -> str:
        matrices = self.quantization or self.dtype
        return f"drafts      by {self.files.name}, matrices {matrices}, backend {self.backend.describe()}"


def describe(settings: Settings, files: ModelFiles) -> Description:
    """Raises `ConfigError` for settings that the device or the model cannot serve."""
    device = open_device(settings)
    config = read_config(files.path, files.config_file)
    dtype = jnp.dtype(jnp.float32 if settings.dtype == "float32" else jnp.bfloat16)
    mesh = choose_mesh(settings, config)
    check_eight_bits(settings, device)
    mesh_size = 1 if mesh is None else mesh.size
    narrow = choose_narrow(settings, device.platform, files.path, config)
    kept = None
    if narrow is None:
        kept = choose_kept(settings, device.platform, files.path, config, mesh_size, dtype)
        check_kept(kept, device)
    kv_dtype = cache.kv_dtype(settings.kv_dtype, dtype)
    backend, reason = choose_backend(
        kernel_platform(device),
        local_config(config, mesh_size),
        kernels=settings.kernels,
        quantized=narrow,
        dtype=dtype,
        kv_dtype=kv_dtype,
        is_packed=kept is not None,
    )
    quantize = choose_format(settings, backend, files.path, config, mesh_size)
    if kept is not None:
        kept = arrange(kept, backend, local_config(config, mesh_size), keeps_all=settings.quantize == "keep")
    description = Description(
        settings=settings,
        files=files,
        config=config,
        device=device,
        mesh=mesh,
        dtype=dtype,
        quantization=kept
        or choose_quantization(
            narrow,
            backend,
            dtype,
            in_blocks=quantize in IN_BLOCKS,
            four_bits=choose_four_bits(quantize, files.path, config, mesh_size),
            widens_blocks=widens_blocks(quantize, backend) and mesh_size == 1,
        ),
        backend=backend,
        backend_reason=reason,
        kv_dtype=kv_dtype,
    )
    return description if files.draft is None else replace(description, draft=describe_draft(description))


def describe_draft(served: Description) -> Description:
    """The draft model, on the devices of the model that it drafts for; raises `ConfigError` if it cannot."""
    files = served.files.draft
    assert files is not None
    settings = draft_settings(served.settings)
    config = read_config(files.path, files.config_file)
    check_draft(files.name, served.config, config)
    # Drafts do not change the text, so the fastest form is the right one: matrices in eight bits.
    is_plain = config.num_experts == 0 and config.latent is None and not is_quantized_checkpoint(files.path)
    if settings.quantize == "auto" and settings.dtype == "auto" and is_plain:
        settings = replace(settings, quantize="int8")
    if settings.quantize in IN_FOUR_BITS and not find_four_bit_matrices(files.path, config):
        settings = replace(settings, quantize=BLOCKS_NAME)
    return describe(replace(settings, tensor_parallel=served.shards.count), files)


def in_order(arrays: Iterable[tuple[str, NDArray[np.generic]]]) -> list[NDArray[np.generic]]:
    """The arrays in the order of their names, in which a runner keeps them."""
    return [array for _, array in sorted(arrays, key=lambda named: named[0])]
