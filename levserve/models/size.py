"""The fourth step of a start: how much memory the model may take, and how it is divided."""

from __future__ import annotations

from collections.abc import Callable

from levserve.device.host import peak_memory
from levserve.device.platform import free_bytes
from levserve.models.kind import AnyKind, ModelSizes
from levserve.models.registry import MakeRoom


def reserve(description: AnyKind, make_room: MakeRoom) -> int:
    """Unloads other models if this one needs their memory; returns the bytes that it may take."""
    needed = description.expected_weight_bytes + description.floor_bytes
    return make_room(needed, lambda: free_bytes(*description.devices))


def size(
    description: AnyKind,
    weight_bytes: int,
    *,
    allowed_bytes: int | None = None,
    agree: Callable[[int], int] | None = None,
) -> ModelSizes:
    """Divides up what the weights leave free, or what they leave of `allowed_bytes` if that is less.

    With several hosts, `agree` returns the least that any of them has free.
    """
    free, peak = free_bytes(*description.devices), peak_memory()
    if allowed_bytes is not None:
        free = min(free, allowed_bytes - weight_bytes)
        peak = 0  # it includes other models
    if agree is not None:
        free = agree(free)
    sizes: ModelSizes = description.plan_sizes(free_bytes=free, weight_bytes=weight_bytes, peak_bytes=peak)
    return sizes
