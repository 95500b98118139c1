"""An OpenAI-compatible inference server for JAX models, and the same models from Python.

with levserve.open("smollm2-135m") as model:
    print(model.generate("The capital of France is")[0].text)
"""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from levserve.api.model import Model

__version__ = "0.2.0"
__all__ = ["__version__", "open"]


def open(
    model: str | PathLike[str] = "", /, *, report: Callable[[str], None] | None = None, **settings: object
) -> Model:
    """Loads a model and returns it ready to use; leaving its `with` block frees its memory.

    `model` is what --model takes: a folder, a .gguf file, a name on the Hugging Face Hub or an address;
    without it, the bundled model. `settings` are the server's settings, by name: `max_running=8`,
    `dtype="float32"`. The server's environment variables apply too. `report` is called with a line for each
    step of the loading. Raises `levserve.errors.StartupError`.
    """
    from levserve.api.opening import open_model  # nothing heavy is imported until a model is opened

    return open_model(str(model), settings, report)
