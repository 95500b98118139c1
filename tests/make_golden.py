"""Makes golden folders in tests/golden: tiny random models, saved and computed by transformers.

Not a test. It needs `pip install torch==2.13.0 transformers==5.22.2`; run it from the repository's root, with
the names of the folders to make (default: all). The reference is eager attention in float32 on a CPU. A
folder of MODELS has the checkpoint as Hugging Face saves it, a toy tokenizer (`t17` is token 17) and
golden.json. A folder of ROPES stands for the weights of `llama` with another rotary scaling, so it holds only
config.json and golden.json; rope.json has the rotary frequencies of further scalings. torch*.bin are files as
PyTorch saves them.

Every forward pass is over LENGTH tokens; the last ones are padding that the others do not attend to. So
dynamic scaling, which depends on the length of the text, is computed as by a server whose sequences have at
most LENGTH tokens.
"""

import json
import math
import shutil
import sys
from pathlib import Path

import safetensors.torch
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    GemmaConfig,
    Glm4MoeConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    Olmo3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
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
LATENT = TINY | {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}
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
    # Expert weights that MXFP4 holds exactly, so that the folder `gpt-oss-mxfp4` has the same model.
    "gpt-oss": GptOssConfig(
        **TINY | {"num_hidden_layers": 2, "intermediate_size": 64},
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        swiglu_limit=2.0,
        rope_parameters=YARN | {"truncate": False},
    ),
    # A dense layer, and one with experts, including a shared one.
    "qwen2-moe": Qwen2MoeConfig(
        **TINY | {"num_hidden_layers": 2},
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        num_experts=6,
        num_experts_per_tok=3,
        mlp_only_layers=[0],
    ),
    # Two ways from the input to queries, and two ways to choose experts.
    "deepseek2": DeepseekV2Config(
        **LATENT,
        q_lora_rank=None,
        n_shared_experts=2,
        first_k_dense_replace=1,
        routed_scaling_factor=1.0,
        topk_method="greedy",
        rope_parameters=DEFAULT,
    ),
    "deepseek3": DeepseekV3Config(
        **LATENT,
        q_lora_rank=24,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.8,
        rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 0.9},
    ),
    "glm4-moe": Glm4MoeConfig(
        **TINY | {"num_hidden_layers": 2},
        head_dim=16,
        attention_bias=True,
        use_qk_norm=True,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.8,
        rope_parameters=DEFAULT | {"partial_rotary_factor": 0.5},
    ),
}
ROPES: dict[str, dict[str, object]] = {
    "llama-yarn": {"rope_parameters": YARN},
    "llama-dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
        "max_position_embeddings": LENGTH // 2,
    },
}
LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + pair / 32 for pair in range(32)],
    "long_factor": [2.0 + pair / 4 for pair in range(32)],
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
    (LONG, 4096),
    (LONG | {"factor": 6.0}, 64),
]
"""Rotary parameters, each with the maximum length that is served."""
MAX_POSITION = 4096


def randomize(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Gives every array values like those after training: norms about 1 (Gemma's about 0), small biases."""
    for name, tensor in model.named_parameters():
        is_norm = "norm" in name and name.endswith("weight")
        drawn = torch.randn(tensor.shape, generator=generator)
        if is_norm:
            tensor.data = tensor.data.mean().round() + 0.2 * drawn
        elif name.endswith("sinks"):
            tensor.data = 2 * drawn
        elif tensor.ndim == 1:
            tensor.data = 0.2 * drawn
        else:
            tensor.data = 0.3 * drawn
    for name, tensor in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))


def pack_mxfp4(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds matrices [expert, in, out] to four-bit floats: blocks and scales as gpt-oss stores them."""
    grouped = matrices.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = (grouped.abs().amax(-1) / 6).log2().ceil()
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scaled = grouped / exponents.exp2()[..., None]
    codes = (scaled.abs()[..., None] - sizes).abs().argmin(-1) + 8 * (scaled < 0)
    return (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8), (exponents + 127).to(torch.uint8)


def pack_experts(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Packs the experts, sets their weights to what transformers unpacks, and returns the packed tensors."""
    packed = {}
    for name, tensor in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales = pack_mxfp4(tensor.data)
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            tensor.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            assert tensor.data.shape[1:].numel() == math.prod(blocks.shape[1:]) * 2
    return packed


def save_packed(folder: Path, packed: dict[str, torch.Tensor]) -> None:
    """Writes the checkpoint in `folder` again beside it, in the format in which gpt-oss was published."""
    beside = folder.with_name(f"{folder.name}-mxfp4")
    shutil.rmtree(beside, ignore_errors=True)
    shutil.copytree(folder, beside)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in packed}
    safetensors.torch.save_file(kept | packed, beside / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    }
    (beside / "config.json").write_text(json.dumps(config, indent=2))


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
            packed = pack_experts(model) if name == "gpt-oss" else {}
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
        if packed:
            save_packed(folder, packed)
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
    """Writes one small file of each kind of PyTorch's; tests/pure/test_torch_file.py says what is in them."""
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
