"""A mixture's plan keeps to the memory it is given, and is never slower for having more."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specexec_cli.catalog.registry import load_registry
from specexec_cli.errors import OutOfMemoryError
from specexec_cli.offload.reader import BLOCK_BYTES
from specexec_cli.planning.expected_speed import outlook, place_of, with_more_ram
from specexec_cli.planning.machine import Machine, Setting, Site
from specexec_cli.planning.memory import DoesNotFitError, Work, fixed_parts
from specexec_cli.planning.pass_time import PassTime, pass_time
from specexec_cli.planning.placement import MOST_CPU_ROWS, place, without_ssd
from specexec_cli.planning.sizes import ExpertBytes, ModelBytes, architecture_bytes
from specexec_cli.planning.tiers import Plan, make_plan

MB, GB = 10**6, 10**9
QWEN3_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "dtype": "bfloat16",
}  # fmt: skip


@st.composite
def mixtures(draw: st.DrawFn) -> ModelBytes:
    count, largest = draw(st.integers(2, 64)), draw(st.integers(10_000, 20 * MB))
    dense = draw(st.lists(st.integers(1, 200 * MB), min_size=1, max_size=12))
    own = tuple(draw(st.sampled_from([0, count * largest])) for _ in dense)
    if not any(own):
        own = (count * largest, *own[1:])
    layers = tuple(size + more for size, more in zip(dense, own, strict=True))
    experts = ExpertBytes(
        layers=own, count=count, chosen=draw(st.integers(1, count)), largest=largest
    )
    return ModelBytes(
        layers=layers, resident=draw(st.integers(0, GB)), layer_params=sum(layers) // 2 + 1,
        largest_matrix=MB, active_params=sum(dense), kv_elements=draw(st.integers(1, 100_000)),
        hidden=draw(st.integers(1, 4096)), intermediate=1000, vocab=1000, experts=experts,
    )  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelBytes, Work, Machine]:
    target = draw(mixtures())
    work = Work(context_tokens=draw(st.integers(1, 4096)), budget=draw(st.integers(0, 256)))
    fixed = sum(size for _, size in fixed_parts(target, None, work))
    room = draw(st.floats(0, 1.3)) * sum(target.layers) + draw(st.integers(0, 500 * MB))
    return target, work, Machine(ram_bytes=int((room + 500 * MB + fixed) / 0.96))


def plan_or_none(target: ModelBytes, work: Work, machine: Machine) -> Plan | None:
    try:
        return place("auto", target, None, work, machine)
    except OutOfMemoryError:
        return None


@settings(max_examples=300, deadline=None)
@given(case=cases(), more=st.integers(0, 4 * GB) | st.integers(0, 50 * MB))
def test_memory_is_kept_to_and_more_of_it_is_never_slower(
    case: tuple[ModelBytes, Work, Machine], more: int
) -> None:
    target, work, machine = case
    plan = plan_or_none(*case)
    if plan is None or plan.stays:
        return
    assert plan.peak_ram_bytes <= machine.ram_bytes
    assert len(plan.tiers) == len(target.layers)
    assert target.experts is not None
    if plan.expert_bytes:
        assert plan.expert_bytes >= 2 * target.experts.chosen * target.experts.largest
        assert ("expert cache", plan.expert_bytes) in plan.ram
    else:
        assert set(plan.tiers) == {"ram"}
        assert plan.ssd_bytes == 0
    richer = plan_or_none(target, work, replace(machine, ram_bytes=machine.ram_bytes + more))
    assert richer is not None
    assert richer.stays or richer.ssd_bytes <= plan.ssd_bytes + MB


def test_qwen3_30b_moves_experts_and_not_layers() -> None:
    target, work = architecture_bytes(QWEN3_30B), Work(context_tokens=4096, budget=0)
    assert target.experts is not None
    assert target.experts.in_all == 48 * 128
    assert sum(target.experts.layers) == 48 * 128 * 3 * 2048 * 768 * 2
    plan = place("auto", target, None, work, Machine(ram_bytes=32 * GB))
    assert set(plan.tiers) == {"ram"}
    assert 0.4 < plan.expert_bytes / sum(target.experts.layers) < 0.6
    routed = 48 * 8 * target.experts.largest
    assert plan.ssd_bytes < 0.6 * routed
    more = without_ssd(plan, None)
    assert more is not None
    assert more.ssd_bytes == more.expert_bytes == 0


def test_more_ram_beside_a_gpu_moves_experts_too() -> None:
    """Two whole layers of DeepSeek-V3 in a ring would take 23 GB of VRAM."""
    config = load_registry().models["deepseek-v3.1"].config_json()
    target, work = architecture_bytes(config), Work(context_tokens=4096, budget=0)
    machine = Machine(ram_bytes=64 * GB, vram_bytes=16 * GB)
    plan = place("auto", target, None, work, machine)
    assert plan.expert_bytes > 0 < plan.ssd_bytes
    more = without_ssd(plan, None)
    assert more is not None
    assert more.ssd_bytes == 0 < more.expert_bytes
    with pytest.raises(DoesNotFitError):
        make_plan(target, None, work, machine)


@pytest.mark.parametrize("mode", ["ssd", "ram", "none", "auto"])
def test_every_mode_places_a_mixture(mode: str) -> None:
    target, work = architecture_bytes(QWEN3_30B), Work(context_tokens=4096, budget=0)
    ram = 32 * GB if mode in ("ssd", "auto") else 300 * GB
    plan = place(mode, target, None, work, Machine(ram_bytes=ram))  # type: ignore[arg-type]
    assert (plan.expert_bytes > 0) == (mode in ("ssd", "auto"))
    if mode == "ssd":
        assert set(plan.tiers) == {"ssd"}
        assert plan.expert_bytes < 6 * GB


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_what_is_expected_of_experts_hangs_together(case: tuple[ModelBytes, Work, Machine]) -> None:
    plan = plan_or_none(*case)
    experts = case[0].experts
    if plan is None or not plan.expert_bytes or experts is None:
        return
    layers = experts.in_all // experts.count
    found = outlook(plan)
    assert [each.rows for each in found] == [1, 4, 16]
    for each in found:
        even, skewed = each.experts
        chance = 1.0 - (1.0 - experts.chosen / experts.count) ** each.rows
        assert even == pytest.approx(layers * experts.count * chance)
        assert skewed <= even * (1 + 1e-9), "rows that like the same experts ask for fewer"
        assert layers * experts.chosen <= even * (1 + 1e-9)
        for asked, held, read in zip(each.experts, each.held_share, each.ssd_bytes, strict=True):
            assert 0.0 <= held <= 1.0
            size = sum(experts.layers) / experts.in_all
            assert read == pytest.approx(asked * (1.0 - held) * size, abs=size)
    richer = with_more_ram(plan, None)
    # a model that is loaded to stay is converted, and may then be read more slowly than it was
    more_memory = [each.tokens_per_s for each in richer if each.cache_share < 1.0]
    for fewer, more in pairwise([found[0].tokens_per_s, *more_memory]):
        assert more[0] >= fewer[0] * 0.99
        assert more[1] >= fewer[1] * 0.99


def test_one_row_of_skewed_routing_finds_most_experts_in_a_quarter() -> None:
    target, work = architecture_bytes(QWEN3_30B), Work(context_tokens=4096, budget=0)
    machine = Machine(ram_bytes=22 * GB)
    plan = place("auto", target, None, work, machine)
    assert target.experts is not None
    share = plan.expert_bytes / sum(target.experts.layers)
    one, *_ = outlook(plan)
    even, skewed = one.held_share
    assert one.experts == (pytest.approx(48 * 8), pytest.approx(48 * 8))
    assert even == pytest.approx(share, abs=0.01)
    assert 2 * share < skewed < share**0.17, "a row chooses no expert twice"


@settings(max_examples=200, deadline=None)
@given(
    case=cases(),
    vram=st.integers(1, 40 * GB),
    where=st.sampled_from(["auto", "gpu", "cpu"]),
    more=st.integers(0, 4 * GB),
)
def test_beside_a_gpu_both_memories_are_kept_to(
    case: tuple[ModelBytes, Work, Machine], vram: int, where: str, more: int
) -> None:
    target, work, machine = case

    def planned(machine: Machine) -> Plan | None:
        try:
            return place("auto", target, None, work, machine, where)  # type: ignore[arg-type]
        except OutOfMemoryError:
            return None

    plan = planned(replace(machine, vram_bytes=vram))
    if plan is None:
        return
    assert plan.peak_vram_bytes <= vram
    assert plan.peak_ram_bytes <= machine.ram_bytes
    assert target.experts is not None
    if not plan.expert_bytes:
        assert plan.device_expert_bytes == 0
        return
    assert (plan.device_expert_bytes > 0) == (plan.copy_rows is not None)
    if plan.device_expert_bytes:
        assert plan.device_expert_bytes >= target.experts.largest + BLOCK_BYTES
    assert plan.expert_bytes >= 2 * target.experts.chosen * target.experts.largest
    richer = planned(replace(machine, vram_bytes=vram + more))
    assert richer is not None
    assert richer.ssd_bytes <= plan.ssd_bytes + 64 * MB or richer.expert_bytes == 0


def test_beside_a_gpu_dense_parts_come_first_and_experts_where_they_are_fastest() -> None:
    target, work = architecture_bytes(QWEN3_30B), Work(context_tokens=4096, budget=0)
    machine = Machine(ram_bytes=64 * GB, vram_bytes=16 * GB, link_bytes_per_s=20e9)

    def planned(where: str, **other: object) -> Plan:
        return place("auto", target, None, work, replace(machine, **other), where)  # type: ignore[arg-type]

    auto = planned("auto", host_bytes_per_s=50e9, host_flops=((1, 1e11),))
    assert set(auto.tiers) == {"resident"}
    assert auto.device_expert_bytes > 8 * GB
    assert 0.95 < (auto.expert_bytes + auto.device_expert_bytes) / sum(target.experts.layers) < 1.3  # type: ignore[union-attr]
    # 9.4 MB take 0.47 ms to the GPU; a row's 4.7 M products 0.09 ms
    assert auto.copy_rows == 8
    assert planned("auto", host_bytes_per_s=15e9).copy_rows == 1
    assert planned("auto", host_bytes_per_s=50e9).copy_rows == MOST_CPU_ROWS
    assert planned("gpu", host_bytes_per_s=50e9).copy_rows == 1
    cpu = planned("cpu", host_bytes_per_s=50e9)
    assert (cpu.copy_rows, cpu.device_expert_bytes) == (None, 0)
    assert planned("gpu", vram_bytes=100 * GB).expert_bytes == 0


@pytest.mark.parametrize("least", [1, 3, 8, 20, 21])
def test_experts_of_many_rows_are_as_many_as_chance_makes_them(least: int) -> None:
    experts = ExpertBytes(layers=(600, 0, 400), count=10, chosen=2, largest=60)
    rng, rows = np.random.default_rng(0), 20
    drawn = rng.random((4000, rows, 10)).argsort(2)[..., :2]
    counts = (drawn[..., None] == np.arange(10)).sum((1, 2))
    share = (counts >= least).mean()
    assert experts.asked_for(rows, least) == pytest.approx(1000 * share, rel=0.1, abs=2)
    assert experts.asked_for(0, least) == 0


def test_what_experts_of_many_rows_take_on_the_link_is_in_the_plan() -> None:
    """Those that the CPU leaves to the GPU are copied in passes that do not find them there."""
    target = architecture_bytes(QWEN3_30B)
    machine = Machine(ram_bytes=64 * GB, vram_bytes=16 * GB, link_bytes_per_s=20e9,
                      host_bytes_per_s=50e9, host_flops=((1, 1e11),))  # fmt: skip

    def link_bytes(where: str, budget: int) -> int:
        work = Work(context_tokens=4096, budget=budget)
        return place("auto", target, None, work, machine, where).link_bytes  # type: ignore[arg-type]

    assert link_bytes("cpu", 0) == link_bytes("cpu", 128) == 0
    found = [link_bytes("auto", budget) for budget in (0, 32, 128, 512)]
    assert found[0] == 0, "one row is less than eight"
    assert 0 < found[1] < found[2] < found[3]
    most = [link_bytes("gpu", budget) for budget in (0, 32, 128, 512)]
    assert all(ours < theirs for ours, theirs in zip(found, most, strict=True))
    assert found[3] > 0.9 * most[3]


def stream_s(found: PassTime) -> float:
    """Seconds of a pass without products and the rest of its layers."""
    return max(found.ssd_s, found.link_s, found.memory_s, found.host_s)


def test_a_pass_is_charged_with_its_own_rows_alone_whatever_was_planned_for() -> None:
    target = architecture_bytes(QWEN3_30B)
    machine = Machine(ram_bytes=64 * GB, vram_bytes=16 * GB, link_bytes_per_s=20e9,
                      memory_bytes_per_s=500e9, host_bytes_per_s=50e9,
                      host_flops=((1, 1e11),))  # fmt: skip
    for where in ("gpu", "auto", "cpu"):
        works = [Work(context_tokens=4096, budget=budget) for budget in (0, 512)]
        plans = [place("auto", target, None, work, machine, where) for work in works]  # type: ignore[arg-type]
        for rows in (1, 513):
            seconds = [stream_s(pass_time(plan, rows)) for plan in plans]
            # less memory is left for experts where more rows are planned for
            assert seconds[0] <= seconds[1] < 1.2 * seconds[0]
        for plan, work in zip(plans, works, strict=True):
            assert pass_time(plan, work.verify_rows).link_bytes == plan.link_bytes
    kept = place("auto", target, None, Work(budget=0), replace(machine, vram_bytes=0))
    fits = replace(machine, vram_bytes=0, ram_bytes=128 * GB, memory_bytes_per_s=20e9)
    whole = place("auto", target, None, Work(budget=0), fits)
    assert kept.expert_bytes > whole.expert_bytes == 0
    one_s, many_s = (stream_s(pass_time(whole, rows)) for rows in (1, 513))
    whole_s = target.read_bytes / fits.memory_bytes_per_s
    assert one_s < whole_s / 8, "layers that stay are not read whole"
    assert many_s == pytest.approx(whole_s, rel=0.1)


def test_where_the_cpu_is_to_compute_experts_no_whole_layer_moves() -> None:
    """Not even of a coarse mixture, nor where all of them would fit into VRAM."""
    coarse = {**QWEN3_30B, "num_experts": 8, "num_experts_per_tok": 2}
    for config, vram in ((coarse, 4 * GB), (QWEN3_30B, 100 * GB)):
        target, work = architecture_bytes(config), Work(context_tokens=4096, budget=0)
        machine = Machine(ram_bytes=128 * GB, vram_bytes=vram)
        plan = place("auto", target, None, work, machine, "cpu")
        assert (plan.copy_rows, plan.device_expert_bytes) == (None, 0)
        assert plan.expert_bytes > 0
        assert place("auto", target, None, work, machine).expert_bytes == 0


@pytest.mark.parametrize(
    ("ram", "vram", "place_of_it"), [(64, 16, "RAM"), (24, 16, "SSD"), (8, 80, "VRAM")]
)
def test_where_a_mixture_beside_a_gpu_comes_from(ram: int, vram: int, place_of_it: str) -> None:
    target, work = architecture_bytes(QWEN3_30B), Work(context_tokens=4096, budget=0)
    plan = place("auto", target, None, work, Machine(ram_bytes=ram * GB, vram_bytes=vram * GB))
    site = Site(device="cuda:0", settings={"vram": Setting(vram * GB, "given")})
    assert place_of(plan, site) == place_of_it


def test_beside_a_gpu_coarse_mixtures_move_whole_layers() -> None:
    config = {**QWEN3_30B, "num_experts": 8, "num_experts_per_tok": 2}
    target, work = architecture_bytes(config), Work(context_tokens=4096, budget=0)
    plan = place("auto", target, None, work, Machine(ram_bytes=32 * GB, vram_bytes=4 * GB))
    assert plan.expert_bytes == 0
