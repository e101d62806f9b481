"""Compile LLVM IR to native code for this CPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite
import torch
from llvmlite import binding as llvm

from specexec_kernels import kernel_files

Kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# LLVM's names of instructions that multiply in a dtype, on x86-64 and on Arm.
_MULTIPLY = {
    torch.bfloat16: ("amx-bf16", "avx512bf16", "bf16"),
    torch.float16: ("amx-fp16", "avx512fp16", "fullfp16"),
}
# Of Linux on x86-64: arch_prctl, its ARCH_REQ_XCOMP_PERM, and the state component of tiles' data.
_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18
_compiling = threading.Lock()  # targets in several threads share one engine


@cache
def features() -> dict[str, bool]:
    """LLVM's names of what this CPU can do, less what SPECEXEC_CPU_WITHOUT turns off.

    That environment variable lists beginnings of names, as in "avx512,amx": kernels are then made
    as for a CPU without them. Tests run the narrower forms so.
    """
    without = tuple(filter(None, os.environ.get("SPECEXEC_CPU_WITHOUT", "").split(",")))
    return {
        name: there and not name.startswith(without)
        for name, there in llvm.get_host_cpu_features().items()
    }


class Compiler:
    """LLVM for this CPU. One engine holds all kernels of the process."""

    def __init__(self) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        flags = ["+" + name if there else "-" + name for name, there in features().items()]
        if features().get("avx512f"):
            # LLVM avoids 512-bit vectors on early AVX-512 parts; these kernels gain from them
            flags.append("-prefer-256-bit")
        triple, cpu, joined = llvm.get_default_triple(), llvm.get_host_cpu_name(), ",".join(flags)
        version = (llvmlite.__version__, *llvm.llvm_version_info)
        self._target = repr((version, triple, cpu, joined, kernel_files.code_digest()))
        self._machine = llvm.Target.from_triple(triple).create_target_machine(
            cpu=cpu, features=joined, opt=3, jit=True
        )
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), self._machine)
        self._kernels: dict[str, Any] = {}
        self.compilations = 0

    def kernel(self, kind: str, spec: object, build: Callable[[str], str]) -> Any:
        """See compiled."""
        told = repr(spec)
        assert " at 0x" not in told, f"{told} is told from others by an address"
        symbol = f"specexec_{hashlib.sha256(f'{self._target} {kind} {told}'.encode()).hexdigest()}"
        if symbol not in self._kernels:
            machine_code = kernel_files.read(symbol)
            if machine_code is None:
                machine_code = self._compiled(build(symbol))
                kernel_files.keep(symbol, machine_code)
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(machine_code))
            self._engine.finalize_object()
            address = self._engine.get_function_address(symbol)
            assert address, f"the object file of {symbol} lacks it"  # address 0 would be called
            kernel = Kernel(address)
            kernel.address = address  # type: ignore[attr-defined]  # for kernels that call it
            self._kernels[symbol] = kernel
        return self._kernels[symbol]

    def _compiled(self, text: str) -> bytes:
        """The object file of a module."""
        self.compilations += 1
        module = llvm.parse_assembly(text)
        module.verify()
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        builder = llvm.create_pass_builder(self._machine, options)
        builder.getModulePassManager().run(module, builder)
        return bytes(self._machine.emit_object(module))


@cache
def _compiler() -> Compiler:
    return Compiler()


@cache
def lanes() -> int:
    """float32 lanes of the widest vector registers of this CPU."""
    if features().get("avx512f"):
        return 16
    return 8 if features().get("avx2") else 4


@cache
def has_dot() -> bool:
    """Whether this CPU multiplies pairs of bfloat16 in registers of 512 bits."""
    return bool(features().get("avx512bf16"))


@cache
def has_tiles() -> bool:
    """Whether this CPU multiplies tiles of bfloat16 (AMX), and the system lets this process."""
    named = all(features().get(name) for name in ("amx-tile", "amx-bf16", "avx512bf16"))
    return named and lanes() == 16 and _request_tiles()


def _request_tiles() -> bool:
    """Asks Linux for the tiles' registers, as each process has to; whether it may use them."""
    if platform.system() != "Linux":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA) == 0


@cache
def has_matmul(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions that multiply in a dtype of two bytes."""
    return any(features().get(name) for name in _MULTIPLY.get(dtype, ()))


def compilations() -> int:
    """Kernels that this process has compiled so far, each of which took from 0.1 s to seconds."""
    return _compiler().compilations


def compiled(kind: str, spec: object, build: Callable[[str], str]) -> Any:
    """Native function `void (int64 *)` of the LLVM IR that is built.

    Nothing is built where an earlier process has kept the same kernel for the same CPU.

    Args:
        kind: of kernel.
        spec: what it is built for; its repr tells it from others of the kind.
        build: the IR of a function by the name that it is given.
    """
    with _compiling:
        return _compiler().kernel(kind, spec, build)
