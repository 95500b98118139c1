"""Typed access to the keys of a checkpoint's configuration; a wrong value is an error that names its key.

An absent key takes its default. A key that is null counts as absent, except in `has` and `require`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from levserve.errors import StartupError

Extras = dict[str, Any]
"""Fields of `ModelConfig`."""

LARGEST = 2**31 - 1
"""Sizes of arrays have 32 bits."""


@dataclass(frozen=True, slots=True)
class Fields:
    """The keys of one configuration; `source` names the file in messages."""

    source: str
    values: Mapping[str, object]

    def has(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str) -> object:
        return self.values.get(key)

    def integer(
        self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = LARGEST
    ) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.wrong(key, f"an integer of at least {minimum}")
        if value > maximum:
            raise self.wrong(key, f"an integer of at most {maximum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self.wrong(key, "a number above 0")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        value = self.values.get(key)
        items = value if isinstance(value, list) else []
        if len(items) != count or not all(isinstance(item, (int, float)) for item in items):
            raise self.wrong(key, f"a list of {count} numbers")
        return tuple(map(float, items))

    def layers(self, key: str) -> tuple[int, ...]:
        """A list of layer numbers; empty if the key is absent."""
        value = self._value(key, [])
        items = value if isinstance(value, list) else [None]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise self.wrong(key, "a list of integers")
        return tuple(items)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def mapping(self, key: str) -> Fields:
        """The object under `key`, or an empty one; messages about its keys name `key` as well."""
        value = self._value(key, {})
        if not isinstance(value, Mapping):
            raise self.wrong(key, "an object")
        return Fields(f"{self.source}: {key}", value)

    def require(self, allowed: Mapping[str, tuple[object, ...]]) -> None:
        """Refuses a key whose value is not one of those that `allowed` lists for it; absent keys are fine."""
        for key, values in allowed.items():
            if key in self.values and self.values[key] not in values:
                raise self.refused(key)

    def require_known(self, known: Iterable[str]) -> None:
        """Refuses any key that is not in `known`."""
        for key in sorted(set(self.values) - set(known)):
            raise self.refused(key)

    def refused(self, key: str) -> StartupError:
        return StartupError(f"{self.source}: {key} = {_short(self.values.get(key))} is not supported")

    def wrong(self, key: str, expected: str) -> StartupError:
        if self.values.get(key) is None:
            return StartupError(f"{self.source}: {key} is missing; expected {expected}")
        return StartupError(f"{self.source}: {key} = {_short(self.values[key])} is not {expected}")

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key)
        return default if value is None else value


def _short(value: object) -> str:
    """The value on one line, cut to a readable length."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else text[:117] + "..."
