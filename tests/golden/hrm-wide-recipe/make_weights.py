"""Writes actv1_student.safetensors for this folder's golden.json: python make_weights.py OUT_FILE   (numpy only)

The widths are those at which the token embedding is scaled by sqrt(512); such a file is 34 MB, so it is made, not stored.
numpy.random.RandomState draws the same numbers in every numpy version.
"""

import json
import struct
import sys

import numpy as np

VOCAB, HIDDEN, INTER, EXPERTS = 300, 512, 768, 4
LOUD_ROWS = (20, 21)  # rows of the output matrix that pass the +-20 limit


def tensors():
    h = HIDDEN
    shapes = {
        "inner.H_init": (h,),
        "inner.L_init": (h,),
        "inner.embed_tokens.embedding_weight": (VOCAB, h),
        "inner.lm_head.weight": (VOCAB, h),
        "inner.q_head.bias": (2,),
        "inner.q_head.weight": (2, h),
    }
    for level in "HL":
        pre = f"inner.{level}_level.layers.0."
        shapes[pre + "self_attn.qkv_proj.weight"] = (3 * h, h)
        shapes[pre + "self_attn.o_proj.weight"] = (h, h)
        shapes[pre + "mlp.moe.router.gate.weight"] = (EXPERTS, h)
        for e in range(EXPERTS):
            shapes[pre + f"mlp.moe.experts.{e}.w1.weight"] = (INTER, h)
            shapes[pre + f"mlp.moe.experts.{e}.w2.weight"] = (h, INTER)
    draw = np.random.RandomState(20251118)
    out = {}
    for name in sorted(shapes):
        shape = shapes[name]
        if name.endswith("_init"):
            scale = 1.0
        elif "embed_tokens" in name:
            scale = 0.2  # x sqrt(512) = 4.5: about 1 in 40 passes the +-10 limit
        elif "lm_head" in name:
            scale = 3.6 / np.sqrt(h)
        elif name.endswith("w2.weight"):
            scale = 2.0 / np.sqrt(INTER)
        elif name.endswith("q_head.bias"):
            scale = 1.0
        else:
            scale = 1.2 / np.sqrt(shape[1])
        value = draw.standard_normal(shape) * scale
        if "lm_head" in name:
            value[list(LOUD_ROWS)] *= 4.5
        out[name] = value.astype(np.float32)
    return out


def write(path):
    head, at, body = {}, 0, []
    for name, value in tensors().items():
        head[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
        body.append(np.ascontiguousarray(value, dtype="<f4"))
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for value in body:
            f.write(value.tobytes())


if __name__ == "__main__":
    write(sys.argv[1])
