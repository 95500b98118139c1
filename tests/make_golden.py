"""Makes golden folders in tests/golden: tiny random models, saved and computed by transformers.

Not a test. It needs `pip install torch==2.13.0 transformers==5.22.2`; run it from the repository's root, with the names of the
folders to make if not all. The reference is eager attention in float32 on a CPU. A folder of MODELS has the checkpoint as
Hugging Face saves it, a toy tokenizer (`t17` is token 17) and golden.json. A folder of ROPES has the weights of `llama` under
another rotary scaling, so it holds only config.json and golden.json; rope.json has the rotary frequencies of further scalings.
torch*.bin are files as PyTorch saves them.

Every forward pass is over LENGTH tokens, of which the last ones are padding that the others do not see: dynamic scaling, which
goes by the length of the text, is so computed for a server whose sequences have at most LENGTH tokens.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GemmaConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    Olmo3Config,
    PhiConfig,
    PreTrainedConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

GOLDEN = Path(__file__).parent / "golden"
VOCAB, LENGTH, NUM_GREEDY = 384, 128, 24
PROMPT_LENGTHS = (1, 5, 17, 40, 97)
SMALLEST_GAP = 0.005
TINY = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.3,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
}
DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}
MODELS: dict[str, PreTrainedConfig] = {
    "gemma": GemmaConfig(**TINY, head_dim=32, rms_norm_eps=1e-5),
    "cohere": CohereConfig(**TINY, logit_scale=0.5),
    "granite": GraniteConfig(
        **TINY,
        embedding_multiplier=6.0,
        attention_multiplier=0.2,
        residual_multiplier=0.4,
        logits_scaling=1.5,
        tie_word_embeddings=True,
    ),
    # Windows in two of three layers, and scaling only in the other, as the published models have.
    "olmo3": Olmo3Config(
        **TINY,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"full_attention": YARN, "sliding_attention": DEFAULT},
    ),
    "gpt-neox": GPTNeoXConfig(
        **{key: value for key, value in TINY.items() if key != "num_key_value_heads"},
        rope_parameters=DEFAULT | {"partial_rotary_factor": 0.25},
    ),
    "phi2": PhiConfig(
        **TINY | {"num_key_value_heads": 4}, rope_parameters=DEFAULT | {"partial_rotary_factor": 0.5}
    ),
}
ROPES: dict[str, dict[str, object]] = {
    "llama-yarn": {"rope_parameters": YARN},
    "llama-dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
        "max_position_embeddings": LENGTH // 2,
    },
}
FREQUENCIES: list[tuple[dict[str, object], int]] = [
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, 32_768),
    ({"rope_type": "yarn", "factor": 8.0}, 4096),
    ({"rope_type": "yarn", "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 0.5}, 4096),
    ({"rope_type": "yarn", "factor": 16.0, "attention_factor": 1.25, "truncate": False}, 4096),
    ({"rope_type": "yarn", "factor": 1.0}, 4096),
    ({"rope_type": "yarn", "factor": 32.0, "beta_fast": 4.0, "beta_slow": 2.0}, 2048),
    ({"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.5}, 2048),
    ({"rope_type": "dynamic", "factor": 2.0}, 4096),
    ({"rope_type": "dynamic", "factor": 4.0}, 16_384),
    ({"rope_type": "dynamic", "factor": 4.0, "partial_rotary_factor": 0.5}, 8192),
    ({"rope_type": "linear", "factor": 3.0}, 4096),
]
"""Rotary parameters, and the length that is served."""
MAX_POSITION = 4096


def randomize(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Every array as far from a fresh model's as training would bring it: norms about 1 (Gemma's about 0), small biases."""
    for name, tensor in model.named_parameters():
        is_norm = "norm" in name and name.endswith("weight")
        drawn = torch.randn(tensor.shape, generator=generator)
        if is_norm:
            tensor.data = tensor.data.mean().round() + 0.2 * drawn
        elif tensor.ndim == 1:
            tensor.data = 0.2 * drawn
        else:
            tensor.data = 0.3 * drawn


def logprobs_of(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities after every token, [token, vocab]."""
    padded = tokens + [3] * (LENGTH - len(tokens))
    with torch.no_grad():
        logits = model(torch.tensor([padded]), use_cache=False).logits[0, : len(tokens)]
    return torch.log_softmax(logits.float(), -1)


def golden_of(name: str, model: torch.nn.Module, generator: torch.Generator) -> dict[str, object]:
    cases, gaps = [], []
    for length in PROMPT_LENGTHS:
        prompt = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        tokens = list(prompt)
        for _ in range(NUM_GREEDY):
            best = logprobs_of(model, tokens)[-1].topk(2)
            gaps.append(float(best.values[0] - best.values[1]))
            tokens.append(int(best.indices[0]))
        scores = logprobs_of(model, tokens)
        chosen = [round(float(scores[at - 1, tokens[at]]), 6) for at in range(1, len(tokens))]
        top = scores[length - 1].topk(5)
        cases.append(
            {
                "prompt": prompt,
                "greedy": tokens[length:],
                "greedy_logprobs": chosen[length - 1 :],
                "prompt_logprobs": [None, *chosen[: length - 1]],
                "last_top5": [
                    [token, round(value, 6)]
                    for token, value in zip(top.indices.tolist(), top.values.tolist())
                ],
            }
        )
    reference = {"family": name, "reference": "transformers, eager attention, float32, CPU"}
    return reference | {"smallest_top2_gap": round(min(gaps), 5), "cases": cases}


def make(name: str) -> None:
    folder = GOLDEN / name
    shutil.rmtree(folder, ignore_errors=True)
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        if name in MODELS:
            model = AutoModelForCausalLM.from_config(MODELS[name], attn_implementation="eager")
            randomize(model, generator)
        else:
            config = LlamaConfig.from_pretrained(GOLDEN / "llama", **ROPES[name])
            model = AutoModelForCausalLM.from_pretrained(
                GOLDEN / "llama", config=config, attn_implementation="eager"
            )
        golden = golden_of(name, model.eval().float(), generator)
        if float(golden["smallest_top2_gap"]) > SMALLEST_GAP:
            break
    if name in MODELS:
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(GOLDEN / "llama" / file, folder / file)
    else:
        model.config.save_pretrained(folder)
    (folder / "golden.json").write_text(json.dumps(golden))
    print(name, "seed", seed, "gap", golden["smallest_top2_gap"])


def make_frequencies() -> None:
    made = []
    for parameters, max_seq_len in FREQUENCIES:
        config = LlamaConfig(
            head_dim=64,
            max_position_embeddings=MAX_POSITION,
            rope_parameters={"rope_theta": 10_000.0} | parameters,
        )
        written = dict(config.rope_parameters)
        frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, seq_len=max_seq_len)
        made.append(
            {
                "rope_parameters": written,
                "max_seq_len": max_seq_len,
                "frequencies": frequencies.tolist(),
                "attention_factor": factor,
            }
        )
    golden = {"head_dim": 64, "max_position_embeddings": MAX_POSITION, "cases": made}
    (GOLDEN / "rope.json").write_text(json.dumps(golden))


def make_torch_files() -> None:
    """One small file of each kind that PyTorch writes; tests/pure/test_torch_file.py says what is in them."""
    numbers = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    saved = {
        "whole": numbers,
        "transposed": numbers.T,
        "part": numbers[1:3, 2:4],
        "parameter": torch.nn.Parameter(numbers / 2),
        "half": numbers.half(),
        "bfloat16": numbers.bfloat16(),
        "double": numbers.double(),
        "long": numbers.long(),
        "bool": numbers > 11,
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
    }
    torch.save(saved, GOLDEN / "torch.bin")
    torch.save(torch.nn.Linear(2, 3).state_dict(), GOLDEN / "torch-state-dict.bin")
    torch.save(saved, GOLDEN / "torch-legacy.bin", _use_new_zipfile_serialization=False)


OTHERS = {"rope.json": make_frequencies, "torch.bin": make_torch_files}


if __name__ == "__main__":
    for name in sys.argv[1:] or [*MODELS, *ROPES, *OTHERS]:
        OTHERS[name]() if name in OTHERS else make(name)
