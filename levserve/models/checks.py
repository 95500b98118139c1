"""Checks of weights before they replace those that are served, and before they are read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import jax.numpy as jnp

from levserve.device.host import free_memory
from levserve.errors import ConfigError, StartupError
from levserve.model.config import ModelConfig
from levserve.model.parameter_shapes import parameter_shapes
from levserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def sum_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: jnp.dtype) -> int:
    """Bytes of all weights with matrices in this type; vectors are float32."""
    return sum(math.prod(shape) * (dtype.itemsize if len(shape) > 1 else 4) for shape in shapes.values())


def check_same_model(path: Path, served: DataclassInstance, new: DataclassInstance) -> None:
    """Refuses weights of another shape than those that are served."""
    before, after = dataclasses.asdict(served), dataclasses.asdict(new)
    changed = [key for key in before if after[key] != before[key]]
    if changed:
        differences = "; ".join(f"{key} is {after[key]}, served is {before[key]}" for key in changed)
        raise StartupError(f"{path}: another model than the one that is served: {differences}")


def check_draft(name: str, config: ModelConfig, draft: ModelConfig) -> None:
    """Refuses a draft model that cannot draft for the model, or that could never be faster."""
    if draft.vocab_size != config.vocab_size:
        raise ConfigError(
            f"--draft-model {name}: its vocabulary has {draft.vocab_size} rows, and the model's has "
            f"{config.vocab_size}"
        )
    own, served = (sum(map(math.prod, parameter_shapes(each).values())) for each in (draft, config))
    if own > served:
        raise ConfigError(
            f"--draft-model {name}: it has {own} parameters, which is more than the model's {served}"
        )


def check_draft_tokens(name: str, tokenizer: Tokenizer, draft: Tokenizer) -> None:
    """Refuses a draft model whose token ids mean other texts."""
    served = {token: text for text, token in tokenizer.backend.get_vocab().items()}
    for text, token in draft.backend.get_vocab().items():
        if served.get(token, text) != text:
            raise ConfigError(
                f"--draft-model {name}: its tokenizer is not the model's: token {token} is {text!r}, "
                f"the model's is {served[token]!r}"
            )


def check_host_memory(needed_bytes: int, free_bytes: int | None = None) -> None:
    """Refuses weights that the host cannot hold beside what it serves: the kernel would kill the server."""
    free_bytes = free_memory() if free_bytes is None else free_bytes
    needed, free = needed_bytes / 1e9, free_bytes / 1e9
    if needed > free:
        raise StartupError(
            f"the new weights take {needed:.1f} GB of the host's memory and {free:.1f} GB are free"
        )
