"""The shape of an HRM: two small transformers, a high and a low level, which run in cycles over a whole text.

One `ModelConfig` describes what its blocks share with the layers of a decoder, so that both are made of the
same linear, rotary and feed-forward parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from levserve.model.config import Activation, ModelConfig

NORM_EPS = 1e-5
ROPE_THETA = 10_000.0
SCALED_FROM = 512
"""From this hidden size on, embeddings are scaled by its square root; narrower ones are not scaled."""
LEVELS = ("h", "l")


@dataclass(frozen=True, slots=True)
class HrmConfig:
    """An ACT v1 model. Everything but heads, cycles and experts per token can be read off the tensors."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    h_layers: int
    l_layers: int
    h_cycles: int
    l_cycles: int
    num_experts: int
    """0: the feed-forward parts are dense."""
    experts_per_token: int
    max_position: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def embed_scale(self) -> float:
        return math.sqrt(self.hidden_size) if self.hidden_size >= SCALED_FROM else 1.0

    @property
    def num_blocks(self) -> int:
        """Blocks that one run computes."""
        return self.h_cycles * (self.l_cycles * self.l_layers + self.h_layers)

    @property
    def block(self) -> ModelConfig:
        """What a block shares with a decoder's layer."""
        return ModelConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.h_layers + self.l_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.head_dim,
            norm_eps=NORM_EPS,
            rope_theta=ROPE_THETA,
            max_position=self.max_position,
            tied_head=False,
            activation=Activation.GELU if self.num_experts else Activation.SILU,
            is_gated=not self.num_experts,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
        )

    def num_layers(self, level: str) -> int:
        return self.h_layers if level == "h" else self.l_layers


def hrm_parameter_shapes(config: HrmConfig) -> dict[str, tuple[int, ...]]:
    """Every array of the model by its levserve name, as `parameter_shapes` does for a decoder."""
    hidden, block = config.hidden_size, config.block
    layer: dict[str, tuple[int, ...]] = {"qkv": (3 * hidden, hidden), "out": (hidden, hidden)}
    wide, narrow = (block.GateUp.size, hidden), (hidden, config.intermediate_size)
    if config.num_experts:
        count = config.num_experts
        layer |= {
            "router": (count, hidden),
            "experts_gate_up": (count, *wide),
            "experts_down": (count, *narrow),
        }
    else:
        layer |= {"gate_up": wide, "down": narrow}
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, hidden)}
    for level in LEVELS:
        shapes[f"{level}.init"] = (hidden,)
        for index in range(config.num_layers(level)):
            shapes |= {f"{level}.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["head"] = (config.vocab_size, hidden)
    return shapes
