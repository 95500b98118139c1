"""What a kind of model must offer to be loaded: the steps of a start use this and nothing else.

A description is complete before any weight is read. `describe.py` has the one for decoders and `brain.py` the
one for HRM brains; `choose.py` chooses by the model's files. What the device thread needs is in
`device/kind.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax

from levserve.device.kind import Planner, RoundRunner
from levserve.model.backend import Backend
from levserve.model.placement import HostArray
from levserve.observe.metrics import Metrics
from levserve.settings.settings import Settings
from levserve.weights.model_files import ModelFiles


class ModelSizes(Protocol):
    """How much of everything a model gets."""

    @property
    def rows(self) -> int: ...

    @property
    def max_seq_len(self) -> int: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def kv_bytes(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Tokens of the requests that can run together."""

    def describe(self) -> list[str]: ...


SizesT = TypeVar("SizesT")


class ModelKind(Protocol[SizesT]):
    """A model and the way it is served."""

    @property
    def settings(self) -> Settings: ...

    @property
    def files(self) -> ModelFiles: ...

    @property
    def devices(self) -> Sequence[jax.Device]:
        """The devices of this process that it is served on; one, unless several share it."""

    @property
    def backend(self) -> Backend: ...

    @property
    def vocab_size(self) -> int:
        """Rows of the output matrix."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def expected_weight_bytes(self) -> int: ...

    @property
    def floor_bytes(self) -> int:
        """The least memory that it needs besides its weights."""

    @property
    def default_chat_template(self) -> str | None:
        """For a tokenizer that has none."""

    @property
    def has_whole_texts(self) -> bool:
        """Whether every position sees the whole text, also what follows it."""

    def lines(self) -> list[str]:
        """The description for people."""

    def load_arrays(self, report: Callable[[str], None]) -> dict[str, jax.Array]:
        """The weights, on the device."""

    def plan_sizes(self, *, free_bytes: int, weight_bytes: int, peak_bytes: int) -> SizesT: ...

    def explain_memory(self, sizes: SizesT) -> tuple[str, str]:
        """What is asked for besides the weights, and what to do where there is too little."""

    def make_runner(
        self, arrays: Mapping[str, jax.Array], sizes: SizesT, metrics: Metrics
    ) -> RoundRunner: ...

    def make_planner(self, sizes: SizesT, runner: RoundRunner) -> Planner: ...

    def read_leaves(
        self, settings: Settings, files: ModelFiles, report: Callable[[str], None]
    ) -> Sequence[HostArray]:
        """Other weights of the same model, in the host's memory; raises `StartupError` for another model."""

    def convert_leaves(self, arrays: Mapping[str, Any], report: Callable[[str], None]) -> Sequence[HostArray]:
        """The same for weights that are in memory, by the names that they have in a checkpoint."""

    def with_files(self, settings: Settings, files: ModelFiles) -> ModelKind[SizesT]:
        """This description after a reload."""


AnyKind = ModelKind[Any]
