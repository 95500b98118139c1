"""The fourth step of a start: how much memory the model may take, and what is made of it."""

from __future__ import annotations

from levserve.device.platform import free_bytes
from levserve.device.sizing import Sizes, kv_floor, peak_memory, plan_sizes
from levserve.models.describe import Description
from levserve.models.read import Contents
from levserve.models.registry import MakeRoom


def reserve(description: Description, make_room: MakeRoom) -> int:
    """Unloads other models if this one needs their memory; the bytes that it may take."""
    max_position, page_bytes = description.config.max_position, description.page_bytes
    kv_bytes = kv_floor(description.settings, max_position=max_position, page_bytes=page_bytes)
    needed = description.expected_weight_bytes + kv_bytes
    return make_room(needed, lambda: free_bytes(description.device))


def size(description: Description, contents: Contents, *, rows: int, allowed_bytes: int | None) -> Sizes:
    """Shares out what the weights leave free, or what they leave of `allowed_bytes` if that is less."""
    free, peak = free_bytes(description.device), peak_memory()
    if allowed_bytes is not None:
        free = min(free, allowed_bytes - contents.weight_bytes)
        peak = 0  # other models have a part in it
    return plan_sizes(
        description.settings,
        description.backend.traits,
        free_bytes=free,
        rows=rows,
        max_position=description.config.max_position,
        page_bytes=description.page_bytes,
        weight_bytes=contents.weight_bytes,
        peak_bytes=peak,
    )
