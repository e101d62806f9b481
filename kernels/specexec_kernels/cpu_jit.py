"""Compiles LLVM IR to native code for this CPU, and knows the CPU's features."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import llvmlite
import torch
from llvmlite import binding as llvm

from specexec_kernels import kernel_files
from specexec_kernels.cpu_ir_emit import Quads

Kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# LLVM's names of the features that multiply in a dtype, on x86-64 and on Arm.
_MULTIPLY = {
    torch.bfloat16: ("amx-bf16", "avx512bf16", "bf16"),
    torch.float16: ("amx-fp16", "avx512fp16", "fullfp16"),
}
# Linux on x86-64: the system call arch_prctl, its ARCH_REQ_XCOMP_PERM, and the component XTILEDATA.
_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18
_compiling = threading.Lock()  # models in several threads share one engine


@cache
def features() -> dict[str, bool]:
    """LLVM's names of CPU features, and whether this CPU has each.

    The environment variable SPECEXEC_CPU_WITHOUT lists prefixes of features to turn off, as in
    "avx512,amx". Kernels are then made as for a CPU without them; tests use it.
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
            # LLVM avoids 512-bit vectors on early AVX-512 CPUs, but these kernels gain from them
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
        """See `compiled`, which holds the lock."""
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
            kernel.address = address  # type: ignore[attr-defined]  # compiled code calls it
            self._kernels[symbol] = kernel
        return self._kernels[symbol]

    def _compiled(self, text: str) -> bytes:
        """The object file of a module, given as the text of its LLVM IR."""
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
    """float32 lanes of this CPU's widest vector registers: 16, 8 or 4."""
    if features().get("avx512f"):
        return 16
    return 8 if features().get("avx2") else 4


@cache
def has_dot() -> bool:
    """Whether this CPU multiplies pairs of bfloat16 in registers of 512 bits."""
    return bool(features().get("avx512bf16"))


@cache
def has_int16() -> bool:
    """Whether this CPU multiplies pairs of int16 and adds them, in its widest registers."""
    return bool(features().get({16: "avx512bw", 8: "avx2"}.get(lanes(), "")))


@cache
def quads() -> Quads | None:
    """By which instruction this CPU multiplies four bytes at a time in its widest registers; for a
    single row sdot takes smmla's place."""
    own: Mapping[int, Mapping[Quads, tuple[str, ...]]] = {
        16: {"vnni": ("avx512vnni",), "int16 sums": ("avx512bw",)},
        8: {"vnni": ("avxvnni",), "int16 sums": ("avx2",)},
        4: {"smmla": ("i8mm", "dotprod"), "sdot": ("dotprod",)},
    }
    found = (name for name, needed in own[lanes()].items() if all(map(features().get, needed)))
    return next(found, None)


@cache
def has_tiles() -> bool:
    """Whether this process can multiply tiles of bfloat16: the CPU has AMX, and the system allows
    its use."""
    named = all(features().get(name) for name in ("amx-tile", "amx-bf16", "avx512bf16"))
    return named and lanes() == 16 and _request_tiles()


def _request_tiles() -> bool:
    """Asks Linux to let this process use the tile registers; returns whether it may."""
    if platform.system() != "Linux":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA) == 0


@cache
def has_matmul(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions that multiply in a dtype of two bytes."""
    return any(features().get(name) for name in _MULTIPLY.get(dtype, ()))


def compilations() -> int:
    """How many kernels this process has compiled so far; each takes from 0.1 s to some seconds."""
    return _compiler().compilations


def compiled(kind: str, spec: object, build: Callable[[str], str]) -> Any:
    """Compiles LLVM IR to a native function `void (int64 *)`.

    The result of an earlier call is reused, also one of another process for the same CPU.

    Args:
        kind: name of the kind of kernel.
        spec: what the kernel is built for. Its repr must differ for different kernels of a kind.
        build: given a name, returns the IR of a module with a function of that name.
    Returns:
        a ctypes function with its address as attribute `address`.
    """
    with _compiling:
        return _compiler().kernel(kind, spec, build)
