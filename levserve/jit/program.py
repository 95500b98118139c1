"""Compiles functions with LLVM when they are needed; a kernel takes a second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import llvmlite.binding as llvm
from llvmlite import ir

from levserve.jit.builder import I64, Builder
from levserve.jit.target import Target, detect_target


class Program:
    """Functions that call each other and are compiled together.

    On x86, loops are unrolled if the program gains by unrolling.
    """

    def __init__(self, target: Target, *, gains_by_unrolling: bool = False) -> None:
        self._target = target
        self._is_unrolled = gains_by_unrolling and target.arch == "x86_64"
        self._module = ir.Module()

    @contextmanager
    def function(self, name: str, num_arguments: int) -> Iterator[Builder]:
        """Adds a function of int64 that returns int64; its instructions are written inside the context."""
        function = ir.Function(self._module, ir.FunctionType(I64, [I64] * num_arguments), name)
        builder = Builder(function, self._target)
        yield builder
        builder.ir.ret(ir.Constant(I64, 0) if builder.result is None else builder.result.ir_value)

    def compile(self) -> bytes:
        """The object file of all functions."""
        machine = _target_machine(self._target)
        return bytes(machine.emit_object(self._optimize(machine)))

    def assembly(self) -> str:
        """The instructions of all functions, for people and tests."""
        machine = _target_machine(self._target)
        return str(machine.emit_assembly(self._optimize(machine)))

    def _optimize(self, machine: llvm.TargetMachine) -> llvm.ModuleRef:
        module = llvm.parse_assembly(str(self._module))
        builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
        passes = builder.getModulePassManager() if self._is_unrolled else _few_passes()
        passes.run(module, builder)
        return module


class Code:
    """A compiled program in this process' memory; it may be called as long as this object lives."""

    def __init__(self, compiled: bytes) -> None:
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine(detect_target()))
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(compiled))
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        return int(self._engine.get_function_address(name))


def _few_passes() -> llvm.ModulePassManager:
    """The passes that suffice for code that is already vectorized and unrolled.

    With all of LLVM's passes a kernel takes 1.5 to 3.5 times as long to compile. On x86, layers gain at most
    3 %, and lose up to 8 % with AVX2; on ARM they gain nothing, and one row of bfloat16 is 25 % slower.
    """
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    passes.add_loop_rotate_pass()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    return passes


def _target_machine(target: Target) -> llvm.TargetMachine:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=3, jit=True
    )
