"""Functions that are compiled by LLVM for the CPU at hand, in a second or two, when they are needed; or found where they were kept."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir

from levserve.model.kernels.shelf import Shelf
from levserve.model.kernels.writer import I64, Writer


class Program:
    """Functions that are compiled together."""

    def __init__(self) -> None:
        self._module = ir.Module()
        self._engine: llvm.ExecutionEngine | None = None

    @contextmanager
    def function(self, name: str, num_arguments: int) -> Iterator[Writer]:
        """Writes a function of int64 to int64; it gives 0."""
        writer = Writer(ir.Function(self._module, ir.FunctionType(I64, [I64] * num_arguments), name))
        yield writer
        writer.builder.ret(ir.Constant(I64, 0))

    def compile(self, shelf: Shelf | None = None) -> None:
        """Unless the shelf has what this LLVM made of it for this CPU: a large program takes more than a second."""
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
        machine = llvm.Target.from_default_triple().create_target_machine(cpu=cpu, features=features, opt=3, jit=True)
        text = str(self._module)
        name = hashlib.sha256("\n".join((llvmlite.__version__, cpu, features, text)).encode()).hexdigest()
        code = None if shelf is None else shelf.find(name)
        if code is None:
            code = _translate(text, machine)
            if shelf is not None:
                shelf.keep(name, code)
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        """Good for as long as this program is kept."""
        assert self._engine is not None, "it is not compiled"
        return int(self._engine.get_function_address(name))


def _translate(text: str, machine: llvm.TargetMachine) -> bytes:
    """Into an object file."""
    module = llvm.parse_assembly(text)
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(module, passes)
    return bytes(machine.emit_object(module))
