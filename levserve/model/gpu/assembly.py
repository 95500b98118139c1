"""Kernels written in PTX, as part of a compiled program.

XLA takes a kernel of Triton's IR. One whose only operation is inline assembly is whatever the assembly says,
and XLA compiles, stores and launches it as it does any other: no CUDA toolkit is needed, and the program that
is kept on disk has its machine code. It is an interface of XLA's own, which may change with any version: so
nothing else uses it, and `fragment_product.runs_here` tries it before a model relies on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

TARGET = "__gpu$xla.gpu.triton"
TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


@dataclass(slots=True)
class Assembly:
    """The lines of a kernel, and the registers that they use."""

    shifts: bool = True
    """Whether a shift or a mask divides where it can; else the assembler's division does, even by one."""
    lines: list[str] = field(default_factory=list)
    registers: dict[str, list[str]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def new(self, name: str, kind: str = "b32") -> str:
        """A register that no other line has; `name` only tells the reader what it is for."""
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
        """Of a number without sign."""
        if divisor & (divisor - 1) or not self.shifts:
            return self.set("div.u32", register, divisor, name=name)
        return self.set("shr.u32", register, divisor.bit_length() - 1, name=name)

    def remainder(self, register: str, divisor: int, name: str = "v") -> str:
        if divisor & (divisor - 1) or not self.shifts:
            return self.set("rem.u32", register, divisor, name=name)
        return self.set("and.b32", register, divisor - 1, name=name)

    def label(self, name: str) -> None:
        self.lines.append(f"{name}:")

    def text(self, shared_bytes: int, alignment: int = 16) -> str:
        """The kernel; `memory` is what the threads of a program share."""
        declared = [f".reg .{kind} {', '.join(names)};" for kind, names in self.registers.items()]
        if shared_bytes:
            declared.append(f".shared .align {alignment} .b8 memory[{shared_bytes}];")
        return " ".join(["{", *declared, *self.lines, "mov.b32 $0, 0;", "}"])


def launch(
    name: str,
    text: str,
    arrays: Sequence[jax.Array],
    result: jax.ShapeDtypeStruct,
    grid: tuple[int, int, int],
    num_warps: int,
    max_registers: int | None = None,
) -> jax.Array:
    """Runs a kernel on a GPU; in its text $1, $2, ... are the addresses of the arrays, then the result's.

    Where `max_registers` is given, a thread gets no more of them.
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
    module = f"""module{limit} {{ tt.func public @{name}({parameters}) {{
{addresses}
%done = tt.elementwise_inline_asm "{text}"
  {{constraints = "{constraints}", packed_element = 1 : i32, pure = false}}
  {", ".join(f"%a{each}" for each in numbers)} : {", ".join("i64" for _ in numbers)} -> i32
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


def _type_of(dtype: jnp.dtype) -> str:
    """Triton's name; the assembly reads bits, whatever the name."""
    return TYPES.get(dtype.name, f"i{8 * dtype.itemsize}")
