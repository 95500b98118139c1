"""Finds the model that a request means: by its name, or by what people type instead of it.

`qwen3-0.6b` is enough for `Qwen/Qwen3-0.6B`: case does not matter, and neither does the organization where
one of the two names leaves it out. Stores keep `org/name` in a folder `org-name`, so either stands for the
other. A name that fits several models is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from levserve.errors import ModelNotFound

MAX_NAMES_TOLD = 20


def similar_names(asked: str, names: Iterable[str]) -> list[str]:
    """The names that `asked` may stand for, by the first rule that finds any; the case-only rule is first."""
    others = list(names)
    wanted = asked.casefold()
    for is_meant in (_is_same, _is_folder_of, _has_same_end):
        if found := [name for name in others if is_meant(wanted, name.casefold())]:
            return found
    return []


def _is_same(one: str, other: str) -> bool:
    return one == other


def _is_folder_of(one: str, other: str) -> bool:
    """Whether one is the folder in which a store keeps the other."""
    return one.replace("/", "-") == other.replace("/", "-")


def _has_same_end(one: str, other: str) -> bool:
    owner, _, end = one.rpartition("/")
    other_owner, _, other_end = other.rpartition("/")
    return bool(end) and end == other_end and not (owner and other_owner)


def model_not_found(name: str, known: Sequence[str]) -> ModelNotFound:
    names = [f"'{one}'" for one in known[:MAX_NAMES_TOLD]]
    if len(known) > MAX_NAMES_TOLD:
        names.append("...")
    return ModelNotFound(
        f"The model '{name[:64]}' does not exist; this server has {', '.join(names)}.", param="model"
    )


def ambiguous_model(name: str, candidates: Sequence[str]) -> ModelNotFound:
    names = ", ".join(f"'{one}'" for one in candidates[:MAX_NAMES_TOLD])
    return ModelNotFound(f"The name '{name[:64]}' may mean several models: {names}.", param="model")
