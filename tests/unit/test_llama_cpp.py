"""What is said of llama.cpp's speed agrees with published figures, and follows the memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from computer import Computer

from specexec_cli.catalog.registry import load_registry
from specexec_cli.planning import machine_rates
from specexec_cli.planning.expected_speed import verdict_of
from specexec_cli.planning.machine import Machine, described_site
from specexec_cli.planning.machine_rates import BANDWIDTH_SHARE, USUAL_CALL_S, LayerCost
from specexec_cli.planning.memory import Work
from specexec_cli.planning.pass_time import pass_time
from specexec_cli.planning.placement import place
from specexec_cli.planning.request import Request
from specexec_cli.planning.resolve import resolve
from specexec_cli.planning.sizes import ModelBytes, architecture_bytes
from specexec_cli.planning.speed import llama_cpp_tokens_per_s
from specexec_cli.planning.tiers import make_plan

GB = 10**9
DDR4, DDR5 = 40e9, 60e9  # bytes per second that two channels of DDR4-3200 and DDR5-5600 are read at
RAM_SHARE = 0.8  # of that, what products reach
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
        host_bytes_per_s=RAM_SHARE * host_rate,
    )  # fmt: skip
    found = llama_cpp_tokens_per_s(stored(name, bits), machine, 4096)
    assert low / 1.25 < found < high * 1.25


ZEN_3, ZEN_5 = 18.7e9, 40.6e9  # memory of two cores each
# Two cores each: the memory's rate, that of one row's products with 4 or 8 bits, rounded to 8 bits
# and in the dtype that sessions take (scripts/bench_kernels.py), and tokens per second behind the
# prompt, of llama.cpp (a wheel for AVX2) and here, as docs/measured.md has them ("Beside other
# programs"); 0 was not measured.
ALONE = [
    ("Zen 5, SmolLM2 Q4_1", "smollm2-135m-instruct", 5, ZEN_5, 100e9, 0, 102, 0),
    ("Zen 5, Gemma Q4_K_M", "gemma3-270m-it", 4.85, ZEN_5, 100e9, 0, 77, 0),
    ("Zen 3, SmolLM2 Q4_1", "smollm2-135m-instruct", 5, ZEN_3, 42e9, 16.5e9, 67, 47),
    ("Zen 3, Gemma Q4_K_M", "gemma3-270m-it", 4.85, ZEN_3, 42e9, 16.5e9, 43, 27),
    ("Zen 3, 8 layers of a 7B, Q4_0", "llama2-7b", 4.5, ZEN_3, 42e9, 34e9, 14.7, 12.2),
    ("Zen 3, 8 layers of a 7B, Q4_K_M", "llama2-7b", 4.85, ZEN_3, 42e9, 34e9, 14.3, 9.3),
    ("Zen 3, 8 layers of a 7B, Q8_0", "llama2-7b", 8.5, ZEN_3, 26.5e9, 24.6e9, 8.8, 8.7),
]


def test_figures_of_this_zen_3_are_those_of_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "measured.md").read_text("utf-8")
    for case in ALONE:
        if case[0].startswith("Zen 3"):
            assert f"{case[-1]} and {case[-2]})" in text, case[0]


@pytest.mark.parametrize(
    ("name", "bits", "memory", "rounding", "computing", "theirs", "ours"),
    [case[1:] for case in ALONE], ids=[case[0] for case in ALONE],
)  # fmt: skip
def test_both_columns_are_what_a_cpu_alone_reached(
    name: str, bits: float, memory: float, rounding: float, computing: float,
    theirs: float, ours: float,
) -> None:  # fmt: skip
    """From the same rates of memory and products."""
    sizes = stored(name, bits)
    if name == "llama2-7b":
        sizes = of_layers(sizes, 8)
    machine = Machine(ram_bytes=16 * GB, memory_bytes_per_s=memory, flops=((1, rounding),))
    found = llama_cpp_tokens_per_s(sizes, machine, 256)
    assert theirs / 1.35 < found < theirs * 1.35
    if ours:
        cost = LayerCost(layer_s=1.7e-3, row_s=1.4e-4, slot_s=3.2e-7, call_s=USUAL_CALL_S)
        machine = replace(machine, flops=((1, computing),), layer_cost=cost)
        plan = make_plan(sizes, None, Work(context_tokens=256), machine)
        assert ours / 1.35 < 1.0 / pass_time(plan, 1).seconds < ours * 1.35


# docs/measured.md: shares of llama.cpp's rate that one row reached here. A plan takes the least.
@pytest.mark.parametrize(
    ("bits", "measured"), [(4.5, (0.62, 0.70, 0.83)), (4.85, (0.62, 0.65)), (8.5, (0.99,))]
)
def test_where_nothing_was_measured_the_columns_are_as_far_apart_as_they_were_found(
    bits: float, measured: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_rates, "usable_cores", lambda: 64)  # memory is the bound
    machine = Machine(ram_bytes=16 * GB, memory_bytes_per_s=RAM_SHARE * DDR4)
    sizes = stored("llama2-7b", bits)
    theirs = llama_cpp_tokens_per_s(sizes, machine, 256)
    ours = 1.0 / pass_time(make_plan(sizes, None, Work(context_tokens=256), machine), 1).seconds
    assert ours / theirs == pytest.approx(min(measured), rel=0.1)
    usual = replace(machine, flops=machine_rates.steady_flops(5e11), products_assumed=True)
    plan = make_plan(sizes, None, Work(context_tokens=256), usual)
    assert 1.0 / pass_time(plan, 1).seconds == pytest.approx(ours)


def test_experts_of_a_cpu_beside_a_gpu_take_its_products_or_the_same_share() -> None:
    target = stored("gpt-oss-120b", 16)
    assert target.packed_bits == 4
    machine = Machine(ram_bytes=96 * GB, vram_bytes=8 * GB, host_bytes_per_s=RAM_SHARE * DDR4)
    n_bytes = 32 * 10**7
    assert machine.host_s(n_bytes, 0) == machine.host_s(n_bytes, 8) == pytest.approx(1e-2)
    assert machine.host_s(n_bytes, 4) == pytest.approx(1e-2 / 0.6)
    # two operations for each of 64e7 weights
    slow, fast = (replace(machine, host_flops=((1, rate),)) for rate in (64e9, 256e9))
    assert slow.host_s(n_bytes, 4) == pytest.approx(2e-2)
    assert fast.host_s(n_bytes, 4) == pytest.approx(1e-2)
    plans = [place("auto", target, None, Work(budget=0), each, "cpu") for each in (machine, slow)]
    times = [pass_time(plan, 1).host_s for plan in plans]
    assert times[1] == pytest.approx(1.2 * times[0])


def of_layers(sizes: ModelBytes, count: int) -> ModelBytes:
    share = count / len(sizes.layers)
    return replace(
        sizes, layers=sizes.layers[:count], layer_kv=sizes.layer_kv[:count],
        layer_states=sizes.layer_states[:count], kv_elements=round(sizes.kv_elements * share),
        layer_params=round(sizes.layer_params * share),
        active_params=round(sizes.active_params * share),
    )  # fmt: skip


def test_a_cpu_whose_products_were_not_measured_is_as_fast_as_its_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = stored("smollm2-135m-instruct", 5)
    machine, seconds = Machine(ram_bytes=16 * GB, memory_bytes_per_s=RAM_SHARE * DDR4), []
    for cores in (1, 2, 64):
        monkeypatch.setattr(machine_rates, "usable_cores", lambda own=cores: own)
        seconds.append(1 / llama_cpp_tokens_per_s(sizes, machine, 4096))
    products_s = 2 * (sizes.active_params + sizes.vocab * sizes.hidden) / 16e9
    assert seconds[0] - seconds[1] == pytest.approx(products_s / 2)
    assert seconds[1] - seconds[2] < products_s * (1 / 2 - 1 / 16)  # the memory is many's bound


@pytest.mark.parametrize("cores", [1, 64])
def test_a_rate_that_was_given_is_llama_cpps_too(
    cores: int, monkeypatch: pytest.MonkeyPatch, computer: Computer
) -> None:
    """Of another machine's CPU, whatever cores are here."""
    monkeypatch.setattr(machine_rates, "usable_cores", lambda: cores)
    site = described_site(ram_bytes=64 * GB, vram_bytes=0, memory_bytes_per_s=1e12, flops=2e10)
    decision = resolve(Request(model="qwen2.5-7b-instruct-gptq"), site)
    sizes = decision.target.sizes
    found = verdict_of(decision, site).llama_cpp_tokens_per_s
    products_s = 2 * (sizes.active_params + sizes.vocab * sizes.hidden) / 2e10
    assert found is not None
    assert products_s < 1.0 / found < 1.05 * products_s
