"""The names of GGUF files in parts: `model-00001-of-00003.gguf` and so on, as llama.cpp splits large models.

A model is named by its first part. Imports only the standard library.
"""

from __future__ import annotations

import re

SUFFIX = ".gguf"
PART = re.compile(r"(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def part_names(name: str) -> list[str]:
    """The names of all parts of the model, given that of any part; just `name` if the file is not a part."""
    part = PART.fullmatch(name)
    if part is None:
        return [name]
    count = part["count"]
    return [f"{part['model']}-{number:05}-of-{count}{SUFFIX}" for number in range(1, int(count) + 1)]


def model_name(name: str) -> str:
    """The name of the model in a file of this name."""
    part = PART.fullmatch(name)
    return name.removesuffix(SUFFIX) if part is None else part["model"]


def is_later_part(name: str) -> bool:
    part = PART.fullmatch(name)
    return part is not None and int(part["number"]) > 1
