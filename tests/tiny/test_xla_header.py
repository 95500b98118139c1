"""Kernels run only in an XLA whose call structs have the expected layout, and fail cleanly without memory."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levserve.jit import xla_call, xla_header
from levserve.jit.target import detect_target
from levserve.jit.xla_call import FRAME_OFFSETS, Call, Kernel, Stage
from levserve.jit.xla_header import HEADER, header_mismatch
from levserve.model.config import ModelConfig
from levserve.model.select import choose_backend
from levserve.model.xla import XLA_ON_CPU

CONFIG = ModelConfig(100, 64, 64, 1, 2, 1, 64, 1e-5, 1e4, 128, True)


def test_the_installed_jaxlib_can_call_kernels() -> None:
    assert xla_call.unsupported_reason() is None


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "  XLA_FFI_Args args;",
            "  void* more;\n  XLA_FFI_Args args;",
            "the field args of XLA_FFI_CallFrame lies at byte 48",
        ),
        ("#define XLA_FFI_API_MAJOR 0", "#define XLA_FFI_API_MAJOR 7", "the XLA FFI version 7."),
        ("  int64_t* dims;", "  int64_t* sizes;", "the field dims of XLA_FFI_Buffer is not there"),
        ("struct XLA_FFI_Rets {", "struct XLA_FFI_Results {", "no struct XLA_FFI_Rets"),
        (
            "  _XLA_FFI_API_STRUCT_FIELD(XLA_FFI_Stream_Get);",
            "",
            "XLA_FFI_ThreadPool_Schedule of XLA_FFI_Api lies at byte 128, not 136",
        ),
    ],
)
def test_a_header_that_does_not_fit_is_told_and_the_model_is_left_to_xla(
    old: str, new: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = HEADER.read_text()
    assert old in text
    altered = tmp_path / "c_api.h"
    altered.write_text(text.replace(old, new))
    assert words in (header_mismatch(altered, FRAME_OFFSETS) or "")
    monkeypatch.setattr(xla_call, "HEADER", altered)
    backend, reason = choose_backend("cpu", CONFIG)
    assert backend == XLA_ON_CPU and words in reason


def test_a_version_that_xla_refuses_when_a_kernel_is_registered_leaves_the_model_to_xla(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jax.devices()  # XLA checks kernels once it has a client
    altered = tmp_path / "c_api.h"
    altered.write_text(
        HEADER.read_text().replace("#define XLA_FFI_API_MAJOR 0", "#define XLA_FFI_API_MAJOR 7")
    )
    monkeypatch.setattr(xla_call, "HEADER", altered)
    monkeypatch.setattr(xla_header, "KNOWN_VERSIONS", [(7, minor) for minor in range(20)])
    monkeypatch.setattr(xla_call, "EMPTY", "levserve_refused")  # other tests may have registered the real one
    backend, reason = choose_backend("cpu", CONFIG)
    assert backend == XLA_ON_CPU and "API version (7." in reason and "\n" not in reason


def test_a_header_that_is_missing_is_told(tmp_path: Path) -> None:
    reason = header_mismatch(tmp_path / "c_api.h", FRAME_OFFSETS)
    assert reason == "c_api.h cannot be read: No such file or directory"


@pytest.mark.parametrize("which", ["shared_bytes", "scratch_bytes"])
def test_a_kernel_without_memory_is_an_error_and_no_crash(which: str) -> None:
    def store_one(call: Call, shared: object, scratch: object, task: object) -> None:
        call.builder.store(call.result(0), call.builder.constant(1.0, jnp_float))

    from levserve.jit.builder import F32 as jnp_float

    stages = (Stage(lambda call: call.builder.constant(1), store_one),)
    absurd = {which: lambda call: call.argument_size(0, 0) * 2**60}
    kernel = Kernel(f"levserve_absurd_{which}", detect_target(), stages, **absurd)
    name = xla_call.register(kernel)
    run = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((1,), jnp.float32))
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED.*not enough memory to run levserve_absurd"
    ):
        jax.block_until_ready(jax.jit(run)(jnp.ones(3, jnp.float32)))
    modest = {which: lambda call: call.builder.constant(64)}
    name = xla_call.register(Kernel(f"levserve_modest_{which}", detect_target(), stages, **modest))
    run = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((1,), jnp.float32))
    np.testing.assert_array_equal(jax.jit(run)(jnp.ones(3, jnp.float32)), [1.0])
