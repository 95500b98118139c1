"""Predicts a decode step and prefill of a model that several GPUs share, from times on one GPU and the speed of links.

What one GPU takes is divided by the number of GPUs, because compiled programs show that bytes and flops of each fall so (see
tests/tiny/test_h200_parallel.py), and the exchanges are added: two sums a layer and one for the embedding, in float32, and a gather of the logits.
Nothing here has run on several GPUs.

    python3 bench/shared_step.py
"""

from __future__ import annotations

from dataclasses import dataclass

LINK_BYTES = 350e9
"""A second, in each direction, of an H200's NVLink: three quarters of the 450e9 on paper."""
EXCHANGE_SECONDS = {2: 12e-6, 4: 15e-6}
"""Of the smallest exchange inside a CUDA graph."""
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
    """A sum over so many GPUs: each sends and receives two parts of all but its own share."""
    return EXCHANGE_SECONDS[count] + 2 * (count - 1) / count * num_bytes / LINK_BYTES


def gather_seconds(num_bytes: float, count: int) -> float:
    return EXCHANGE_SECONDS[count] + (count - 1) / count * num_bytes / LINK_BYTES


def predict(model: Measured, alone: float, tokens: int, rows: int, count: int) -> float:
    """Seconds of what takes `alone` on one GPU: so many tokens, of which `rows` are sampled."""
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
