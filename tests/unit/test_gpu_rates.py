"""Rates of GPUs: which card a name means, and what products of so many rows take."""

from __future__ import annotations

import pytest
from computer import Computer

from specexec_cli.device import GpuInfo
from specexec_cli.planning.machine import described_site
from specexec_cli.planning.machine_rates import (
    BANDWIDTH_SHARE,
    CARDS,
    PROBED_ROWS,
    TENSOR_SHARE,
    UNPACKING,
    GpuRates,
    card_named,
    card_of_memory,
    new_rates,
    rates_file,
    save_rates,
    tiles,
)
from specexec_cli.planning.pass_time import pass_time
from specexec_cli.planning.request import Request
from specexec_cli.planning.resolve import resolve

GB = 10**9
# 4 bits: reading takes 1 ns a weight up to 16 rows, then the products do
MEASURED = GpuRates(
    card="Card", memory_bytes_per_s=9e11, tensor_flops=1e14,
    products=(
        (0, tuple(zip(PROBED_ROWS, (4e-12, 4e-12, 4e-12, 4e-12, 8e-12), strict=True))),
        (4, tuple(zip(PROBED_ROWS, (1e-12, 1e-12, 2e-12, 4e-12, 4.5e-12), strict=True))),
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("4090", "RTX 4090"), ("rtx4060ti", "RTX 4060 Ti"), ("RTX 4060 Ti 16GB", "RTX 4060 Ti"),
        ("NVIDIA GeForce RTX 3060", "RTX 3060"), ("NVIDIA GeForce RTX 4070 Ti SUPER",
        "RTX 4070 Ti Super"), ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100"), ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"), ("NVIDIA L40S", "L40S"), ("NVIDIA RTX A6000",
        "RTX A6000"), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("stand-in", None), ("", None),
    ],
)  # fmt: skip
def test_a_name_means_a_card(name: str, card: str | None) -> None:
    found = card_named(name)
    assert (found and found.name) == card


def test_every_card_is_found_by_its_name_and_by_its_memory() -> None:
    for card in CARDS:
        assert card_named(card.name) is card
        assert card_of_memory(card.memory_bytes).memory_gb == card.memory_gb
    assert card_of_memory(1000 * GB) is CARDS[-1]
    assert [card.memory_gb for card in CARDS] == sorted(card.memory_gb for card in CARDS)


def test_rows_are_multiplied_in_tiles() -> None:
    assert [tiles(rows, packed=True) for rows in (1, 16, 17, 64, 65, 128)] == [
        [16], [16], [32], [64], [128], [128],
    ]  # fmt: skip
    assert tiles(129, packed=True) == [128, 16]
    assert tiles(300, packed=True) == [128, 128, 64]
    assert tiles(1, packed=False) == [128]
    assert tiles(129, packed=False) == [128, 128]


def test_products_take_what_was_measured() -> None:
    seconds = [MEASURED.arithmetic_seconds(1e12, rows, 4, "gptq") for rows in (*PROBED_ROWS, 257)]
    assert seconds[:5] == pytest.approx([1.0, 1.0, 2.0, 4.0, 4.5])
    assert seconds[5] == pytest.approx(9.0 * 4.5 / 5.0)
    assert MEASURED.arithmetic_seconds(1e12, 32, 4, "gptq") == pytest.approx(1 + 16 / 48)
    assert MEASURED.arithmetic_seconds(1e12, 1, 0) == pytest.approx(4.0)
    # of a width that was not measured: products, bytes, and what unpacking issues
    issued = MEASURED.instructions_per_s
    assert issued == 1e14 / TENSOR_SHARE / 4
    unmeasured = 2e12 * 16 / 1e14 + 1e12 / 9e11 + 1e12 * UNPACKING["fp8"] / issued
    assert MEASURED.arithmetic_seconds(1e12, 1, 8, "fp8") == pytest.approx(unmeasured)
    # another format than the one that was measured
    more = 1e12 * (UNPACKING["Q4_K"] - UNPACKING["gptq"]) / issued
    assert MEASURED.arithmetic_seconds(1e12, 1, 4, "Q4_K") == pytest.approx(1.0 + more)


# Microseconds of 8192 x 28672 weights with 1, 16 and 128 rows on an H100 (docs/gpu.md)
@pytest.mark.parametrize(
    ("packed_as", "bits", "one", "few", "many"),
    [
        ("gptq", 4, 96, 91, 203), ("awq", 4, 115, 110, 202), ("Q4_0", 4, 134, 131, 270),
        ("Q8_0", 8, 168, 168, 334), ("Q6_K", 8, 217, 216, 402), ("Q4_K", 4, 182, 182, 274),
        ("compressed-tensors", 8, 156, 152, 173), ("fp8", 8, 186, 184, 234),
    ],
)  # fmt: skip
def test_formats_take_what_they_took_on_an_h100(
    packed_as: str, bits: int, one: float, few: float, many: float
) -> None:
    card = card_named("H100")
    assert card is not None
    seconds = [
        card.rates.arithmetic_seconds(8192 * 28672, rows, bits, packed_as) for rows in (1, 16, 128)
    ]
    assert [1e6 * each for each in seconds[:2]] == pytest.approx([one, few], rel=0.15)
    # int8 products are faster than the share of the tensor rate that all are planned with
    assert 1e6 * seconds[2] == pytest.approx(many, rel=0.5 if bits == 8 else 0.2)


def test_a_card_that_is_not_here_is_planned_for_by_its_datasheet(computer: Computer) -> None:
    card = card_named("4090")
    assert card is not None
    site = described_site(ram_bytes=64 * GB, card=card)
    assert site.settings["vram"].value == 24 * GB
    memory, link = site.settings["memory"], site.settings["link"]
    assert (memory.value, memory.source) == (BANDWIDTH_SHARE * 1008e9, "RTX 4090's datasheet")
    assert (round(link.value / 1e9, 1), link.source) == (25.8, "PCIe 4 x16")
    plan = resolve(Request(model="qwen2.5-32b-instruct-gptq"), site).plan
    one, tree, beyond = (pass_time(plan, rows) for rows in (1, 128, 129))
    assert one.memory_s == pytest.approx(plan.memory_bytes / memory.value)
    assert beyond.memory_s == pytest.approx(2 * one.memory_s)
    weights = plan.target.active_params + plan.target.vocab * plan.target.hidden
    tensor_s = 2 * weights * 128 / (TENSOR_SHARE * 165.2e12)
    # the layers' weights are read and unpacked in turns with that; the head is not packed
    unpacking_s = plan.target.active_params * (0.5 / memory.value + UNPACKING["gptq"] / 41.3e12)
    assert tree.compute_s == pytest.approx(tensor_s + unpacking_s)
    assert one.waits_s < one.starting_s < 0.1


def test_what_was_measured_here_is_kept_and_used_for_this_card_alone(computer: Computer) -> None:
    from dataclasses import replace

    save_rates(replace(new_rates(), gpu=MEASURED), rates_file())
    computer.has_cards(GpuInfo(0, "Card", 24 * GB, 23 * GB, 4, 16, "580.1"))
    here = described_site(ram_bytes=64 * GB)
    assert here.gpu == MEASURED
    assert (here.settings["memory"].value, here.settings["memory"].source) == (9e11, "measured")
    other = described_site(ram_bytes=64 * GB, card=card_named("RTX 3090"))
    assert other.gpu is not None
    assert not other.gpu.products
    described = described_site(ram_bytes=64 * GB, vram_bytes=12 * GB)
    assert described.settings["memory"].source == "as an RTX 3060"
    computer.has_cards(GpuInfo(0, "Other", 24 * GB, 23 * GB, 4, 16, "580.1"))
    assert described_site(ram_bytes=64 * GB).settings["memory"].source == "as an RTX 3090"
