"""Functions that are compiled by LLVM for the CPU at hand, in a second or two, when they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import llvmlite.binding as llvm
from llvmlite import ir

from levserve.jit.builder import I64, Builder
from levserve.jit.target import Target, detect_target


class Program:
    """Functions that are written and then compiled together."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._module = ir.Module()

    @contextmanager
    def function(self, name: str, num_arguments: int) -> Iterator[Builder]:
        """Writes a function of int64 to int64; it gives 0, or what `returned` is set to."""
        function = ir.Function(self._module, ir.FunctionType(I64, [I64] * num_arguments), name)
        builder = Builder(function, self._target)
        yield builder
        builder.ir.ret(ir.Constant(I64, 0) if builder.returned is None else builder.returned.made)

    def compile(self) -> bytes:
        """An object file."""
        machine = _machine_of(self._target)
        module = llvm.parse_assembly(str(self._module))
        passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
        passes.getModulePassManager().run(module, passes)
        return bytes(machine.emit_object(module))


class Code:
    """A compiled program, ready to be called for as long as this is kept."""

    def __init__(self, compiled: bytes) -> None:
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine_of(detect_target()))
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(compiled))
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        return int(self._engine.get_function_address(name))


def _machine_of(target: Target) -> llvm.TargetMachine:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=3, jit=True
    )
