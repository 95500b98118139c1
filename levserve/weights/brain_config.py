"""Reads the configuration of a brain: sizes from the tensors, the rest from the options or brain.json.

Different programs of AI-OS write different brain.json files, and some write none of the values that cannot be
derived from the tensors. So each value is logged with its source, and can be set by an option.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from levserve.errors import StartupError
from levserve.model.hrm_config import HrmConfig
from levserve.settings.settings import Settings
from levserve.weights.brain_folder import BrainFiles
from levserve.weights.brain_tensors import read_brain_tensors, read_shape
from levserve.weights.config_fields import Fields

DEFAULT_HEADS = 8
HEADS_OF_PRESET = {768: 12}
"""The heads of AI-OS's largest preset, by its hidden size; the other presets have 8 heads."""
DEFAULT_CYCLES = 2
DEFAULT_EXPERTS_PER_TOKEN = 2
DEFAULT_CONTEXT = 2048
LAST = "last_session.config."
HEADS_KEYS = ("num_heads", "heads", "arch.num_heads", f"{LAST}num_heads")
H_CYCLES_KEYS = ("h_cycles", "arch.H_cycles", f"{LAST}h_cycles", "halt_max_steps")
L_CYCLES_KEYS = ("l_cycles", "arch.L_cycles", f"{LAST}l_cycles", "halt_max_steps")
PER_TOKEN_KEYS = ("num_experts_per_tok", f"{LAST}num_experts_per_tok")
CONTEXT_KEYS = ("max_seq_len", f"{LAST}max_seq_len")


@dataclass(frozen=True, slots=True)
class Found:
    """A value and the place that it came from."""

    value: int
    source: str

    def __str__(self) -> str:
        return f"{self.value} ({self.source})"


@dataclass(frozen=True, slots=True)
class BrainConfig:
    """The model's shape, and lines for the log that say where its values came from."""

    config: HrmConfig
    lines: tuple[str, ...]


def read_brain_config(brain: BrainFiles, settings: Settings) -> BrainConfig:
    """Raises `StartupError` for weights that are not a brain's, and for values that do not fit them."""
    shape = read_shape(brain.weights, read_brain_tensors(brain.weights))
    fields = brain.fields
    default_heads = HEADS_OF_PRESET.get(shape.hidden_size, DEFAULT_HEADS)
    heads = _find(fields, HEADS_KEYS, "--hrm-heads", settings.hrm_heads, default_heads)
    h_given, l_given = settings.hrm_cycles or (0, 0)
    h_cycles = _find(fields, H_CYCLES_KEYS, "--hrm-cycles", h_given, DEFAULT_CYCLES)
    l_cycles = _find(fields, L_CYCLES_KEYS, "--hrm-cycles", l_given, DEFAULT_CYCLES)
    experts = settings.hrm_experts_per_token
    per_token = _find(fields, PER_TOKEN_KEYS, "--hrm-experts-per-token", experts, DEFAULT_EXPERTS_PER_TOKEN)
    context = _find(fields, CONTEXT_KEYS, "--max-seq-len", settings.max_seq_len, DEFAULT_CONTEXT)
    _check_heads(brain, shape.hidden_size, heads)
    config = HrmConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=heads.value,
        h_layers=shape.h_layers,
        l_layers=shape.l_layers,
        h_cycles=h_cycles.value,
        l_cycles=l_cycles.value,
        num_experts=shape.num_experts,
        experts_per_token=min(per_token.value, shape.num_experts),
        max_position=context.value,
    )
    kind = "dense"
    if shape.num_experts:
        kind = f"{shape.num_experts} experts, {config.experts_per_token} a token ({per_token.source})"
    lines = (
        f"brain       hidden size {shape.hidden_size}, {shape.h_layers} high and {shape.l_layers} low "
        f"layers, {shape.vocab_size} tokens, {kind}",
        f"heads       {heads}",
        f"cycles      high {h_cycles}, low {l_cycles}: {config.num_blocks} blocks a token",
        f"positions   {context}",
    )
    return BrainConfig(config, lines)


def _find(fields: Fields, keys: Iterable[str], option: str, given: int, default: int) -> Found:
    """The option, or else the first key that is set; some programs write null or 0, which count as unset."""
    if given:
        return Found(given, option)
    for key in keys:
        *outer, last = key.split(".")
        inner = fields
        for part in outer:
            inner = inner.mapping(part)
        if inner.get(last):
            return Found(inner.integer(last), f"brain.json: {key}")
    return Found(default, "default")


def _check_heads(brain: BrainFiles, hidden_size: int, heads: Found) -> None:
    if hidden_size % heads.value:
        problem = f"the hidden size {hidden_size} cannot be divided by {heads} heads"
    elif hidden_size // heads.value % 2:
        problem = f"{heads} heads are {hidden_size // heads.value} wide, and rotary positions need pairs"
    else:
        return
    raise StartupError(f"{brain.weights}: {problem}; give the right number with --hrm-heads")
