"""The dtype that `auto` computes in, on CPUs with and without instructions for bfloat16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import byte_llama, edit_json, save_checkpoint
from computer import Computer
from gguf import GGMLQuantizationType as Kind
from gguf_files import all_of, write_gguf
from quantized_checkpoints import save_quantized
from specexec_kernels.cpu_matmul_plan import has_halves
from specexec_kernels.formats.gguf import GGUF_FORMATS

from specexec_cli.device import cpu_info
from specexec_cli.errors import ConfigError
from specexec_cli.gguf.types import INTEGER_TYPES
from specexec_cli.planning import dtype_choice
from specexec_cli.planning.dtype_choice import calibrated_for, eight_bit_gain
from specexec_cli.planning.machine import Setting, Site
from specexec_cli.planning.machine_rates import FlopsByRows, LayerCost, cpu_key
from specexec_cli.planning.request import Request
from specexec_cli.planning.resolve import Decision, resolve

AVX2 = ("avx2",)


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toys are no small models."""
    monkeypatch.setattr(dtype_choice, "SMALL_MODEL_BYTES", 1)


def site() -> Site:
    rates = {"ram": 1 << 33, "vram": 0, "ssd": 2e9, "link": 2e10, "memory": 1e10}
    return Site(
        device="cpu",
        settings={name: Setting(value, "given") for name, value in rates.items()},
        program_bytes=0,
    )


def decided(model: Path, where: Site | None = None, **asked: Any) -> Decision:
    asked = {"method": "autoregressive", "context_tokens": 64, **asked}
    return resolve(Request(model=str(model), **asked), where or site())


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [(AVX2, "bfloat16"), ((*AVX2, "avx512f", "avx512bw"), "bfloat16"),
     ((*AVX2, "avx512f"), "float32"), ((), "float32"), ((*AVX2, "avx512_bf16"), "bfloat16")],
)  # fmt: skip
def test_packed_integers_have_rows_of_bfloat16_where_the_cpu_multiplies_int16(
    flags: tuple[str, ...], dtype: str, tmp_path: Path, computer: Computer
) -> None:
    computer.has_cpu("A CPU", *flags)
    _, packed = save_quantized(tmp_path)
    found = decided(packed)
    assert found.dtype == dtype
    by_int16 = dtype == "bfloat16" and "avx512_bf16" not in flags
    assert ("int16" in found.dtype_reason) == by_int16
    assert decided(packed, dtype="float32").dtype == "float32"


def test_small_models_are_multiplied_in_float32_on_any_cpu(
    tmp_path: Path, computer: Computer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtype_choice, "SMALL_MODEL_BYTES", 10**9)
    _, packed = save_quantized(tmp_path)
    for flags in ((), AVX2, (*AVX2, "avx512_bf16")):
        computer.has_cpu("A CPU", *flags)
        assert decided(packed).dtype == "float32"


def test_kept_rates_decide(tmp_path: Path, computer: Computer) -> None:
    """By all numbers of rows that both dtypes were measured at."""
    computer.has_cpu("A CPU", *AVX2)
    _, packed = save_quantized(tmp_path)
    ours = ((1, 2e9), (32, 1e10), (128, 1.0))
    for rate, dtype, times in ((5e9, "bfloat16", "2.00"), (4e10, "float32", "0.71")):
        kept = {"bfloat16, 4 bits": ours, "float32, 4 bits": ((1, 1e9), (32, rate))}
        found = decided(packed, replace(site(), flops=kept))
        assert found.dtype == dtype
        assert f"{times} times" in found.dtype_reason


def test_rows_in_8_bits_are_refused_where_nothing_multiplies_them(
    tmp_path: Path, computer: Computer
) -> None:
    _, packed = save_quantized(tmp_path)
    computer.has_cpu("A CPU", *AVX2)
    assert decided(packed, activations="8bit").activations == "8bit"
    computer.has_cpu("A CPU")
    with pytest.raises(ConfigError, match="needs AVX2 or Arm's dot products"):
        decided(packed, activations="8bit")
    with pytest.raises(ConfigError, match="and cuda:0 computes here"):
        decided(packed, replace(site(), device="cuda:0"), activations="8bit-draft")


def test_a_worker_knows_each_arithmetic_that_a_session_may_ask_of_it(
    tmp_path: Path, computer: Computer, monkeypatch: pytest.MonkeyPatch
) -> None:
    computer.has_cpu("A CPU", *AVX2)
    asked, cost = list[tuple[str, int, bool]](), LayerCost(layer_s=1e-3, row_s=0.0, slot_s=0.0)

    def calibrate(dtype: str, bits: int, rounds: bool) -> tuple[FlopsByRows, LayerCost]:
        asked.append((dtype, bits, rounds))
        return ((1, 1e9),), cost

    here = replace(site(), calibrate=calibrate)
    plain, packed = (decided(each).target for each in save_quantized(tmp_path))
    known = calibrated_for(here, packed)
    assert {*known.flops} == {"float32, 4 bits", "bfloat16, 4 bits", "8-bit rows, 4 bits"}
    assert {*calibrated_for(here, plain).flops} == {"float32", "bfloat16"}
    both = [("float32", 4, False), ("bfloat16", 4, False)]
    assert asked == [*both, ("float32", 4, True), *((dtype, 0, False) for dtype, *_ in both)]
    monkeypatch.setattr(dtype_choice, "SMALL_MODEL_BYTES", 10**9)
    assert calibrated_for(here, packed) is here


def test_what_rows_in_8_bits_would_bring(tmp_path: Path) -> None:
    plain, packed = save_quantized(tmp_path)
    kept = {"8-bit rows, 4 bits": ((1, 3e9), (32, 3e10)), "float32, 4 bits": ((1, 1e9), (32, 1e10))}
    target = decided(packed).target
    known = replace(site(), flops=kept)
    assert eight_bit_gain(known, "float32", target) == "3.00 times as fast here"
    assert "`specexec doctor` measures it" in eight_bit_gain(site(), "float32", target)
    assert not eight_bit_gain(known, "float32", decided(plain).target)
    assert not eight_bit_gain(replace(known, device="cuda:0"), "float32", target)
    asked = decided(packed, known, activations="8bit", dtype="float32")
    assert asked.machine.flops == kept["8-bit rows, 4 bits"]


def test_gguf_files_by_the_type_of_most_bytes(tmp_path: Path, computer: Computer) -> None:
    computer.has_cpu("A CPU", *AVX2)
    model = save_checkpoint(tmp_path / "plain", byte_llama(hidden_size=64, num_hidden_layers=1))
    for kind, dtype in ((Kind.Q4_0, "bfloat16"), (Kind.IQ4_NL, "float32"), (Kind.F16, "float32")):
        file = write_gguf(model, tmp_path / f"{kind.name}.gguf", all_of(kind))
        assert decided(file).dtype == dtype


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"quant_method": "gptq", "bits": 4, "desc_act": False}, "bfloat16"),
        ({"quant_method": "gptq", "bits": 4, "desc_act": True}, "float32"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bfloat16"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "float32"),
        ({"quant_method": "fp8"}, "float32"),
        ({"quant_method": "compressed-tensors", "config_groups":
          {"0": {"weights": {"type": "int", "num_bits": 4}}}}, "bfloat16"),
        ({"quant_method": "compressed-tensors", "config_groups":
          {"0": {"weights": {"type": "int", "num_bits": 4, "actorder": "group"}}}}, "float32"),
        ({"quant_method": "compressed-tensors", "config_groups":
          {"0": {"weights": {"type": "float", "num_bits": 8}}}}, "float32"),
    ],
)  # fmt: skip
def test_what_config_json_says_of_codes(
    settings: dict[str, object], dtype: str, tmp_path: Path, computer: Computer
) -> None:
    computer.has_cpu("A CPU", *AVX2)
    _, packed = save_quantized(tmp_path)
    edit_json(packed / "config.json", quantization_config=settings)
    assert decided(packed).dtype == dtype


def test_types_of_integers_are_those_that_kernels_multiply_as_int16() -> None:
    whole = {
        name for name, fmt in GGUF_FORMATS.items()
        if fmt.zero is not None and not fmt.index and has_halves(fmt.block)
    }  # fmt: skip
    assert whole == INTEGER_TYPES


def test_instructions_that_are_turned_off_are_not_there(
    computer: Computer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By LLVM's names, as kernels take them; rates of such a CPU are another's."""
    computer.has_cpu("A CPU", "avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile")
    key = cpu_key()
    monkeypatch.setenv("SPECEXEC_CPU_WITHOUT", "avx512,amx-")
    assert cpu_info().flags == ("avx2",)
    assert cpu_key() != key
    monkeypatch.setenv("SPECEXEC_CPU_WITHOUT", "avx512bf16")
    assert cpu_info().flags == ("avx2", "avx512f", "amx_tile", "amx_bf16")
