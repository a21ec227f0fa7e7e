"""The same LLVM IR on the host: the reference of the differential tests."""

from __future__ import annotations

import ctypes
from typing import Any

import llvmlite.binding as llvm


class HostModule:
    """IR compiled for x86 with MCJIT; functions take (in, out, n)."""

    def __init__(self, ir: str):
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=1
        )
        module = llvm.parse_assembly(ir)
        module.triple, module.data_layout = machine.triple, str(machine.target_data)
        self.engine = llvm.create_mcjit_compiler(module, machine)
        self.engine.finalize_object()

    def call(self, name: str, source: Any, target: Any, n: int) -> None:
        """Run a function over n items of numpy arrays."""
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        kind(self.engine.get_function_address(name))(source.ctypes.data, target.ctypes.data, n)
