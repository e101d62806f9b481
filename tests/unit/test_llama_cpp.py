"""What is said of llama.cpp's speed agrees with published figures, and follows the memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specexec_cli.catalog.registry import load_registry
from specexec_cli.planning.machine import Machine
from specexec_cli.planning.machine_rates import BANDWIDTH_SHARE
from specexec_cli.planning.sizes import ModelBytes, architecture_bytes
from specexec_cli.planning.speed import llama_cpp_tokens_per_s

GB = 10**9
DDR4, DDR5 = 40e9, 60e9  # bytes per second that two channels of DDR4-3200 and DDR5-5600 are read at
OUTSIDE_BITS = 6.6  # of an embedding or a head in a file of 4 bits, which Q6_K has
# Community reports of July and August 2026 of llama.cpp without a draft model, and the memory
# rates that the cards' makers state. A 27B is taken to be as large as Gemma-3-27B.
PUBLISHED = [
    # model, bits of a weight, GB of VRAM, its bytes per second, RAM's, tok/s from, to
    ("Qwen3-32B Q4_K_M on an RTX 4090", "qwen3-32b", 4.85, 24, 1008e9, DDR5, 35, 45),
    ("Qwen3-32B Q4 on an RTX 5070", "qwen3-32b", 4.85, 12, 672e9, DDR5, 4.4, 4.4),
    ("Gemma-3-27B Q4 on an RTX 5070", "gemma3-27b-it", 4.85, 12, 672e9, DDR5, 4.8, 4.8),
    ("Qwen3.8-27B IQ4_XS, a laptop's 8 GB", "gemma3-27b-it", 4.25, 8, 256e9, DDR5, 4.2, 4.2),
    ("Qwen3.8-27B IQ4_XS, a laptop's 12 GB", "gemma3-27b-it", 4.25, 12, 432e9, DDR5, 5.3, 5.3),
    ("Qwen3-30B-A3B on an RTX 2080", "qwen3-30b-a3b", 4.85, 8, 448e9, DDR4, 33.7, 33.7),
    ("gpt-oss-120b, experts on the CPU", "gpt-oss-120b", 16, 8, 272e9, DDR5, 18, 26),
]


def stored(name: str, bits: float) -> ModelBytes:
    """The model's sizes with so many bits a weight; 16: as it is published."""
    entry = load_registry().resolve(name)
    sizes = architecture_bytes(entry.config_json(), entry.counts())
    inside, outside = bits / 16, OUTSIDE_BITS / 16 if bits < 16 else 1.0
    experts = sizes.experts and replace(
        sizes.experts, layers=tuple(round(size * inside) for size in sizes.experts.layers)
    )
    return replace(
        sizes, layers=tuple(round(size * inside) for size in sizes.layers), experts=experts,
        resident=round(sizes.resident * outside), head=round(sizes.head * outside),
        table=round(sizes.table * outside),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "bits", "vram", "rate", "host_rate", "low", "high"),
    [case[1:] for case in PUBLISHED], ids=[case[0] for case in PUBLISHED],
)  # fmt: skip
def test_published_figures_are_met(
    name: str, bits: float, vram: int, rate: float, host_rate: float, low: float, high: float
) -> None:
    machine = Machine(
        ram_bytes=96 * GB, vram_bytes=vram * GB, memory_bytes_per_s=BANDWIDTH_SHARE * rate,
        host_bytes_per_s=host_rate,
    )  # fmt: skip
    found = llama_cpp_tokens_per_s(stored(name, bits), machine, 4096)
    assert low / 1.25 < found < high * 1.25


# docs/measured.md: two cores of a Zen 5, a wheel of llama.cpp for AVX2
@pytest.mark.parametrize(
    ("name", "bits", "measured"), [("smollm2-135m-instruct", 5, 102), ("gemma3-270m-it", 4.85, 77)]
)
def test_small_models_on_a_cpu_take_as_long_as_their_products(
    name: str, bits: float, measured: float
) -> None:
    machine = Machine(ram_bytes=16 * GB, memory_bytes_per_s=DDR4, flops=((1, 33e9), (8, 280e9)))
    found = llama_cpp_tokens_per_s(stored(name, bits), machine, 4096)
    assert measured / 1.35 < found < measured * 1.35


def test_a_cpu_whose_products_were_not_measured_is_as_fast_as_its_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine, rates = Machine(ram_bytes=16 * GB), []
    for cores in (1, 2, 64):
        monkeypatch.setattr("specexec_cli.planning.speed.usable_cores", lambda own=cores: own)
        rates.append(llama_cpp_tokens_per_s(stored("smollm2-135m-instruct", 5), machine, 4096))
    assert rates[1] == pytest.approx(2 * rates[0])
    assert rates[2] < 16 * rates[1]  # the memory is the bound of many
