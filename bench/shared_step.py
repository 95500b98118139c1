"""Predicts the decode step and prefill of a model on several GPUs from times on one GPU and link speed.

The time on one GPU is divided by the number of GPUs, because compiled programs show that each one's
bytes and flops shrink that way (see tests/tiny/test_h200_parallel.py). Added are the exchanges: two sums
a layer and one for the embedding, in float32, and a gather of the logits. Nothing here has run on
several GPUs.

    python3 bench/shared_step.py
"""

from __future__ import annotations

from dataclasses import dataclass

LINK_BYTES = 350e9
"""Bytes a second, in each direction, of an H200's NVLink: three quarters of the nominal 450e9."""
EXCHANGE_SECONDS = {2: 12e-6, 4: 15e-6}
"""Seconds of the smallest exchange inside a CUDA graph, by number of GPUs."""
WORD_BYTES = 4


@dataclass(frozen=True)
class Measured:
    """A model's times on one H200, by bench/decode.py in bfloat16 at a context of 576."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    step_seconds: dict[int, float]
    prefill_tokens_per_second: float


MODELS = {
    "Llama-3.2-1B": Measured(16, 2048, 128256, {2: 0.94e-3, 64: 1.40e-3, 256: 2.55e-3}, 303e3),
    "Llama-3.1-8B": Measured(32, 4096, 128256, {2: 4.15e-3, 64: 5.9e-3, 256: 11.3e-3}, 49.4e3),
}
PREFILL_TOKENS = 4096


def sum_seconds(num_bytes: float, count: int) -> float:
    """A sum over `count` GPUs: each sends and receives all but its own share, twice."""
    return EXCHANGE_SECONDS[count] + 2 * (count - 1) / count * num_bytes / LINK_BYTES


def gather_seconds(num_bytes: float, count: int) -> float:
    return EXCHANGE_SECONDS[count] + (count - 1) / count * num_bytes / LINK_BYTES


def predict(model: Measured, alone: float, tokens: int, rows: int, count: int) -> float:
    """Seconds on `count` GPUs of what takes `alone` on one: so many tokens, and logits for `rows` of them."""
    num_sums = 2 * model.num_layers + 1
    sums = num_sums * sum_seconds(tokens * model.hidden_size * WORD_BYTES, count)
    return alone / count + sums + gather_seconds(rows * model.vocab_size * WORD_BYTES, count)


def main() -> None:
    for name, model in MODELS.items():
        print(name)
        works = [(f"step of {rows} rows", taken, rows, rows) for rows, taken in model.step_seconds.items()]
        prefill = PREFILL_TOKENS / model.prefill_tokens_per_second
        works.append((f"prefill of {PREFILL_TOKENS} tokens", prefill, PREFILL_TOKENS, 1))
        for work, alone, tokens, rows in works:
            line = f"  {work:24s} 1: {alone * 1e3:6.2f} ms"
            for count in EXCHANGE_SECONDS:
                shared = predict(model, alone, tokens, rows, count)
                line += f"   {count}: {shared * 1e3:6.2f} ms ({alone / shared:.2f} x)"
            print(line)


if __name__ == "__main__":
    main()
