"""How a request's sampling options reach the device: one table, from which packing and unpacking follow.

To add an option, add a field to `Sampling`, an annotated field to `Rules` in `model/rules.py`, and its entry
to `RULES`. A field without an entry, or an entry without a field, is an error at import.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from levserve.model.rules import BANNED, MAX_EDITS, NO_LOGPROBS, PROCESSED_LOGPROBS, RAW_LOGPROBS, Mode, Rules
from levserve.schedule.request import GenerationRequest, LogprobsMode, Sampling

FOREVER = np.iinfo(np.int32).max
FORMATS = {np.float32: "f", np.int32: "i", np.uint64: "Q"}
"""The `struct` codes of the types that the annotations of `Rules` name."""

Ints = npt.NDArray[np.int32]
Record = TypeVar("Record")


class Rule(NamedTuple):
    """How one field of `Rules` follows from a request, and what it takes to honour it."""

    value: Callable[[GenerationRequest], float]
    neutral: float = 0.0
    """The value that asks for nothing."""
    mode: Mode = Mode.GREEDY
    """The cheapest mode that honours any other value."""
    needs_memory: bool = False
    """Whether any other value needs the sequence's tokens or its logit edits; see `model.rules.Memory`."""


RULES = {
    "temperature": Rule(lambda request: request.sampling.temperature, mode=Mode.PLAIN),
    # The next three have no effect on a greedy draw.
    "top_k": Rule(lambda request: request.sampling.top_k),
    "top_p": Rule(lambda request: request.sampling.top_p),
    "min_p": Rule(lambda request: request.sampling.min_p),
    "presence": Rule(lambda request: request.sampling.presence_penalty, 0.0, Mode.FULL, needs_memory=True),
    "frequency": Rule(lambda request: request.sampling.frequency_penalty, 0.0, Mode.FULL, needs_memory=True),
    "repetition": Rule(
        lambda request: request.sampling.repetition_penalty, 1.0, Mode.FULL, needs_memory=True
    ),
    "prompt_len": Rule(lambda request: len(request.prompt)),
    "num_edits": Rule(lambda request: len(_edits_of(request)), 0, Mode.FULL, needs_memory=True),
    "logprobs": Rule(lambda request: _logprobs_of(request.sampling), NO_LOGPROBS, Mode.FULL),
    "is_constrained": Rule(lambda request: request.constraint is not None, 0, Mode.PLAIN),
    "seed": Rule(lambda request: request.sampling.seed % 2**64),
}
"""By field of `Rules`."""


class RulePacking(Generic[Record]):
    """Packs a table's values into int32 columns, in the order of the record's fields, and unpacks them."""

    def __init__(self, record: Callable[..., Record], rules: Mapping[str, Rule]) -> None:
        types = get_type_hints(record, include_extras=True)
        if types.keys() != rules.keys():
            raise TypeError(f"not both in {record} and in its table: {sorted(types.keys() ^ rules.keys())}")
        self._record = record
        self._formats = {name: FORMATS[get_args(hint)[1]] for name, hint in types.items()}
        self._values = [rules[name].value for name in types]
        self._struct = struct.Struct("=" + "".join(self._formats.values()))
        self.num_columns = self._struct.size // 4

    def pack(self, request: GenerationRequest) -> Ints:
        """The request's values: floats as their bits, and 64-bit numbers in two columns."""
        return np.frombuffer(self._struct.pack(*[value(request) for value in self._values]), np.int32)

    def unpack(self, columns: jax.Array) -> Record:
        """The record of [row, columns], inside the trace."""
        fields: dict[str, jax.Array] = {}
        start = 0
        for name, code in self._formats.items():
            match code:
                case "f":
                    fields[name] = lax.bitcast_convert_type(columns[:, start], jnp.float32)
                case "i":
                    fields[name] = columns[:, start]
                case "Q":
                    fields[name] = lax.bitcast_convert_type(columns[:, start : start + 2], jnp.uint32)
            start += struct.calcsize(code) // 4
        return self._record(**fields)


RULE_PACKING = RulePacking(Rules, RULES)


def mode_for(request: GenerationRequest) -> Mode:
    """The cheapest mode that honours everything the request asks."""
    modes = {rule.mode for rule in RULES.values() if rule.value(request) != rule.neutral}
    return max(modes, key=tuple(Mode).index, default=Mode.GREEDY)


def needs_memory(request: GenerationRequest) -> bool:
    """Whether the device must know the sequence's tokens or logit edits."""
    rules = [rule for rule in RULES.values() if rule.needs_memory]
    return any(rule.value(request) != rule.neutral for rule in rules)


@dataclass(frozen=True, slots=True)
class Edits:
    """What a request changes about its logits; see `model.rules.Memory`."""

    ids: Ints
    values: npt.NDArray[np.float32]
    until: Ints


def edits_for(request: GenerationRequest) -> Edits:
    ids, until = np.zeros(MAX_EDITS, np.int32), np.zeros(MAX_EDITS, np.int32)
    values = np.zeros(MAX_EDITS, np.float32)
    for index, entry in enumerate(_edits_of(request)):
        ids[index], values[index], until[index] = entry
    return Edits(ids, values, until)


def _logprobs_of(sampling: Sampling) -> int:
    if sampling.num_logprobs is None:
        return NO_LOGPROBS
    return PROCESSED_LOGPROBS if sampling.logprobs_mode is LogprobsMode.PROCESSED else RAW_LOGPROBS


def _edits_of(request: GenerationRequest) -> list[tuple[int, float, int]]:
    """Token, value and end position of each edit.

    Biases never end; stop tokens are banned until there are `min_tokens`.
    """
    sampling = request.sampling
    edits = [(token, value, FOREVER) for token, value in sampling.logit_bias]
    if sampling.min_tokens > 0:
        end = len(request.prompt) + sampling.min_tokens
        edits += [(token, BANNED, end) for token in sorted(request.stop_ids)]
    return edits
