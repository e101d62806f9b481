"""Products of bfloat16 weights against double precision, and a row's bits being its own."""

from __future__ import annotations

import pytest
import torch
from packed import V1_4BIT, random_weight
from specexec_kernels import cpu_dot, cpu_jit, cpu_rows
from specexec_kernels.cpu_dot_stored_ir import StoredSpec, build_stored
from specexec_kernels.cpu_rows_ir import build_rows
from specexec_kernels.cpu_rows_spec import PackedSpec
from specexec_kernels.formats.gptq import Gptq
from torch import Tensor

needs_tiles = pytest.mark.skipif(not cpu_jit.has_tiles(), reason="no tiles of bfloat16")
needs_dot = pytest.mark.skipif(not cpu_jit.has_dot(), reason="no instruction for pairs of bfloat16")
# one strip and one unit; less than a block; several blocks, the last shorter
STORED_SHAPES = [(32, 32), (96, 96), (64, 608)]
PASSES = (1, 2, 3, 4, 5, 8, 13, 14, 40, 64, 129)


def rows_of(count: int, inputs: int) -> Tensor:
    generator = torch.Generator().manual_seed(inputs)
    return torch.randn(count, inputs, generator=generator).bfloat16()


def stored(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()


def weights() -> list[Tensor]:
    """(outputs, inputs) each."""
    return [stored(outputs, inputs) for outputs, inputs in STORED_SHAPES]


@needs_dot
@pytest.mark.parametrize("rows", [1, 3, 5, 13, 65])
def test_products(rows: int) -> None:
    for weight in weights():
        assert cpu_dot.supports(weight)
        x, dense = rows_of(rows, weight.shape[1]), weight.t().double()
        # a sum of n rounded products in any order is this close, with a constant well below n
        allowed = 4 * torch.finfo(torch.float32).eps * (x.double().abs() @ dense.abs())
        assert ((cpu_dot.matmul(x, weight) - x.double() @ dense).abs() <= allowed).all()


@needs_dot
def test_a_rows_bits_do_not_depend_on_the_other_rows() -> None:
    for weight in weights():
        x = rows_of(max(PASSES), weight.shape[1])
        together = cpu_dot.matmul(x, weight)
        for rows in PASSES:
            assert torch.equal(cpu_dot.matmul(x[-rows:], weight), together[-rows:])


@needs_dot
def test_more_rows_than_a_cache_has_sums_for() -> None:
    """Tiles keep the sums of 512 rows at a time, of several strips that share a panel's inputs."""
    weight, x = stored(320, 576), rows_of(1100, 576)
    together = cpu_dot.matmul(x, weight)
    for some in (slice(0, 1), slice(511, 513), slice(480, 580), slice(1024, 1100)):
        assert torch.equal(cpu_dot.matmul(x[some], weight), together[some])


@needs_dot
def test_same_bits_on_any_number_of_threads() -> None:
    before = torch.get_num_threads()
    weight = stored(640, 512)
    for rows in (1, 20, 200):
        x = rows_of(rows, 512)
        try:
            found = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found.append(cpu_dot.matmul(x, weight))
        finally:
            torch.set_num_threads(before)
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])


@needs_dot
def test_rows_may_be_a_view_that_is_not_contiguous() -> None:
    x = rows_of(64, 5).t()
    weight = stored(32, 64)
    assert torch.equal(cpu_dot.matmul(x, weight), cpu_dot.matmul(x.contiguous(), weight))


@needs_dot
def test_no_rows() -> None:
    assert cpu_dot.matmul(rows_of(0, 64), stored(32, 64)).shape[0] == 0


@needs_dot
def test_what_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = stored(32, 64)
    assert cpu_dot.supports(fits)
    assert not cpu_dot.supports(fits.half())
    assert not cpu_dot.supports(fits[:-1])
    assert not cpu_dot.supports(stored(32, 128)[:, ::2])
    assert not cpu_dot.supports(fits.to("meta"))
    monkeypatch.setattr(cpu_jit, "has_dot", lambda: False)
    assert not cpu_dot.supports(fits)


@needs_tiles
def test_tiles_sum_first_and_second_inputs_apart() -> None:
    """By the definition of the instruction, bit for bit; see cpu_tiles_ir."""
    x, weight = rows_of(3, 96), stored(32, 96)
    products = x.float()[:, None] * weight.float()[None]  # exact: 8 bits times 8 bits
    found = torch.zeros(3, 32)
    for tile in products.split(32, dim=-1):
        apart = [torch.zeros(3, 32), torch.zeros(3, 32)]
        for number, one in enumerate(tile.unbind(-1)):
            apart[number % 2] = apart[number % 2] + one
        found = found + (apart[0] + apart[1])
    assert torch.equal(cpu_dot.matmul(x, weight), found)


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
    cpu_dot.matmul(rows_of(1, 64), stored(32, 64))
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
        weight = random_weight(V1_4BIT, 128, 128, 32)
        assert not cpu_rows.form_for(torch.bfloat16).spec(1, weight).tiles
    finally:
        cpu_jit.has_tiles.cache_clear()


def test_products_in_tiles_compile_on_any_x86() -> None:
    cpu_jit.llvm.initialize_all_targets()
    cpu_jit.llvm.initialize_all_asmprinters()
    target = cpu_jit.llvm.Target.from_triple("x86_64-unknown-linux-gnu")
    machine = target.create_target_machine(cpu="sapphirerapids", opt=3)
    for rows in (1, 16, 32):
        spec = PackedSpec(Gptq(4, 128), True, rows, 2, 16, False, tiles=True)
        texts = (
            build_rows(spec, "kernel"),
            build_stored(StoredSpec(rows, 2, "tiles"), "kernel"),
        )
        for text in texts:
            module = cpu_jit.llvm.parse_assembly(text)
            module.verify()
            n_products = 4 if rows > 16 else 2
            assert machine.emit_assembly(module).count("\ttdpbf16ps\t") == n_products


def test_the_code_is_made_on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the instruction nothing is run, but the text is valid."""
    monkeypatch.setattr(cpu_jit, "has_tiles", lambda: False)
    for few in (True, False):
        spec = PackedSpec(Gptq(4, 128), True, 4, 2, 16, few)
        texts = build_rows(spec, "kernel"), build_stored(StoredSpec(13, 2, "many"), "kernel")
        for text in texts:
            assert "dpbf16ps" in text
            cpu_jit.llvm.parse_assembly(text).verify()
