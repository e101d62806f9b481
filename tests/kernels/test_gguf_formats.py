"""GGUF's block formats against the `gguf` package's own dequantize, and kernels against both."""

from collections.abc import Mapping

import gguf
import numpy as np
import pytest
import torch
from gguf_files import PACKED_KINDS, random_blocks
from specexec_kernels import cpu_jit
from specexec_kernels.cpu_matmul import matmul
from specexec_kernels.formats import base
from specexec_kernels.formats.base import PackedFormat, PackedWeight
from specexec_kernels.formats.gguf import GGUF_FORMATS

from specexec_cli.gguf.types import GGML_TYPES

# Kernels of few and many rows are the same but for what a format emits, and take a second each to
# compile: those of other formats are tried in two shapes.
IN_EVERY_SHAPE = ("Q4_0", "Q4_1", "Q8_0", "IQ4_NL", "MXFP4", "Q4_K", "Q5_K", "Q6_K")


def weight(name: str, outputs: int, inputs: int, seed: int = 0) -> PackedWeight:
    fmt = GGUF_FORMATS[name]
    kind = gguf.GGMLQuantizationType[name]
    row_bytes = inputs // fmt.unit * fmt.block_bytes
    blocks = random_blocks(kind, outputs * row_bytes, seed).reshape(outputs, row_bytes)
    return PackedWeight(fmt, inputs, outputs, {"weight": torch.from_numpy(blocks)})


def test_every_packed_type_of_a_header_has_a_format() -> None:
    packed = {each.name: each for each in GGML_TYPES.values() if each.stored_as is None}
    assert {kind.name for kind in PACKED_KINDS} == set(packed) == set(GGUF_FORMATS)
    for name, fmt in GGUF_FORMATS.items():
        sizes = packed[name].block_weights, packed[name].block_bytes
        assert (fmt.unit, fmt.block_bytes) == sizes


@pytest.mark.parametrize("name", GGUF_FORMATS)
def test_unpacked_weights_are_bit_equal_to_those_of_the_gguf_package(name: str) -> None:
    packed = weight(name, 7, 1024)
    raw = packed.tensors["weight"].numpy()
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(packed.unpack().numpy(), expected)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_what_the_gguf_package_quantizes_is_read_as_it_reads_it(name: str) -> None:
    rng = np.random.default_rng(1)
    kind = gguf.GGMLQuantizationType[name]
    raw = gguf.quants.quantize(rng.normal(size=(5, 256)).astype(np.float32), kind)
    packed = PackedWeight(GGUF_FORMATS[name], 256, 5, {"weight": torch.from_numpy(raw)})
    np.testing.assert_array_equal(packed.unpack().numpy(), gguf.quants.dequantize(raw, kind))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", ["Q5_1", "Q3_K"])
def test_what_has_no_kernel_is_unpacked_in_slabs_that_change_no_bit(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slabs of 24 outputs are no whole strips of the products, nor are the 4 that are left."""
    packed = weight(name, 100, 768)
    monkeypatch.setattr(type(packed.format), "compiled", False)
    x = torch.randn(rows, 768, generator=torch.Generator().manual_seed(0))
    whole = matmul(x, packed)
    unpacked = []
    unpack = type(packed.format).unpack

    def counted(
        fmt: PackedFormat, tensors: Mapping[str, torch.Tensor], outputs: int, inputs: int
    ) -> torch.Tensor:
        unpacked.append(outputs)
        return unpack(fmt, tensors, outputs, inputs)

    monkeypatch.setattr(base, "_AT_ONCE", 24 * 768)
    monkeypatch.setattr(type(packed.format), "unpack", counted)
    assert torch.equal(matmul(x, packed), whole)
    assert unpacked == [24, 24, 24, 24, 4]


@pytest.mark.parametrize(
    ("name", "rows"),
    [(name, rows) for name in GGUF_FORMATS for rows in (1, 3, 4, 17)
     if rows in (1, 17) or name in IN_EVERY_SHAPE],
)  # fmt: skip
def test_kernels_multiply_with_the_weights(name: str, rows: int) -> None:
    packed = weight(name, 40, 768)
    torch.manual_seed(0)
    x = torch.randn(rows, 768)
    expected = (x.double() @ packed.unpack().double().T).float()
    size = float(expected.abs().max())
    torch.testing.assert_close(matmul(x, packed), expected, rtol=0, atol=2e-6 * size)


@pytest.mark.skipif(not cpu_jit.has_dot(), reason="needs a CPU that multiplies bfloat16")
@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("name", GGUF_FORMATS)
def test_kernels_of_bfloat16_round_the_rows_and_nothing_else(name: str, rows: int) -> None:
    """Codes are exact in bfloat16 and scales stay float32."""
    packed = weight(name, 40, 768)
    torch.manual_seed(0)
    x = torch.randn(rows, 768).bfloat16()
    expected = (x.double() @ packed.unpack().double().T).float()
    size = float(expected.abs().max())
    torch.testing.assert_close(matmul(x, packed), expected, rtol=0, atol=3e-6 * size)


@pytest.mark.parametrize("name", GGUF_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_bits_are_its_own(name: str, dtype: torch.dtype) -> None:
    packed = weight(name, 48, 512)
    torch.manual_seed(0)
    x = torch.randn(19, 512).to(dtype)
    whole = matmul(x, packed)
    for rows in (1, 2, 5, 19) if name in IN_EVERY_SHAPE else (1, 19):
        assert torch.equal(matmul(x[:rows], packed), whole[:rows]), rows
