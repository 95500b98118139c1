"""What must be the same on all hosts of a group, and the messages that say what differs.

Programs are compiled on every host from its own settings. If they differ in anything, the hosts wait for each
other forever or compute nonsense, so a host that differs is refused before it loads anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, NamedTuple

from levserve.errors import ConfigError
from levserve.settings.settings import Settings

PACKAGES = ("levserve", "jax", "jaxlib")
PROTOCOL = 1
SAME_SETTINGS = (
    "num_hosts",
    "tensor_parallel",
    "device",
    "dtype",
    "quantize",
    "max_seq_len",
    "max_running",
    "page_size",
    "kv_dtype",
    "kv_memory",
    "kv_pages",
    "round_steps",
    "speculate",
    "prefill_chunk",
    "kernels",
)
"""Paths may differ: the files there are compared by their fingerprint."""


class Value(NamedTuple):
    text: str
    source: str


class Identity(NamedTuple):
    """A host as it introduces itself."""

    host_id: int
    values: Mapping[str, Value]
    """Versions by package, and settings by flag."""

    def to_json(self) -> str:
        return json.dumps({"protocol": PROTOCOL, "host_id": self.host_id, "values": self.values})


def identity_of(settings: Settings) -> Identity:
    assert settings.host_id is not None
    values = {f"{package}'s version": Value(version(package), "installed") for package in PACKAGES}
    for shown in settings.describe():
        if shown.name in SAME_SETTINGS:
            values[f"--{shown.name.replace('_', '-')}"] = Value(shown.value, shown.source)
    return Identity(settings.host_id, values)


def read_identity(payload: bytes) -> Identity:
    """Parses an identity; raises `ValueError` for anything else."""
    try:
        read: Any = json.loads(payload)
        if read["protocol"] != PROTOCOL:
            raise ValueError(f"protocol {read['protocol']}")
        values = {str(name): Value(str(value[0]), str(value[1])) for name, value in read["values"].items()}
        return Identity(int(read["host_id"]), values)
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"not an introduction ({error!r})") from None


def find_difference(leader: Identity, other: Identity) -> str | None:
    """A sentence about what differs, the first few by name; None if nothing does."""
    differing = []
    for name in dict.fromkeys((*leader.values, *other.values)):
        ours, theirs = leader.values.get(name), other.values.get(name)
        if ours is None or theirs is None or ours.text != theirs.text:
            differing.append(f"{name} is {_tell(theirs)} there and {_tell(ours)} on host 0")
    if not differing:
        return None
    return f"host {other.host_id} differs from host 0: {'; '.join(differing[:4])}"


def check_number(identity: Identity, num_hosts: int) -> None:
    """Raises `ConfigError` for a number that no follower can have."""
    if not 0 < identity.host_id < num_hosts:
        raise ConfigError(f"a host has the number {identity.host_id}, but followers are 1 to {num_hosts - 1}")


def _tell(value: Value | None) -> str:
    return "unknown" if value is None else f"{value.text} ({value.source})"
