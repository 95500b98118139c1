"""How many requests are decoded together and how many may wait, chosen before jax can say what the device is.

The server needs the numbers for its thread pool, before the fork.
"""

from __future__ import annotations

import os
from dataclasses import replace

from levserve.settings.settings import Settings

ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/accel0", "/dev/vfio/0")  # NVIDIA, AMD and TPUs


def resolve_rows(settings: Settings) -> Settings:
    """Fills in `max_running` and `max_waiting` where they were left out; everything after this reads them."""
    has_accelerator = settings.device in ("gpu", "rocm", "tpu")
    if settings.device == "auto":
        has_accelerator = any(map(os.path.exists, ACCELERATORS))
    rows = settings.max_running or (256 if has_accelerator else 32)
    waiting = settings.max_waiting or 4 * rows
    models = {
        name: replace(model, max_running=rows, max_waiting=waiting) for name, model in settings.models.items()
    }
    return replace(settings, max_running=rows, max_waiting=waiting, models=models)
