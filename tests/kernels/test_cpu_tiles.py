"""Products in AMX tile registers: how they round, and what can be tested without AMX."""

from __future__ import annotations

import pytest
import torch
from random_weights import V1_4BIT, down_weight
from specexec_kernels import cpu_jit
from specexec_kernels.cpu_matmul import matmul
from specexec_kernels.cpu_matmul_ir import build_matmul
from specexec_kernels.cpu_matmul_spec import MatmulSpec
from specexec_kernels.formats.gptq import Gptq
from specexec_kernels.formats.plain import Plain, plain_weight

needs_tiles = pytest.mark.skipif(not cpu_jit.has_tiles(), reason="no tiles of bfloat16")
FORMATS = (Gptq(4, 128), Plain("BF16"), Plain("F16"), Plain("F32"), Plain("BF16", transposed=True))


@needs_tiles
def test_tiles_sum_first_and_second_inputs_apart() -> None:
    """By the definition of the instruction, bit for bit; see cpu_tiles_ir."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 96, generator=generator).bfloat16() for n in (3, 32))
    products = x.float()[:, None] * weight.float()[None]  # exact: 8 bits times 8 bits
    found = torch.zeros(3, 32)
    for tile in products.split(32, dim=-1):
        apart = [torch.zeros(3, 32), torch.zeros(3, 32)]
        for number, one in enumerate(tile.unbind(-1)):
            apart[number % 2] = apart[number % 2] + one
        found = found + (apart[0] + apart[1])
    assert torch.equal(matmul(x, plain_weight(weight)), found)


SHAPES = """
declare void @llvm.x86.{instruction}(ptr)
define void @{name}(ptr %at) {{
  call void @llvm.x86.{instruction}(ptr %at)
  ret void
}}
"""


@needs_tiles
def test_tiles_are_left_in_the_shape_in_which_they_were_found() -> None:
    """A library may rely on the shape that it has set on this thread."""
    set_shape, get_shape = (
        cpu_jit.compiled(
            "test", name, lambda symbol, name=name: SHAPES.format(name=symbol, instruction=name)
        )
        for name in ("ldtilecfg", "sttilecfg")
    )
    before = torch.zeros(64, dtype=torch.uint8)
    before[[0, 16, 48]] = torch.tensor([1, 12, 5], dtype=torch.uint8)  # a tile of 5 rows, 3 pairs
    found = torch.zeros(64, dtype=torch.uint8)
    set_shape(before.data_ptr())
    matmul(torch.ones(1, 64).bfloat16(), plain_weight(torch.ones(32, 64).bfloat16()))
    get_shape(found.data_ptr())
    unset = torch.zeros(64, dtype=torch.uint8)
    set_shape(unset.data_ptr())
    assert torch.equal(found, before)


@needs_tiles
def test_without_leave_to_use_tiles_pairs_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_jit, "_request_tiles", lambda: False)
    cpu_jit.has_tiles.cache_clear()
    try:
        assert not cpu_jit.has_tiles()
        weight = down_weight(V1_4BIT, 128, 128, 32)
        found = matmul(torch.ones(1, 128).bfloat16(), weight)
        torch.testing.assert_close(found, weight.unpack().sum(1)[None], rtol=1e-5, atol=1e-3)
    finally:
        cpu_jit.has_tiles.cache_clear()


def test_products_in_tiles_compile_on_any_x86() -> None:
    cpu_jit.llvm.initialize_all_targets()
    cpu_jit.llvm.initialize_all_asmprinters()
    target = cpu_jit.llvm.Target.from_triple("x86_64-unknown-linux-gnu")
    machine = target.create_target_machine(cpu="sapphirerapids", opt=3)
    for fmt in FORMATS:
        for rows in (1, 16, 32):
            spec = MatmulSpec(fmt, True, rows, vectors=2, lanes=16, mode="tiles")
            module = cpu_jit.llvm.parse_assembly(build_matmul(spec, "kernel"))
            module.verify()
            n_products = 4 if rows > 16 else 2
            assert machine.emit_assembly(module).count("\ttdpbf16ps\t") == n_products


@pytest.mark.parametrize("mode", ["few", "many"])
def test_the_code_is_made_on_any_machine(mode: str) -> None:
    """Without the instruction nothing is run, but the text is valid."""
    for fmt in FORMATS:
        text = build_matmul(MatmulSpec(fmt, True, 4, 2, 16, mode), "kernel")
        assert "dpbf16ps" in text
        cpu_jit.llvm.parse_assembly(text).verify()
