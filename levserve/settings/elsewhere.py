"""Flags of other servers that levserve does not accept, and what to do instead.

Such a flag stops the start, like any other unknown flag; the line on stderr then ends with the advice.
Flags that are accepted as other names of a setting are in `alias.py`.
"""

from __future__ import annotations

ALWAYS_ON = "leave it out: this is always on"
CHOSEN_BY_DEVICE = "leave it out: the whole model is on the device that --device names"
ADVICE = {
    # vLLM
    "--gpu-memory-utilization": "--kv-memory takes a size; without it the free memory is used",
    "--trust-remote-code": "leave it out: levserve runs no code from checkpoints",
    "--enforce-eager": "leave it out: everything is compiled before the server is ready",
    "--enable-prefix-caching": ALWAYS_ON,
    "--enable-chunked-prefill": ALWAYS_ON,
    "--enable-auto-tool-choice": ALWAYS_ON,
    "--tool-call-parser": "--tool-format names the format, and is usually found by itself",
    "--reasoning-parser": "--reasoning names the format, and is usually found by itself",
    "--speculative-config": "--speculate N drafts from the text, --draft-model PATH with a smaller model",
    "--enable-lora": "--adapter PATH adds an adapter to the model",
    "--lora-modules": "--adapter PATH adds one, and each further one is a section [model.NAME]",
    "--swap-space": "leave it out: what no longer fits the KV cache is computed again",
    "--pipeline-parallel-size": "--tensor-parallel N shares every layer instead",
    "--data-parallel-size": "start one levserve for each device, behind a proxy",
    "--allowed-origins": "--cors-origins takes names, separated by spaces",
    "--disable-log-requests": "--access-log false",
    "--max-logprobs": "leave it out: each request may ask for 20",
    # llama.cpp's server
    "-m": "--model",
    "-c": "--max-seq-len",
    "-t": "--threads",
    "-np": "--max-running",
    "-hf": "--model org/name:Q4_K_M",
    "-ngl": CHOSEN_BY_DEVICE,
    "--n-gpu-layers": CHOSEN_BY_DEVICE,
    "--gpu-layers": CHOSEN_BY_DEVICE,
    "--mlock": "leave it out",
    "--no-mmap": "leave it out",
    "-fa": ALWAYS_ON,
    "--flash-attn": ALWAYS_ON,
    "--jinja": ALWAYS_ON,
    "--cont-batching": ALWAYS_ON,
    "--cache-type-k": "--kv-dtype is for keys and values",
    "--cache-type-v": "--kv-dtype is for keys and values",
    "--metrics": "leave it out: /metrics is always served",
    "--hf-repo": "--model org/name:Q4_K_M",
    "--model-draft": "--draft-model",
    "--lora": "--adapter PATH, for a folder of PEFT",
    # SGLang and TGI
    "--mem-fraction-static": "--kv-memory takes a size; without it the free memory is used",
    "--max-total-tokens": "--max-seq-len is for one request, --kv-memory for the cache of all",
    "--max-input-tokens": "--max-seq-len is for prompt and answer together",
    "--num-shard": "--tensor-parallel",
    "--lora-paths": "--adapter PATH adds one, and each further one is a section [model.NAME]",
}
