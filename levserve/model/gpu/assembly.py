"""Kernels written in PTX, as part of a compiled program.

XLA accepts kernels in Triton's IR. One that has nothing but inline assembly, and perhaps memory that it
needs, does whatever the assembly says, and XLA compiles, stores and launches it like any other: no CUDA
toolkit is needed, and the compiled program on disk contains its machine code. The interface is internal
to XLA and may change with any version, so nothing else uses it, and `fragment_product.runs_here` tries it
before a model relies on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

TARGET = "__gpu$xla.gpu.triton"
UNASKED_BYTES = 48 * 1024
"""Bytes of shared memory that a program has without asking for more."""
SMALLEST_ARRAY = 4096
"""Bytes of the smallest array that is allocated to ask for more."""
MEMORY_LAYOUT = "#memory = #ttg.swizzled_shared<{vec = 1, perPhase = 1, maxPhase = 1, order = [0]}>"
"""The layout of such arrays; nothing is swizzled."""
TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


class Kernel(NamedTuple):
    text: str
    asked_bytes: int = 0
    """Bytes of shared memory, if they are more than a program has without asking."""


@dataclass(slots=True)
class Assembly:
    """The lines of a kernel, and the registers that they use."""

    shifts: bool = True
    """Whether to divide by a shift or a mask where possible; otherwise the assembler divides, even by one."""
    lines: list[str] = field(default_factory=list)
    registers: dict[str, list[str]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def new(self, name: str, kind: str = "b32") -> str:
        """A new register; `name` only tells the reader what it is for."""
        count = self.counts.get(name, 0)
        self.counts[name] = count + 1
        register = f"{name}_{count}"
        self.registers.setdefault(kind, []).append(register)
        return register

    def several(self, name: str, count: int, kind: str = "b32") -> list[str]:
        return [self.new(name, kind) for _ in range(count)]

    def __call__(self, line: str) -> None:
        self.lines.append(line + ";")

    def set(self, operation: str, *operands: str | int, name: str = "v", kind: str = "b32") -> str:
        """A new register with the result of an operation."""
        result = self.new(name, kind)
        self(f"{operation} {result}, {', '.join(map(str, operands))}")
        return result

    def quotient(self, register: str, divisor: int, name: str = "v") -> str:
        """The quotient of an unsigned number."""
        if divisor & (divisor - 1) or not self.shifts:
            return self.set("div.u32", register, divisor, name=name)
        return self.set("shr.u32", register, divisor.bit_length() - 1, name=name)

    def remainder(self, register: str, divisor: int, name: str = "v") -> str:
        if divisor & (divisor - 1) or not self.shifts:
            return self.set("rem.u32", register, divisor, name=name)
        return self.set("and.b32", register, divisor - 1, name=name)

    def new_label(self, name: str) -> str:
        """A unique label."""
        count = self.counts.get(name, 0)
        self.counts[name] = count + 1
        return f"{name}_{count}"

    def label(self, name: str) -> None:
        self.lines.append(f"{name}:")

    def kernel(self, shared_bytes: int, alignment: int = 16) -> Kernel:
        """The finished kernel; in its text, `memory` is the shared memory of a program."""
        declared = [f".reg .{kind} {', '.join(names)};" for kind, names in self.registers.items()]
        asked_bytes = shared_bytes if shared_bytes > UNASKED_BYTES else 0
        if asked_bytes:
            # It begins where the part reserved for the system ends, at a multiple of 128.
            declared.append(".reg .b32 memory; mov.u32 memory, %reserved_smem_offset_end;")
        elif shared_bytes:
            declared.append(f".shared .align {alignment} .b8 memory[{shared_bytes}];")
        return Kernel(" ".join(["{", *declared, *self.lines, "mov.b32 $0, 0;", "}"]), asked_bytes)


def launch(
    name: str,
    kernel: Kernel,
    arrays: Sequence[jax.Array],
    result: jax.ShapeDtypeStruct,
    grid: tuple[int, int, int],
    num_warps: int,
    max_registers: int | None = None,
) -> jax.Array:
    """Runs a kernel on a GPU; in its text $1, $2, ... are the addresses of the arrays, then the result's.

    If `max_registers` is given, a thread gets no more registers than that.
    """
    dtypes = [*(array.dtype for array in arrays), result.dtype]
    pointers = [f"!tt.ptr<{_type_of(dtype)}>" for dtype in dtypes]
    numbers = range(len(pointers))
    parameters = ", ".join(
        f"%p{each}: {pointer} {{tt.divisibility = 16 : i32}}" for each, pointer in enumerate(pointers)
    )
    addresses = "\n".join(
        f"%a{each} = tt.ptr_to_int %p{each} : {pointer} -> i64" for each, pointer in enumerate(pointers)
    )
    constraints = ",".join(["=r", *("l" for _ in numbers)])
    limit = "" if max_registers is None else f' attributes {{"ttg.maxnreg" = {max_registers} : i32}}'
    allocated, freed = _ask_for(kernel.asked_bytes)
    module = f"""{MEMORY_LAYOUT if allocated else ""}
module{limit} {{ tt.func public @{name}({parameters}) {{
{allocated}
{addresses}
%done = tt.elementwise_inline_asm "{kernel.text}"
  {{constraints = "{constraints}", packed_element = 1 : i32, pure = false}}
  {", ".join(f"%a{each}" for each in numbers)} : {", ".join("i64" for _ in numbers)} -> i32
{freed}
tt.return }} }}"""
    sizes = {f"grid_{axis}": np.int32(size) for axis, size in zip("xyz", grid, strict=True)}
    call = jax.ffi.ffi_call(TARGET, result)
    return call(
        *arrays,
        name=name,
        ir=module,
        num_stages=np.int32(1),
        num_warps=np.int32(num_warps),
        debug=False,
        **sizes,
    )


def _ask_for(num_bytes: int) -> tuple[str, str]:
    """Operations before and after the assembly that make XLA ask for this much shared memory.

    Only powers of two can be allocated, so several arrays together make up the memory.
    """
    left = -(-num_bytes // SMALLEST_ARRAY) * SMALLEST_ARRAY
    allocated, freed = [], []
    while left:
        size = 1 << left.bit_length() - 1
        left -= size
        array = f"!ttg.memdesc<{size}xi8, #memory, #ttg.shared_memory, mutable>"
        allocated.append(f"%m{size} = ttg.local_alloc : () -> {array}")
        freed.append(f"ttg.local_dealloc %m{size} : {array}")
    return "\n".join(allocated), "\n".join(freed)


def _type_of(dtype: jnp.dtype) -> str:
    """Triton's name of a type; the assembly reads bits, whatever the name."""
    return TYPES.get(dtype.name, f"i{8 * dtype.itemsize}")
