#!/usr/bin/env python3
"""Scores a text with llama.cpp, for bench/quality.py, which starts it with a Python that has llama-cpp-python.

Reads {"model": path, "tokens": [...]} from standard input; writes the log-probability of each token after the
first and the likeliest token in its place, as JSON. Everything but the length of the context is llama.cpp's default.
"""

from __future__ import annotations

import json
import sys

import numpy as np
from llama_cpp import Llama


def main() -> None:
    request = json.load(sys.stdin)
    tokens = request["tokens"]
    llama = Llama(request["model"], n_ctx=len(tokens), logits_all=True, verbose=False)
    llama.eval(tokens)
    logits = np.asarray(llama.scores[: len(tokens) - 1], np.float64)
    following = np.asarray(tokens[1:])
    largest = logits.max(-1)
    totals = largest + np.log(np.exp(logits - largest[:, None]).sum(-1))
    logprobs = logits[np.arange(len(following)), following] - totals
    json.dump({"logprobs": logprobs.tolist(), "likeliest": logits.argmax(-1).tolist()}, sys.stdout)


if __name__ == "__main__":
    main()
