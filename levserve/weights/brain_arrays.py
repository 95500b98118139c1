"""Reads a brain's weights as the model's arrays, in the type that they are served in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from levserve.model.aligned import aligned_array
from levserve.model.backend import Backend
from levserve.model.hrm_config import HrmConfig, hrm_parameter_shapes
from levserve.model.xla import XLA_ON_CPU
from levserve.weights.brain_tensors import find_brain_sources, read_brain_tensors
from levserve.weights.fill import Copy, fill, num_threads
from levserve.weights.progress import Progress, Report


def read_brain_arrays(
    path: Path, config: HrmConfig, dtype: jnp.dtype, *, report: Report, backend: Backend = XLA_ON_CPU
) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """Every array of `hrm_parameter_shapes`, one after another in the host's memory.

    Matrices are in `dtype`, those of experts in the backend's storage of it, and start states in float32.
    """
    sources = find_brain_sources(path, config, read_brain_tensors(path))
    shapes = hrm_parameter_shapes(config)
    progress = Progress("loading weights", sum(map(math.prod, shapes.values())), report)
    with ThreadPoolExecutor(num_threads(), thread_name_prefix="levserve-weights") as pool:
        for name, shape in shapes.items():
            host = aligned_array(shape, np.dtype(dtype if len(shape) > 1 else np.float32))
            for source in sources[name]:
                whole = Copy(range(source.tensor.shape[0]), (), host[source.target.index])
                fill([whole], source, pool, str(path))
            if host.ndim > 2:
                host = host.view(backend.expert_storage(dtype))
            progress.advance(host.size)
            yield name, host
