"""Measures products with matrices kept in a checkpoint's own bits, kernel by kernel, on an NVIDIA GPU.

    python bench/packed.py --schemes fp8-blocks w4 --rows 2 64
    python bench/packed.py --schemes mxfp4 --rows 2 --tilings 16x32x128w2s4 16x64x128w4s4/2
    python bench/packed.py --schemes w4 q4_k --rows 2 64 --tilings m2n1w1x4 m4n1w1x4/2 m2n8w4x1s m2n8w8x1g
    python bench/packed.py --schemes fp8-blocks --rows 2 --tilings 16x64x128w4s3i/8

Checks each kernel against the matrix widened to float32, then prints microseconds of each product of a layer
of the shape, and their sum over all layers beside the time that reading the matrices takes. Each program
multiplies with several copies of a matrix, so that none is still in the GPU's cache.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from decode import SHAPES
from haliax import Axis
from machine import measure_bandwidth
from schemes import SCHEMES, random_parts

from levserve.model.gpu.fp8_plan import Fp8Tiling, Fp8Way, choose_fp8_tiling, fit_cut
from levserve.model.gpu.fp8_product import multiply_fp8
from levserve.model.gpu.fragment_plan import FragmentTiling, choose_fragments, fit_fragments
from levserve.model.gpu.fragment_product import multiply_fragments
from levserve.model.gpu.hopper import is_hopper
from levserve.model.gpu.packed_plan import PROGRAMS, PackedTiling, choose_tiling, fit
from levserve.model.gpu.packed_product import multiply_in_registers
from levserve.model.packed import SCALE, PackedMatrix, Scheme, multiply_packed
from levserve.model.parameter_shapes import parameter_shapes

MATRICES = ("qkv", "out", "gate_up", "down")
BYTES_READ = 300 << 20
"""Size of the copies of a matrix that one program reads: several times a GPU's cache."""
Tiling = PackedTiling | FragmentTiling
BFLOAT16, FLOAT32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


class Case(NamedTuple):
    matrix: str
    rows: int
    tiling: Tiling | None
    """None: XLA multiplies."""
    rounds_inside: bool = False
    """Whether the kernel itself rounds activations to FP8, if the matrix requires that."""


class Way(NamedTuple):
    """How products are computed: by XLA, by the scheme's kernel as it is cut by default, or as `tiling` says."""

    is_xla: bool = False
    tiling: Tiling | None = None
    splits: int | None = None
    """None: as many as keep a GPU busy."""
    rounds_inside: bool = False

    def case(self, matrix: str, rows: int, shape: tuple[int, int], scheme: Scheme) -> Case:
        if self.is_xla:
            return Case(matrix, rows, None)
        if scheme.rounds_rows:
            return Case(matrix, rows, *(self._cut(rows, shape, scheme) or (None,)))
        if self.tiling is None:
            if scheme.in_lanes:
                return Case(matrix, rows, choose_fragments(rows, shape, scheme, is_hopper=is_hopper()))
            return Case(matrix, rows, choose_tiling(rows, shape, scheme))
        if isinstance(self.tiling, FragmentTiling):
            return Case(matrix, rows, fit_fragments(self.tiling, rows, shape, scheme, self.splits))
        return Case(matrix, rows, fit(self.tiling, rows, shape, scheme, self.splits))

    def _cut(self, rows: int, shape: tuple[int, int], scheme: Scheme) -> Fp8Tiling | None:
        if self.tiling is None:
            return choose_fp8_tiling(rows, shape, scheme)
        assert isinstance(self.tiling, PackedTiling)
        way = Fp8Way(self.tiling, PROGRAMS, self.rounds_inside)
        return fit_cut(way, rows, shape, scheme, splits=self.splits)


def main() -> None:
    options = _parser().parse_args()
    shapes = {
        name: shape
        for name in MATRICES
        for array, shape in parameter_shapes(SHAPES[options.shape]).items()
        if array == f"layers.0.{name}"
    }
    num_layers = SHAPES[options.shape].num_layers
    bandwidth = measure_bandwidth()
    print(
        f"{options.shape} on {jax.devices()[0].device_kind}; memory reads {bandwidth / 1e9:.0f} GB/s",
        flush=True,
    )
    for name in options.schemes:
        scheme = SCHEMES[name]
        floor = sum(scheme.num_bytes(shape) for shape in shapes.values()) / bandwidth * num_layers
        print(f"{name}: all layers' matrices are read in {floor * 1e3:.2f} ms", flush=True)
        matrices = {matrix: make_copies(scheme, shape) for matrix, shape in shapes.items()}
        for rows in options.rows:
            ways = [Way(is_xla=True)] if options.xla else []
            ways += [Way(), *read_tilings(options.tilings, rows, scheme)]
            for way in ways:
                measure_way(way, rows, scheme, matrices, num_layers)


def measure_way(
    way: Way, rows: int, scheme: Scheme, matrices: dict[str, list[PackedMatrix]], num_layers: int
) -> None:
    cases = []
    for matrix, copies in matrices.items():
        num_columns, num_inputs = (axis.size for axis in copies[0].axes)
        cases.append(way.case(matrix, rows, (num_columns, num_inputs), scheme))
    with ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(functools.partial(compile_case, matrices=matrices), cases))
    seconds, errors = {}, []
    for case, program in zip(cases, programs, strict=True):
        copies = matrices[case.matrix]
        x = random_rows(rows, copies[0].axes[1].size)
        seconds[case.matrix] = measure(program, x, copies) / len(copies)
        errors.append(relative_error(program(x, copies)[0], copies[0], x))
    total = sum(seconds.values()) * num_layers
    each = "  ".join(f"{matrix} {1e6 * value:6.1f}" for matrix, value in seconds.items())
    splits = "/".join(str(case.tiling.splits) for case in cases if case.tiling is not None)
    kind = "xla" if cases[0].tiling is None else show_tiling(cases[0].tiling)
    kind += "i" * cases[0].rounds_inside
    print(
        f"  rows {rows:3d}  {kind:16s} splits {splits:8s} {total * 1e3:6.2f} ms  us: {each}  error {max(errors):.1e}",
        flush=True,
    )


def make_copies(scheme: Scheme, shape: tuple[int, ...]) -> list[PackedMatrix]:
    count = max(2, -(-BYTES_READ // scheme.num_bytes(shape)))
    copies = []
    for number in range(count):
        parts = random_parts(jax.random.key(number), scheme, shape, 0.02)
        axes = (Axis("out", shape[0]), Axis("in", shape[1]))
        parts[SCALE] = vary(parts[SCALE])
        copies.append(PackedMatrix.from_arrays(parts, scheme, axes))
    return copies


def vary(scale: jax.Array) -> jax.Array:
    """Varies the scales, so that a kernel that reads the wrong scale is noticed."""
    if scale.dtype == jnp.uint8:
        return scale + jax.random.randint(jax.random.key(1), scale.shape, 0, 3, jnp.uint8)
    factors = jax.random.uniform(jax.random.key(1), scale.shape, minval=0.5, maxval=1.5)
    return (scale.astype(jnp.float32) * factors).astype(scale.dtype)


def random_rows(rows: int, num_inputs: int) -> jax.Array:
    return jax.random.normal(jax.random.key(7), (rows, num_inputs), jnp.float32).astype(jnp.bfloat16)


def compile_case(case: Case, *, matrices: dict[str, list[PackedMatrix]]) -> jax.stages.Compiled:
    def multiply(x: jax.Array, copies: Sequence[PackedMatrix]) -> list[jax.Array]:
        if case.tiling is None:
            return [multiply_packed(copy, x, BFLOAT16) for copy in copies]
        if isinstance(case.tiling, FragmentTiling):
            return [multiply_fragments(copy, x, tiling=case.tiling) for copy in copies]
        if copies[0].scheme.rounds_rows:
            cut = Fp8Tiling(case.tiling, case.rounds_inside)
            return [multiply_fp8(copy, x, cut=cut) for copy in copies]
        return [multiply_in_registers(copy, x, tiling=case.tiling) for copy in copies]

    copies = matrices[case.matrix]
    return jax.jit(multiply).lower(random_rows(case.rows, copies[0].axes[1].size), copies).compile()


def measure(program: jax.stages.Compiled, x: jax.Array, copies: list[PackedMatrix]) -> float:
    """Seconds of one run, the least of several; runs are queued, which hides the cost of the calls."""
    jax.block_until_ready(program(x, copies))
    found = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready([program(x, copies) for _ in range(8)])
        found.append((time.perf_counter() - start) / 8)
    return min(found)


def relative_error(got: jax.Array, matrix: PackedMatrix, x: jax.Array) -> float:
    """Relative to the norm of the float32 product, with activations rounded if the scheme asks for it."""
    with jax.default_matmul_precision("highest"):
        wanted = multiply_packed(matrix, x.astype(FLOAT32), FLOAT32)
    found, right = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(found - right) / np.linalg.norm(right))


def read_tilings(texts: Sequence[str], rows: int, scheme: Scheme) -> list[Way]:
    """The given tilings that are for the kernel of this scheme and for this number of rows."""
    found = []
    for text in texts:
        tiling, splits, rounds_inside = read_tiling(text)
        smallest = 16 if rows <= 16 else rows // 2
        if isinstance(tiling, FragmentTiling) != scheme.in_lanes:
            continue
        if scheme.in_lanes or smallest <= tiling.rows <= max(16, 2 * rows):
            found.append(Way(tiling=tiling, splits=splits, rounds_inside=rounds_inside))
    return found


def read_tiling(text: str) -> tuple[Tiling, int | None, bool]:
    """A tiling, its splits if they are given, and whether the kernel rounds activations itself."""
    cut, _, splits = text.partition("/")
    blocks = re.fullmatch(r"(\d+)x(\d+)x(\d+)w(\d+)s(\d+)(i?)", cut)
    fragments = re.fullmatch(r"m(\d+)n(\d+)w(\d+)x(\d+)([sgr]?)", cut)
    wanted = int(splits) if splits else None
    if blocks is not None:
        *sizes, inside = blocks.groups()
        return PackedTiling(*map(int, sizes)), wanted, bool(inside)
    if fragments is not None:
        m_tiles, n_tiles, warps_m, warps_k = map(int, fragments.groups()[:4])
        tiling = FragmentTiling(
            *(m_tiles, n_tiles, warps_m, warps_k, 1),
            is_staged=bool(fragments[5]),
            is_wide=fragments[5] in ("g", "r"),
            has_ring=fragments[5] == "r",
        )
        return tiling, wanted, False
    raise SystemExit(
        f"{text} is neither rows x columns x depth w warps s stages / splits, such as 16x32x128w2s4/2 (or "
        "16x64x128w4s3i/2, where a kernel for FP8 rounds activations itself), nor "
        "m tiles n tiles w warps x warps s(taged), g(roups of four warps) or r(ing) / splits, such as m2n8w4x1s/2"
    )


def show_tiling(tiling: Tiling) -> str:
    if isinstance(tiling, FragmentTiling):
        staged = "r" if tiling.has_ring else "g" if tiling.is_wide else "s" if tiling.is_staged else ""
        return f"m{tiling.m_tiles}n{tiling.n_tiles}w{tiling.warps_m}x{tiling.warps_k}{staged}"
    return f"{tiling.rows}x{tiling.columns}x{tiling.depth}w{tiling.num_warps}s{tiling.num_stages}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--schemes", choices=SCHEMES, nargs="+", default=["fp8-blocks", "w4"])
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 64])
    parser.add_argument("--tilings", nargs="*", default=[], help="others than the chosen one, for these rows")
    parser.add_argument("--xla", action="store_true", help="measure XLA's way as well")
    return parser


if __name__ == "__main__":
    main()
