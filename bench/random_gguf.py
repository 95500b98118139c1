#!/usr/bin/env python3
"""Writes a GGUF file of random weights in the shape of a larger model, to measure speed without its checkpoint.

    python bench/random_gguf.py --shape smollm2-1.7b --kind q4_k_m model.gguf
    python bench/compare.py --model model.gguf --streams 1 8
    taskset -c 0,1 python bench/compare.py --model model.gguf --streams 1 8

Any server reads it like a real one: the blocks are random bits with scales that keep the weights small,
and after some thousands they repeat, so that the file is written in seconds. The tokenizer is the
bundled model's, so the vocabulary has its 49,152 tokens whatever the shape. With `--bare` no other model
is needed: each byte is a token, and named tokens that are never used fill the vocabulary up to the
shape's size.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import ml_dtypes
import numpy as np
from decode import SHAPES
from gguf import GGML_QUANT_SIZES, GGUFReader, GGUFValueType, GGUFWriter, TokenType
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from levserve.model.config import ModelConfig
from levserve.settings.parse import parse_settings
from levserve.weights.source import find_source

SPREAD = 0.02
"""Standard deviation of the weights."""
NUM_RANDOM = 1 << 20
"""Random weights of a tensor; a larger tensor repeats them."""
KINDS = {"q4_0": Kind.Q4_0, "q4_k_m": Kind.Q4_K, "q8_0": Kind.Q8_0, "bf16": Kind.BF16}
DENSE = [name for name, shape in SHAPES.items() if not shape.qk_norm and not shape.is_mixture(0)]


class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: Kind


def main() -> None:
    options = _parser().parse_args()
    config = SHAPES[options.shape]
    writer = GGUFWriter(options.file, "llama")
    if options.bare:
        add_bytes(writer, config.vocab_size)
    else:
        reader = GGUFReader(find_source(parse_settings([], {}), lambda _: None).path)
        vocabulary = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
        config = dataclasses.replace(config, vocab_size=int(vocabulary.shape[1]))
        copy_tokenizer(reader, writer)
    describe(writer, options.shape, config)
    tensors = list(list_tensors(config, KINDS[options.kind]))
    for tensor in tensors:
        stored = stored_shape(tensor)
        of_floats = tensor.kind is Kind.F32
        item = np.dtype(np.float32 if of_floats else np.uint8)
        writer.add_tensor_info(
            tensor.name,
            stored,
            item,
            int(np.prod(stored)) * item.itemsize,
            None if of_floats else tensor.kind,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = np.random.default_rng(0)
    for tensor in tensors:
        writer.write_tensor_data(make_numbers(tensor, generator))
    writer.close()
    print(f"{options.file}: {options.shape} in {options.kind}, {options.file.stat().st_size / 1e9:.2f} GB")


def describe(writer: GGUFWriter, name: str, config: ModelConfig) -> None:
    writer.add_name(f"{name} (random)")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_dimension_count(config.head_dim)
    assert config.rope_theta is not None, name
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)


def add_bytes(writer: GGUFWriter, vocab_size: int) -> None:
    """Adds bytes, written as in GPT-2, as tokens, an end of text, and one merge, because llama.cpp needs
    some."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {**{byte: chr(byte) for byte in printable}, **{b: chr(256 + at) for at, b in enumerate(others)}}
    tokens = [*(letters[byte] for byte in range(256)), "ab", "<|endoftext|>"]
    types = [TokenType.NORMAL] * 257 + [TokenType.CONTROL] + [TokenType.UNUSED] * (vocab_size - 258)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*tokens, *(f"<|unused_{number}|>" for number in range(258, vocab_size))])
    writer.add_token_types(types)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(257)


def copy_tokenizer(reader: GGUFReader, writer: GGUFWriter) -> None:
    for name, field in reader.fields.items():
        if not name.startswith("tokenizer."):
            continue
        if field.types[0] is GGUFValueType.ARRAY:
            writer.add_array(name, field.contents())
        else:
            writer.add_key_value(name, field.contents(), field.types[0])


def list_tensors(config: ModelConfig, kind: Kind) -> Iterator[Tensor]:
    """The tensors of a Llama; Q4_K_M has some of them in Q6_K, the same ones as in llama.cpp."""
    embed, num_layers = config.hidden_size, config.num_layers
    finer = Kind.Q6_K if kind is Kind.Q4_K else kind
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield Tensor("token_embd.weight", (config.vocab_size, embed), finer if config.tied_head else kind)
    if not config.tied_head:
        yield Tensor("output.weight", (config.vocab_size, embed), finer)
    yield Tensor("output_norm.weight", (embed,), Kind.F32)
    for at in range(num_layers):
        eighth = num_layers // 8
        has_more_bits = at < eighth or at >= 7 * num_layers // 8 or (at - eighth) % 3 == 2
        some = finer if has_more_bits else kind
        for name, shape, of_matrix in (
            ("attn_q", (queries, embed), kind),
            ("attn_k", (keys, embed), kind),
            ("attn_v", (keys, embed), some),
            ("attn_output", (embed, queries), kind),
            ("ffn_gate", (config.intermediate_size, embed), kind),
            ("ffn_up", (config.intermediate_size, embed), kind),
            ("ffn_down", (embed, config.intermediate_size), some),
            ("attn_norm", (embed,), Kind.F32),
            ("ffn_norm", (embed,), Kind.F32),
        ):
            yield Tensor(f"blk.{at}.{name}.weight", shape, of_matrix)


def stored_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape as stored: the last axis counts bytes, except for float32."""
    if tensor.kind is Kind.F32:
        return tensor.shape
    count, size = GGML_QUANT_SIZES[tensor.kind]
    *outer, inputs = tensor.shape
    if inputs % count:
        raise SystemExit(f"{tensor.name} has {inputs} inputs, and {tensor.kind.name} has blocks of {count}")
    return (*outer, inputs // count * size)


def make_numbers(tensor: Tensor, generator: np.random.Generator) -> NDArray[np.generic]:
    shape = stored_shape(tensor)
    if tensor.kind is Kind.F32:
        return np.ones(shape, np.float32)
    if tensor.kind is Kind.BF16:
        numbers = generator.standard_normal(NUM_RANDOM, np.float32) * SPREAD
        return np.resize(numbers.astype(ml_dtypes.bfloat16).view(np.uint8), shape)
    count, size = GGML_QUANT_SIZES[tensor.kind]
    blocks = np.frombuffer(generator.bytes(NUM_RANDOM // count * size), np.uint8).reshape(-1, size).copy()
    set_scales(blocks, tensor.kind)
    return np.resize(blocks, shape)


def set_scales(blocks: NDArray[np.uint8], kind: Kind) -> None:
    """Sets the scales with which random codes have the spread, where ggml's blocks have them."""

    def put(start: int, number: float) -> None:
        blocks[:, start : start + 2] = np.asarray([number], np.float16).view(np.uint8)

    if kind is Kind.Q4_0:  # codes from 0 to 15, minus 8
        put(0, SPREAD / 4.6)
    elif kind is Kind.Q8_0:
        put(0, SPREAD / 74)
    elif kind is Kind.Q4_K:  # all eight scales and minima are 32, and the minimum is the mean of the codes
        put(0, SPREAD / (32 * 4.6))
        put(2, 7.5 * SPREAD / (32 * 4.6))
        blocks[:, 4:12], blocks[:, 12:16] = 0b10_100000, 0
    else:
        assert kind is Kind.Q6_K  # codes from 0 to 63, minus 32; all sixteen scales are 32
        blocks[:, 192:208] = 32
        put(208, SPREAD / (32 * 18.5))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=DENSE, default="smollm2-1.7b")
    parser.add_argument("--kind", choices=KINDS, default="q4_0")
    parser.add_argument("--bare", action="store_true", help="with a vocabulary of bytes")
    parser.add_argument("file", type=Path)
    return parser


if __name__ == "__main__":
    main()
