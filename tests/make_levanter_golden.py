"""Makes the folders tests/golden/levanter-*: tiny random models, saved and computed by Levanter itself.

Not a test. It needs Python 3.12 and `pip install marin-levanter==0.2.227.dev40316220070`; run it from the
repository's root, with the names of the folders to make (default: all). Each folder has the checkpoint,
the run's config.yaml as Levanter dumps it, and golden.json with the results of Levanter's own forward pass in
float32, in the format of the other golden files. `levanter-llama` was made the same way from the weights in
`llama`.
"""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import draccus
import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from levanter.checkpoint import save_checkpoint
from levanter.layers.attention import AttentionMask
from levanter.layers.rotary import Llama3RotaryEmbeddingsConfig
from levanter.models.gemma import Gemma2Config, Gemma3Config, GemmaConfig
from levanter.models.gpt2 import Gpt2Config
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmConfig
from levanter.models.mistral import MistralConfig
from levanter.models.mixtral import MixtralConfig
from levanter.models.olmo import Olmo2Config
from levanter.models.qwen import Qwen3Config, QwenConfig

GOLDEN = Path(__file__).parent / "golden"
VOCAB, LENGTH, NUM_GREEDY = 384, 64, 24
TINY = dict(
    max_seq_len=128,
    hidden_dim=32,
    intermediate_dim=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    gradient_checkpointing=False,
)
MODELS: dict[str, LmConfig] = {
    # Layers that are not stacked, Llama 3's rotary scaling, and the q and k norms that Levanter's Llama may
    # have.
    "levanter-llama-blocks": LlamaConfig(
        **TINY,
        scan_layers=False,
        use_qk_norm=True,
        tie_word_embeddings=True,
        rope=Llama3RotaryEmbeddingsConfig(theta=10_000.0, factor=4.0, original_max_position_embeddings=32),
    ),
    "levanter-qwen3": Qwen3Config(**TINY, head_dim=16, layer_norm_epsilon=1e-6),
    "levanter-qwen": QwenConfig(**TINY, tie_word_embeddings=True),
    "levanter-mistral": MistralConfig(
        **TINY, sliding_window=4
    ),  # Levanter's forward pass has no window: see levanter_config.py
    "levanter-mixtral": MixtralConfig(**TINY, n_routed_experts=4, num_experts_per_tok=2),
    "levanter-gemma": GemmaConfig(**TINY, head_dim=16),
    "levanter-gemma2": Gemma2Config(
        **TINY, head_dim=16, query_pre_attn_scalar=24.0, attn_logit_softcapping=2.0, sliding_window=4
    ),
    "levanter-gemma3": Gemma3Config(**TINY, head_dim=16, query_pre_attn_scalar=24.0, sliding_window=4),
    "levanter-olmo2": Olmo2Config(**TINY),
    "levanter-gpt2": Gpt2Config(
        max_seq_len=128, hidden_dim=32, num_layers=2, num_heads=4, gradient_checkpointing=False
    ),
}


@dataclasses.dataclass
class Data:
    tokenizer: str


@dataclasses.dataclass
class Run:
    """The part of a trainer's config that a server reads."""

    data: Data
    model: LmConfig


def randomize(model, rng: np.random.Generator):
    """Gives every array values like those after training: norms about 1 (Gemma's about 0), small biases."""

    def change(path, leaf):
        if not eqx.is_array(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        keys = jax.tree_util.keystr(path)
        is_norm = ("norm" in keys or "ln_" in keys) and "bias" not in keys
        scale, shift = (0.2, np.asarray(leaf)) if is_norm else (0.3, 0.0)
        return jnp.asarray(rng.normal(0, scale, leaf.shape) + shift, jnp.float32)

    return jax.tree_util.tree_map_with_path(change, model)


def make(name: str, config: LmConfig) -> None:
    rng = np.random.default_rng(sum(name.encode()))
    Vocab = hax.Axis("vocab", VOCAB)
    model = randomize(config.model_type.init(Vocab, config, key=jax.random.PRNGKey(0)), rng)
    Pos = hax.Axis("position", LENGTH)

    @eqx.filter_jit
    def logprobs(tokens):  # [position] to [position, vocab]
        with hax.axis_mapping({}):
            logits = model(hax.named(tokens, Pos), AttentionMask.causal())
        return jax.nn.log_softmax(logits.rearrange((Pos, Vocab)).array)

    cases, gaps = [], []
    for length in (1, 5, 17, 33):
        tokens = [int(token) for token in rng.integers(3, VOCAB, length)]
        prompt = list(tokens)
        for _ in range(NUM_GREEDY):
            scores = np.asarray(logprobs(jnp.asarray(tokens + [0] * (LENGTH - len(tokens)))))[len(tokens) - 1]
            second, best = np.sort(scores)[-2:]
            gaps.append(float(best - second))
            tokens.append(int(scores.argmax()))
        scores = np.asarray(logprobs(jnp.asarray(tokens + [0] * (LENGTH - len(tokens)))))
        chosen = [round(float(scores[at - 1, tokens[at]]), 6) for at in range(1, len(tokens))]
        cases.append(
            {
                "prompt": prompt,
                "greedy": tokens[length:],
                "prompt_logprobs": [None, *chosen[: length - 1]],
                "greedy_logprobs": chosen[length - 1 :],
            }
        )

    folder = GOLDEN / name
    shutil.rmtree(folder, ignore_errors=True)
    zeros = jax.tree.map(lambda leaf: leaf * 0 if eqx.is_array(leaf) else leaf, model)
    save_checkpoint({"model": model, "optimizer": {"count": jnp.asarray(7), "mu": zeros}}, 7, str(folder))
    with (folder / "config.yaml").open("w") as file:
        draccus.dump(Run(Data("../llama"), config), file)
    reference = {"family": name, "reference": "marin-levanter 0.2.227.dev40316220070, float32, CPU"}
    reference["smallest_top2_gap"] = round(min(gaps), 5)
    (folder / "golden.json").write_text(json.dumps(reference | {"cases": cases}))


if __name__ == "__main__":
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):  # Levanter computes experts on a mesh only
        for name in sys.argv[1:] or MODELS:
            make(name, MODELS[name])
            print(name)
