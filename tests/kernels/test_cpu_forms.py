"""The kernels as other CPUs run them: AVX2 on any x86, and NEON as far as a compiler can tell."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from llvmlite import binding as llvm
from other_cpu import other_cpu
from random_weights import FORMATS
from specexec_kernels import cpu_jit, cpu_matmul_ir, cpu_matmul_many, cpu_recurrence_ir
from specexec_kernels.cpu_matmul_plan import rounds_rows
from specexec_kernels.cpu_matmul_spec import MatmulSpec
from specexec_kernels.cpu_recurrence_ir import RecurrenceSpec
from specexec_kernels.formats.plain import Plain

HERE = Path(__file__).parent
# Everything about products and attention that does not ask for a certain width of registers.
NARROW = (
    "test_plain_weights.py", "test_down_formats.py", "test_cpu_attention.py", "test_formats.py",
    "test_cpu_int16.py", "test_cpu_int8.py",
)  # fmt: skip
REPORT = """
from specexec_kernels import cpu_jit
print(cpu_jit.lanes(), cpu_jit.has_dot(), cpu_jit.features()["avx512f"])
"""


def python(*args: str, without: str) -> str:
    ran = subprocess.run(
        [sys.executable, *args], env={**os.environ, "SPECEXEC_CPU_WITHOUT": without},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="AVX2 is of x86")
def test_the_avx2_form_on_any_x86() -> None:
    """As on a CPU without AVX-512: the same tests, in registers of 256 bits."""
    assert python("-c", REPORT, without="avx512,amx").split() == ["8", "False", "False"]
    tests = [str(HERE / name) for name in NARROW]
    tests.append(str(HERE.parent / "unit" / "test_recurrence.py"))
    said = python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests,
        # heads of 128 do; what no kernel does is the same; 8 lanes are this CPU's own now; and a
        # few formats of integers show that the instructions are those of AVX2
        "-k", "not 256 and not unpacking and not narrower and not whole_numbers "
        "and not rounded_rows",
        without="avx512,amx,avxvnni",
    )  # fmt: skip
    assert " passed" in said


@pytest.mark.skipif(not cpu_jit.has_tiles(), reason="no tiles of bfloat16")
def test_the_pairs_of_a_cpu_without_tiles() -> None:
    """As on a CPU with AVX512-BF16 and without AMX: the same tests, by vdpbf16ps."""
    assert python("-c", REPORT, without="amx").split() == ["16", "True", "True"]
    names = ("test_plain_weights.py", "test_formats.py", "test_down_formats.py")
    tests = [str(HERE / name) for name in names]
    said = python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests,
        # every form of weights, and that a row's bits are its own
        "-k", "plain_weights or (product_is and bfloat16) or (down_formats and not narrower)",
        without="amx",
    )  # fmt: skip
    assert " passed" in said


def neon(text: str, features: str = "") -> str:
    """Assembly of a kernel for 64-bit Arm, with features that not all such CPUs have."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple("aarch64-linux-gnu")
    machine = target.create_target_machine(cpu="neoverse-n1", features=features, opt=3)
    module = llvm.parse_assembly(text)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return str(machine.emit_assembly(module))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_the_neon_form_of_plain_weights(dtype: str, transposed: bool) -> None:
    spec = MatmulSpec(Plain(dtype, transposed), False, rows=13, vectors=2, lanes=4, mode="many")
    # sums of 13 rows stay in registers: each is multiplied and added, by number of the lane
    assert neon(cpu_matmul_ir.build_matmul(spec, "kernel")).count("fmla\t") >= 13 * 2


@pytest.mark.parametrize(
    "name", ["fp8-block", "nvfp4", "int4-zeros", "nf4-nested", "gptq-4", "awq"]
)
def test_the_neon_form_of_packed_weights(name: str) -> None:
    fmt = FORMATS[name]
    for mode in ("few", "many"):
        vectors = (4 if fmt.goes_down else 1) if mode == "few" else 2
        spec = MatmulSpec(fmt, False, 4, vectors, 4, mode)
        assembly = neon(cpu_matmul_ir.build_matmul(spec, "kernel"))
        # of few rows all products of a unit are written out, of more those of an unrolled turn
        turn = min(fmt.unit, fmt.block) if mode == "few" else cpu_matmul_many.UNROLL
        assert assembly.count("fmla\t") >= 4 * vectors * turn
        assert "prfm" in assembly


@pytest.mark.parametrize("name", ["int4-group", "gptq-4"])
@pytest.mark.parametrize("quads", ["sdot", "smmla"])
def test_the_neon_form_of_rows_in_8_bits(name: str, quads: Literal["sdot", "smmla"]) -> None:
    for mode in ("few", "many"):
        spec = MatmulSpec(FORMATS[name], False, 4, 1, 4, mode, whole=8, quads=quads)
        assembly = neon(cpu_matmul_ir.build_matmul(spec, "kernel"), "+i8mm")
        # 4 rows times the quads of a unit, or those of an unrolled turn, two by two with smmla
        products = 4 * min(spec.unit_items, cpu_matmul_many.UNROLL)
        assert assembly.count(f"{quads}\t") >= (products if quads == "sdot" else products // 2)


@pytest.mark.parametrize("decay_dims", [0, 1, 2])
@pytest.mark.parametrize("corrects", [False, True])
def test_the_neon_form_of_a_recurrence(corrects: bool, decay_dims: int) -> None:
    """A row's output and what it writes, and where rows correct what the state answers to a key."""
    spec = RecurrenceSpec(blocks=4, vectors=2, lanes=4, corrects=corrects, decay_dims=decay_dims)
    assembly = neon(cpu_recurrence_ir.build(spec, "kernel"))
    sums = 3 if corrects else 2
    assert assembly.count("fmla\t") == sums * spec.vectors * cpu_recurrence_ir.UNROLL


def test_formats_whose_rows_neon_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """All whose codes a register of four lanes reads."""
    other_cpu(monkeypatch, lanes=4, quads="sdot")
    monkeypatch.setattr(cpu_jit, "has_int16", lambda: False)
    rounding = {name for name, fmt in FORMATS.items() if rounds_rows(fmt)}
    assert {"int4-group", "gptq-4", "gptq-3", "gptq-8", "int8-group", "awq"} <= rounding
    for name in rounding:
        spec = MatmulSpec(FORMATS[name], False, 1, 1, 4, "few", whole=8, quads="sdot")
        assert "sdot" in cpu_matmul_ir.build_matmul(spec, "kernel")
