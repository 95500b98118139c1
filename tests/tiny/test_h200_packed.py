"""What XLA makes of matrices in the bits of their checkpoint for an H200: our kernel, and no widened copy.

Two layers of Llama-3.1-8B's shape; compiled, not run (see `h200.py`).
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from haliax import Axis
from jax.experimental import topologies

from levserve.device.programs import Programs, Shape
from levserve.device.rounds import Skeleton
from levserve.device.runner import make_state
from levserve.device.sizing import plan_sizes
from levserve.model import cache
from levserve.model.config import ModelConfig
from levserve.model.decoder import Blueprint
from levserve.model.gpu.assembly import UNASKED_BYTES
from levserve.model.gpu.backend import GpuBackend
from levserve.model.packed import Code, Kept, PackedMatrix, Scheme, round_as_asked
from levserve.model.parameter_shapes import parameter_shapes
from levserve.model.rules import Mode
from levserve.model.select import choose_backend
from levserve.observe.metrics import Metrics
from levserve.settings.parse import parse_settings
from tests.h200 import SPECIFICATION
from tests.h200_programs import on_the_card, placed

pytestmark = [
    pytest.mark.h200,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

CONFIG = ModelConfig(4096, 4096, 14336, 2, 32, 8, 128, 1e-5, 5e5, 8192, False)
FLOAT16 = jnp.dtype(jnp.float16)
SCHEMES = {
    "fp8": Scheme(Code.FP8, 128, 128, rounds_rows=True),
    "fp8, whole rows": Scheme(Code.FP8, rounds_rows=True),
    "fp8, activations left": Scheme(Code.FP8, 128, 128),
    "awq": Scheme(Code.UINT4, 128, has_zeros=True, scale=FLOAT16, in_lanes=True),
    "q4_k": Scheme(Code.UINT4, 32, has_offsets=True, scale=FLOAT16, in_lanes=True),
    "q8_0": Scheme(Code.INT8, 32, scale=FLOAT16, in_lanes=True),
    "mxfp4": Scheme(Code.E2M1, 32, scale=jnp.dtype(jnp.uint8)),
}
FEW, MANY = (Shape(rows, Mode.GREEDY) for rows in (8, 64))


@functools.cache
def programs_of(name: str) -> Programs:
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=SPECIFICATION.read_text(), topology="1x1x1"
    )
    there = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def placed(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=there)

    dtype = jnp.dtype(jnp.bfloat16)
    backend, _ = choose_backend("gpu", CONFIG, is_packed=True)
    storage = backend.kv_storage(dtype)
    settings = parse_settings(["--kv-pages", "512"], {})
    sizes = plan_sizes(
        settings,
        backend.traits,
        free_bytes=100 << 30,
        rows=64,
        max_position=CONFIG.max_position,
        page_bytes=cache.page_bytes(CONFIG, settings.page_size, storage),
        weight_bytes=0,
    )
    arrays, schemes = {}, {}
    for array, of_array in parameter_shapes(CONFIG).items():
        if len(of_array) == 1 or array in ("embed", "head"):
            arrays[array] = jax.ShapeDtypeStruct(of_array, dtype if len(of_array) > 1 else jnp.float32)
            continue
        schemes[array] = SCHEMES[name]
        for end, (shape_of_part, kept) in SCHEMES[name].array_shapes(of_array).items():
            arrays[array + end] = jax.ShapeDtypeStruct(shape_of_part, kept)
    state = jax.tree.map(placed, jax.eval_shape(lambda: make_state(CONFIG, sizes, storage)))
    leaves = tuple(map(placed, arrays.values()))
    blueprint = Blueprint(CONFIG, backend, Kept(tuple(schemes.items()), dtype))
    return Programs(leaves, state, Skeleton(blueprint, tuple(arrays), sizes.table_width), sizes, Metrics())


@functools.cache
def compile_there(name: str, shape: Shape) -> tuple[str, int]:
    """The program's text, and the bytes that it needs besides its arguments."""
    programs = programs_of(name)
    with on_the_card():
        compiled = programs.lower(shape).compile(programs._compiler_options(shape))
    return compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("fp8", FEW),
        ("fp8", MANY),
        ("fp8, activations left", FEW),
        ("awq", FEW),
        ("awq", MANY),
        ("q4_k", FEW),
        ("q4_k", MANY),
        ("q8_0", MANY),
        ("mxfp4", FEW),
    ],
)
def test_a_decode_step_never_holds_a_widened_matrix(name: str, shape: Shape) -> None:
    text, temp_bytes = compile_there(name, shape)
    assert text.count("custom-call(") >= 4 * CONFIG.num_layers
    assert "bf16[28672,4096]" not in text and "bf16[4096,14336]" not in text
    assert temp_bytes < 2 * 4096 * 4096, "less than the smallest matrix, widened"


def compile_product(name: str, rows: int, kernel: str, folder: Path) -> str:
    """The text of our kernel for the product of `rows` rows with a matrix of 4096 x 4096."""
    Out, In = Axis("out", 4096), Axis("in", 4096)
    scheme = SCHEMES[name]
    shapes = scheme.array_shapes((Out.size, In.size))
    arrays = {end: placed(jax.ShapeDtypeStruct(*shape)) for end, shape in shapes.items()}
    x = placed(jax.ShapeDtypeStruct((rows, In.size), jnp.bfloat16))
    multiply = jax.jit(
        lambda arrays, x: GpuBackend().packed_product(
            PackedMatrix.from_arrays(arrays, scheme, (Out, In)), x.dtype
        )(x, None)
    )
    with on_the_card():
        multiply.lower(arrays, x).compile({"xla_dump_to": str(folder), "xla_dump_emitter_re": ".*"})
    (found,) = (text for path in folder.glob("*.ptx") if kernel in (text := path.read_text()))
    return found


@pytest.mark.parametrize(("name", "rows"), [("fp8", 2), ("fp8", 64), ("fp8", 256), ("fp8, whole rows", 64)])
def test_tensor_cores_multiply_fp8_as_it_is(name: str, rows: int, tmp_path: Path) -> None:
    """Pallas' own product would be compiled to one in float16, which takes twice as long."""
    kernel = compile_product(name, rows, "fp8_product", tmp_path)
    assert re.search(r"wgmma\.mma_async\.\S+\.e4m3\.e4m3", kernel)
    assert not re.search(r"mma\S*\.f16\.f16", kernel)


def test_rounding_to_fp8_is_not_removed_as_a_conversion_there_and_back() -> None:
    x = placed(jax.ShapeDtypeStruct((512, 4096), jnp.bfloat16))
    with on_the_card():
        compiled = jax.jit(lambda x: round_as_asked(x, SCHEMES["fp8"])).lower(x).compile()
    assert "f8e4m3fn[512,4096]" in compiled.as_text()


@pytest.mark.parametrize(
    ("name", "rows", "is_wide"),
    [("awq", 32, False), ("awq", 33, True), ("q4_k", 64, True), ("q8_0", 128, True), ("awq", 256, True)],
)
def test_many_rows_are_multiplied_by_four_warps_together(
    name: str, rows: int, is_wide: bool, tmp_path: Path
) -> None:
    kernel = compile_product(name, rows, "fragment_product", tmp_path)
    assert bool(re.search(r"wgmma\.mma_async\.\S+\.bf16\.bf16", kernel)) == is_wide
    assert bool(re.search(r"\bmma\.sync\.aligned", kernel)) != is_wide


@pytest.mark.parametrize(
    ("name", "rows", "is_ahead"), [("q4_k", 64, True), ("q8_0", 64, True), ("awq", 65, False)]
)
def test_up_to_64_rows_the_matrix_is_fetched_ahead_into_the_cache(
    name: str, rows: int, is_ahead: bool, tmp_path: Path
) -> None:
    kernel = compile_product(name, rows, "fragment_product", tmp_path)
    assert ("prefetch.global.L2" in kernel) == is_ahead
    assert ("ld.global.nc." in kernel) != is_ahead


@pytest.mark.parametrize(
    ("name", "rows", "is_copied"), [("awq", 64, True), ("awq", 65, False), ("q4_k", 64, False)]
)
def test_up_to_64_rows_of_long_groups_are_copied_ahead_to_shared_memory(
    name: str, rows: int, is_copied: bool, tmp_path: Path
) -> None:
    """They take more of it than a program gets without asking, so XLA must ask for it."""
    kernel = compile_product(name, rows, "fragment_product", tmp_path)
    assert ("cp.async.bulk." in kernel) == ("%reserved_smem_offset_end" in kernel) == is_copied
    assert (".reqntid 256," in kernel) == is_copied
    (steps,) = tmp_path.glob("*fragment_product.triton-to-llvm.txt")
    asked = max(map(int, re.findall(r"ttg\.shared = (\d+)", steps.read_text())))
    assert (asked >= UNASKED_BYTES) == is_copied


@pytest.mark.parametrize(("name", "is_limited"), [("awq", True), ("q4_k", False)])
def test_16_rows_of_long_groups_are_multiplied_with_at_most_128_registers(
    name: str, is_limited: bool, tmp_path: Path
) -> None:
    kernel = compile_product(name, 16, "fragment_product", tmp_path)
    assert (".maxnreg 128" in kernel) == is_limited


@pytest.mark.parametrize(("shape", "count"), [(FEW, 1), (MANY, 4)])
def test_one_kernel_rounds_activations_with_what_comes_before(shape: Shape, count: int) -> None:
    """XLA would take two kernels, and repeat the norm or the gate in the second. Few rows of narrow
    matrices are rounded by the product itself."""
    text, _ = compile_there("fp8", shape)
    # By its name, because the debugging information of other kernels may mention the file.
    assert (
        len(re.findall(r'custom-call\(.*op_name="[^"]*/round_fp8/pallas_call"', text))
        == count * CONFIG.num_layers
    )
    assert "transpose_fusion" not in text and "wrapped_transpose" not in text, (
        "scales come in the order of the product"
    )


@pytest.mark.parametrize("num_tokens", [512, 4096])
def test_prompts_of_blocks_are_multiplied_as_fp8_by_a_kernel_of_ours(num_tokens: int) -> None:
    text, _ = compile_there("fp8", Shape(num_tokens))
    products = [line for line in text.splitlines() if 'custom_call_target="mosaic_gpu' in line]
    assert len(products) == 4 * CONFIG.num_layers
    assert "bf16[28672,4096]" not in text and "bf16[4096,14336]" not in text, "no matrix is widened"
    wide = [line for line in products if re.search(rf"= bf16\[{num_tokens},(28672|6144)\]", line)]
    assert len(wide) == 2 * CONFIG.num_layers, "sums that are large are rounded"


def test_prompts_with_one_scale_for_a_row_are_multiplied_by_the_library_as_fp8() -> None:
    text, _ = compile_there("fp8, whole rows", Shape(4096))
    products = [line for line in text.splitlines() if '"__cublas$lt$matmul$f8"' in line]
    assert len(products) == 4 * CONFIG.num_layers
    assert "bf16[28672,4096]" not in text and "bf16[4096,14336]" not in text, "no matrix is widened"
    wide = [line for line in products if "[4096,28672]" in line or "[4096,6144]" in line]
    assert len(wide) == 2 * CONFIG.num_layers
    assert all(re.search(r"= \(bf16\[", line) for line in wide), "sums that are large are rounded"


@pytest.mark.parametrize(
    ("name", "shape", "is_library"),
    [("fp8", Shape(4096), True), ("fp8", MANY, False), ("awq", Shape(4096), False)],
)
def test_only_prompts_of_fp8_with_activations_in_fp8_leave_out_tritons_products(
    name: str, shape: Shape, is_library: bool
) -> None:
    options = programs_of(name)._compiler_options(shape)
    assert options == ({"xla_gpu_enable_triton_gemm": False} if is_library else {})
