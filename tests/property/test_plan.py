"""The planner never uses more memory than it is given, and is never slower for having more."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specexec_cli.cli.mends import with_mend
from specexec_cli.device import HUGE_PAGE_BYTES
from specexec_cli.errors import ConfigError, OutOfMemoryError
from specexec_cli.offload.slabs import SLAB_BYTES
from specexec_cli.planning.machine import Machine
from specexec_cli.planning.machine_rates import GpuRates, LayerCost, most_rows, product_seconds
from specexec_cli.planning.memory import (
    GPU_LIBRARY_BYTES,
    STEP_ROWS,
    DoesNotFitError,
    Work,
    activation_bytes,
    fixed_parts,
    gpu_parts,
)
from specexec_cli.planning.pass_time import PassTime, knee_rows, pass_time
from specexec_cli.planning.placement import place
from specexec_cli.planning.sizes import ModelBytes, architecture_bytes
from specexec_cli.planning.tiers import Plan, make_plan, spread_order

MB, GB = 10**6, 10**9
FLOPS = ((1, 5e9), (16, 40e9), (64, 90e9), (256, 100e9))


@st.composite
def models(draw: st.DrawFn) -> ModelBytes:
    size = st.integers(1, 900 * MB)
    layers = draw(
        st.lists(size, min_size=1, max_size=40)
        | st.tuples(size, st.integers(1, 40)).map(lambda pair: [pair[0]] * pair[1])
    )
    params = sum(layers) // 2 + 1
    return ModelBytes(
        layers=tuple(layers), resident=draw(st.integers(0, 2 * GB)), layer_params=params,
        largest_matrix=draw(st.integers(1, 300 * MB)),
        active_params=params, kv_elements=draw(st.integers(1, 400_000)),
        hidden=draw(st.integers(1, 8192)), intermediate=draw(st.integers(1, 30_000)),
        vocab=draw(st.integers(1, 200_000)),
    )  # fmt: skip


works = st.builds(
    Work,
    context_tokens=st.integers(1, 8192),
    budget=st.integers(0, 1024),
    item_bytes=st.sampled_from([2, 4]),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelBytes, ModelBytes, Work, Machine]:
    """A target and machines that hold from nearly nothing of its layers to all of them."""
    target, draft, work = draw(models()), draw(models()), draw(works)
    fixed = sum(size for _, size in fixed_parts(target, draft, work))
    beside_vram = sum(size for _, size in gpu_parts(target, draft, work))
    layers = sum(target.layers)

    def memory() -> int:
        room = draw(st.floats(0, 1.2)) * layers + draw(st.integers(0, 6)) * max(target.layers)
        return int(room) + draw(st.integers(0, 20 * MB))

    on_gpu = draw(st.booleans())
    vram = int((memory() + beside_vram) / 0.96) if on_gpu else 0
    ram = int((memory() + 500 * MB + (SLAB_BYTES if on_gpu else fixed)) / 0.96)
    # beside a GPU often with what stays unpinned, and often too little for that
    ram += draw(st.sampled_from([0, 4 * GB, 6 * GB])) if on_gpu else 0
    machine = Machine(
        ram_bytes=ram, vram_bytes=vram,
        ssd_bytes_per_s=draw(st.floats(1e8, 1e10)), link_bytes_per_s=draw(st.floats(1e9, 6e10)),
        flops=draw(st.sampled_from([(), FLOPS])),
    )  # fmt: skip
    return target, draft, work, machine


def plan_or_none(case: tuple[ModelBytes, ModelBytes, Work, Machine]) -> Plan | None:
    try:
        return make_plan(*case)
    except OutOfMemoryError:
        return None


def small_model(*layers: int) -> ModelBytes:
    return ModelBytes(
        layers=layers, resident=0, layer_params=sum(layers) // 2 + 1, largest_matrix=1,
        active_params=1, kv_elements=1, hidden=1, intermediate=1, vocab=1,
    )  # fmt: skip


# Of the layers the large one alone stays, and a ring that it went through would be too large.
UNEVEN = (
    small_model(29360129, 1, 2097151, 2097152),
    small_model(1),
    Work(context_tokens=1, budget=0),
    Machine(ram_bytes=641303806),
)


@example(case=UNEVEN)
@settings(max_examples=400, deadline=None)
@given(case=cases())
def test_memory_is_never_exceeded_and_every_layer_is_placed(
    case: tuple[ModelBytes, ModelBytes, Work, Machine],
) -> None:
    target, draft, work, machine = case
    plan = plan_or_none(case)
    if plan is None:
        return
    assert plan.peak_ram_bytes <= machine.ram_bytes
    assert plan.peak_vram_bytes <= machine.vram_bytes
    assert len(plan.tiers) == len(target.layers)

    def layers(*tiers: str) -> list[int]:
        return [size for size, tier in zip(target.layers, plan.tiers, strict=True) if tier in tiers]

    # counted again by hand: what lies in RAM and VRAM at the same time
    fixed = sum(size for _, size in fixed_parts(target, draft, work))
    ring = plan.ssd_buffers * max(layers("ssd"), default=0)
    on_gpu = machine.vram_bytes > 0
    held = sum(layers("ram")) + ring + machine.base_bytes + (SLAB_BYTES if on_gpu else fixed)
    pages = HUGE_PAGE_BYTES * (len(target.layers) + 3)
    assert held <= plan.peak_ram_bytes <= held + pages
    if on_gpu:
        streamed = sum(layers("ram"))  # a ring of two buffers is needed, layers in RAM are not
        assert not streamed or plan.peak_ram_bytes <= machine.ram_bytes - max(
            4 * GB, machine.ram_bytes // 10
        )
        ring = plan.device_buffers * max(layers("ssd", "ram"), default=0)
        assert sum(layers("resident")) + ring + fixed <= plan.peak_vram_bytes
        assert plan.link_bytes == sum(layers("ssd", "ram"))
    else:
        assert not layers("resident")
        assert plan.link_bytes == 0
    assert plan.ssd_bytes == sum(layers("ssd"))
    assert plan.ssd_buffers in ((2, 3) if layers("ssd") else (0,))
    assert plan.device_buffers in ((2, 3) if on_gpu and layers("ssd", "ram") else (0,))
    assert usual_pass(plan).seconds >= plan.ssd_bytes / machine.ssd_bytes_per_s


@settings(max_examples=400, deadline=None)
@given(
    case=cases(),
    more_ram=st.integers(0, 8 * GB) | st.integers(0, 50 * MB),
    more_vram=st.integers(0, 8 * GB) | st.integers(0, 50 * MB),
)
def test_more_memory_never_predicts_a_slower_pass(
    case: tuple[ModelBytes, ModelBytes, Work, Machine], more_ram: int, more_vram: int
) -> None:
    plan = plan_or_none(case)
    if plan is None:
        return
    target, draft, work, machine = case
    richer = replace(machine, ram_bytes=machine.ram_bytes + more_ram)
    if machine.vram_bytes:
        richer = replace(richer, vram_bytes=machine.vram_bytes + more_vram)
    better = make_plan(target, draft, work, richer)
    assert usual_pass(better).seconds <= usual_pass(plan).seconds
    assert better.ssd_bytes <= plan.ssd_bytes


@settings(max_examples=100, deadline=None)
@given(case=cases(), each=st.integers(1, 20_000), share=st.floats(0, 1))
def test_keys_and_values_wait_in_ram_where_nothing_fits_otherwise(
    case: tuple[ModelBytes, ModelBytes, Work, Machine], each: int, share: float
) -> None:
    target, draft, work, machine = case
    if not machine.vram_bytes:
        return
    layers = len(target.layers)
    unknown = replace(target, kv_elements=each * layers)
    known = replace(unknown, layer_kv=(each,) * layers)
    kept = each * layers * work.slots * work.item_bytes
    machine = replace(
        machine, ram_bytes=machine.ram_bytes + kept,
        vram_bytes=machine.vram_bytes + int(share * kept),
    )  # fmt: skip
    plan = plan_or_none((known, draft, work, machine))
    without = plan_or_none((unknown, draft, work, machine))
    read = plan_or_none((known, draft, replace(work, reads_keys=True), machine))
    assert read is None or not read.kv_layers, "a head reads them in each of its steps"
    if without is not None:
        assert plan == replace(without, target=known)
    elif plan is not None:
        assert plan.kv_layers
        assert plan.peak_ram_bytes <= machine.ram_bytes
        assert plan.peak_vram_bytes <= machine.vram_bytes
        waiting = kept // layers * len(plan.kv_layers)
        assert waiting <= dict(plan.ram)["keys and values"]
        moved = plan.link_bytes + waiting // 2
        assert usual_pass(plan).seconds >= moved / machine.link_bytes_per_s * 0.999


def test_as_many_keys_wait_as_let_the_slower_link_be_done_first() -> None:
    each = 2 * 4096
    target = replace(LLAMA_7B, layer_kv=(each,) * 32, kv_elements=each * 32)
    machine = Machine(ram_bytes=16 * GB, vram_bytes=8 * GB)
    slow, fast = (
        make_plan(target, None, Work(context_tokens=16384), replace(machine, ssd_bytes_per_s=rate))
        for rate in (1e8, 1e12)
    )
    assert slow.ssd_bytes < fast.ssd_bytes
    assert fast.link_bytes + fast.kv_link_bytes < slow.link_bytes + slow.kv_link_bytes


def test_keys_that_layers_share_do_not_wait_beside_recurrent_layers_either() -> None:
    kv = (0, *[2 * 4096] * 31)
    hybrid = replace(LLAMA_7B, layer_kv=kv, kv_elements=sum(kv), state_elements=1000)
    machine, work = Machine(ram_bytes=32 * GB, vram_bytes=6 * GB), Work(context_tokens=16384)
    assert make_plan(hybrid, None, work, machine).kv_layers
    with pytest.raises(DoesNotFitError):
        make_plan(replace(hybrid, shares_keys=True), None, work, machine)


@given(case=cases(), each=st.integers(1_000, 20_000))
def test_what_is_lacking_is_told_with_keys_and_values_in_ram(
    case: tuple[ModelBytes, ModelBytes, Work, Machine], each: int
) -> None:
    target, draft, work, machine = case
    layers = len(target.layers)
    known = replace(target, kv_elements=each * layers, layer_kv=(each,) * layers)
    tiny = replace(machine, vram_bytes=1_000_000, ram_bytes=1 << 50)
    with pytest.raises(DoesNotFitError) as raised:
        make_plan(known, draft, work, tiny)
    assert dict(raised.value.parts)["target's KV cache"] == each * work.slots * work.item_bytes


@given(count=st.integers(1, 130), first=st.integers(0, 130))
def test_layers_that_stay_are_spread_evenly(count: int, first: int) -> None:
    order = list(spread_order(count))
    assert sorted(order) == list(range(count))
    chosen = sorted(order[: min(first, count)])
    if 1 < len(chosen) <= count // 2:
        gaps = [b - a for a, b in pairwise(chosen)]
        assert min(gaps) > 1  # no two neighbours stay while others are streamed
        assert max(gaps) <= 2 * min(gaps) + 1


@given(
    weights=st.integers(1, 10**11),
    rates=st.lists(st.floats(1e8, 1e15), max_size=6),
    stream_s=st.floats(0, 1000),
    rows=st.integers(1, 4000),
)
def test_the_knee_is_the_last_row_that_hides(
    weights: int, rates: list[float], stream_s: float, rows: int
) -> None:
    flops = tuple((4**index, rate) for index, rate in enumerate(rates))

    def seconds(count: int) -> float:
        return product_seconds(weights, count, flops)

    assert seconds(rows) <= seconds(rows + 1)
    knee = most_rows(seconds, stream_s)
    assert seconds(knee) <= stream_s
    assert knee == 4096 or seconds(knee + 1) > stream_s


LLAMA_7B_CONFIG = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000,
}  # fmt: skip
LLAMA_7B = architecture_bytes(LLAMA_7B_CONFIG)


def usual_pass(plan: Plan) -> PassTime:
    """A pass of the rows that memory is planned for."""
    return pass_time(plan, plan.work.verify_rows)


def test_the_knee_of_a_7b_from_the_ssd() -> None:
    """shared measurement: 4.1 GB/s and 500-720 GFLOP/s of bf16 hide about 165 rows."""
    machine = Machine(
        ram_bytes=4 * GB, ssd_bytes_per_s=4.1e9, memory_bytes_per_s=2e10,
        flops=((1, 15e9), (16, 200e9), (64, 500e9), (128, 690e9), (256, 720e9)),
    )  # fmt: skip
    plan = make_plan(LLAMA_7B, None, Work(context_tokens=512, budget=64), machine)
    assert plan.tiers.count("ssd") >= 30
    assert usual_pass(plan).bottleneck == "ssd"
    assert knee_rows(plan) == pytest.approx(165, rel=0.1)
    assert usual_pass(plan).seconds == pytest.approx(plan.ssd_bytes / 4.1e9)


def test_the_knee_counts_all_of_a_pass() -> None:
    """4 bits on a CPU with AMX, where products alone would hide 175 rows and passes hid 106."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    target = architecture_bytes({**LLAMA_7B_CONFIG, "quantization_config": config})
    machine = Machine(
        ram_bytes=4 * GB, ssd_bytes_per_s=2.1e9, memory_bytes_per_s=2e10,
        flops=((1, 2e10), (128, 1.4e12), (256, 1.4e12)),
    )  # fmt: skip
    work = Work(context_tokens=512, budget=64)

    def knee(cost: LayerCost | None) -> int:
        plan = place("ssd", target, None, work, replace(machine, layer_cost=cost))
        found = knee_rows(plan)
        assert found is not None
        times = [pass_time(plan, rows).seconds for rows in (1, found, found + 1)]
        assert times[0] == times[1] < times[2]
        return found

    products = knee(LayerCost(0.0, 0.0, 0.0))
    assert products == pytest.approx(175, rel=0.05)
    assert knee(LayerCost(layer_s=1e-3, row_s=7e-5, slot_s=2e-7)) == pytest.approx(106, rel=0.05)
    assert knee(None) < products, "Python's share is assumed where nothing was measured"


def test_a_layer_costs_more_for_wider_layers_more_rows_and_longer_texts() -> None:
    cost = LayerCost(layer_s=1e-3, row_s=1e-4, slot_s=1e-6)
    assert cost.seconds(4096, 11008, 10, 100) == pytest.approx(1e-3 + 10 * (1e-4 + 100e-6))
    assert cost.seconds(8192, 22016, 10, 100) == pytest.approx(1e-3 + 10 * (2e-4 + 200e-6))


def test_a_third_slot_is_not_bought_with_layers() -> None:
    """Small layers stay beside two slots; memory for three slots must not push them out."""
    order = spread_order(8)
    layers = [0] * 8
    for rank, index in enumerate(order):
        layers[index] = 50 * MB if rank < 4 else 500 * MB
    target = replace(LLAMA_7B, layers=tuple(layers), resident=0)
    needed = sum(size for _, size in fixed_parts(target, None, Work())) + 500 * MB
    counts = []
    for room in range(1100 * MB, 2300 * MB, 50 * MB):
        machine = Machine(ram_bytes=int((needed + room) / 0.96))
        counts.append(make_plan(target, None, Work(), machine).tiers.count("ram"))
    assert counts == sorted(counts)
    assert 3 in counts


def test_what_does_not_fit_says_what_to_lower() -> None:
    work = Work(context_tokens=2048)
    with pytest.raises(OutOfMemoryError, match=r"needs 2\.\d GB of RAM but 960 MB ") as error:
        make_plan(LLAMA_7B, None, Work(context_tokens=512), Machine(ram_bytes=GB))
    assert "smaller or quantized model" in with_mend(error.value)
    with pytest.raises(OutOfMemoryError, match=r"of RAM .*draft model 13") as error:
        make_plan(LLAMA_7B, LLAMA_7B, work, Machine(ram_bytes=10 * GB))
    assert "--draft" in with_mend(error.value)
    machine = Machine(ram_bytes=64 * GB, vram_bytes=16 * GB)
    with pytest.raises(OutOfMemoryError, match=r"of RAM .*\(keys and values 105 GB") as error:
        make_plan(LLAMA_7B, None, Work(context_tokens=200_000), machine)
    assert "--max-tokens" in with_mend(error.value)


def test_packed_weights_need_room_for_one_unpacked_matrix() -> None:
    """Passes of many rows unpack a matrix before they multiply; 16-bit weights need none."""
    packed = replace(LLAMA_7B, layers=tuple(size // 4 for size in LLAMA_7B.layers))
    machine = Machine(ram_bytes=64 * GB, vram_bytes=8 * GB)
    parts = [dict(make_plan(target, None, Work(), machine).vram) for target in (LLAMA_7B, packed)]
    assert "one converted matrix" not in parts[0]
    assert parts[1]["one converted matrix"] == 4096 * 11008 * 2


def test_a_packed_head_is_unpacked_whole() -> None:
    """A GGUF file's head is quantized, and is larger than any matrix of a layer."""
    packed = replace(
        LLAMA_7B, layers=tuple(size // 4 for size in LLAMA_7B.layers),
        resident=LLAMA_7B.resident // 4, head=LLAMA_7B.head // 4, table=LLAMA_7B.table // 4,
    )  # fmt: skip
    parts = dict(gpu_parts(packed, None, Work()))
    assert parts["one converted matrix"] == LLAMA_7B.vocab * LLAMA_7B.hidden * 2


@pytest.mark.parametrize("item_bytes", [2, 4])
def test_logits_and_rows_between_layers_are_planned_in_float32(item_bytes: int) -> None:
    """Logits of two passes, and three of the rows between layers."""
    work = Work(context_tokens=300, budget=20, item_bytes=item_bytes)
    needed = activation_bytes(LLAMA_7B, work)
    larger = replace(LLAMA_7B, vocab=LLAMA_7B.vocab + 1)
    assert activation_bytes(larger, work) - needed == 21 * 2 * 4
    more = replace(LLAMA_7B, hidden=LLAMA_7B.hidden + 1)
    inside = 8 * 300 * item_bytes
    assert activation_bytes(more, work) - needed == 3 * 321 * 4 + inside
    # a draft step's graph holds its own, one graph for each number of rows
    draft = replace(LLAMA_7B, vocab=LLAMA_7B.vocab + 1)
    steps = [dict(gpu_parts(LLAMA_7B, each, work))["draft steps"] for each in (LLAMA_7B, draft)]
    assert steps[1] - steps[0] == sum(STEP_ROWS) * 4


def test_a_cpu_that_multiplies_two_bytes_as_float32_needs_room_for_that() -> None:
    work = Work(context_tokens=300, budget=20)
    inside = 300 * (8 * LLAMA_7B.hidden + 3 * LLAMA_7B.intermediate)
    widened = activation_bytes(LLAMA_7B, replace(work, widened=True))
    assert widened - activation_bytes(LLAMA_7B, work) == 2 * inside


def test_a_packed_draft_model_stays_packed() -> None:
    packed = replace(LLAMA_7B, layers=tuple(size // 4 for size in LLAMA_7B.layers))
    for draft, layers in ((LLAMA_7B, LLAMA_7B.layer_params * 4), (packed, sum(packed.layers))):
        parts = dict(fixed_parts(LLAMA_7B, draft, Work(item_bytes=4)))
        assert parts["draft model"] == draft.resident + layers


def test_a_table_that_is_only_looked_up_is_in_ram_beside_a_gpu() -> None:
    """Llama-3-70B's: 2.1 GB, as much as five of its layers in 4 bits."""
    config = {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
              "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
              "vocab_size": 128256, "torch_dtype": "float16", "quantization_config":
              {"quant_method": "gptq", "bits": 4, "group_size": 128}}  # fmt: skip
    machine = Machine(ram_bytes=64 * GB, vram_bytes=24 * GB)
    own = architecture_bytes(config)
    assert own.table == own.head == 128256 * 8192 * 2
    plan = make_plan(own, None, Work(), machine)
    assert dict(plan.ram)["embeddings"] == own.table
    assert dict(plan.vram)["embeddings and head"] == own.resident - own.table
    held = make_plan(replace(own, table=0), None, Work(), machine)
    assert plan.tiers.count("resident") >= held.tiers.count("resident") + 4
    tied = architecture_bytes({**config, "tie_word_embeddings": True})
    assert tied.table == 0
    assert "embeddings" not in dict(make_plan(tied, None, Work(), machine).ram)
    # loaded whole, nothing is gained by looking up elsewhere
    parts = dict(gpu_parts(own, None, Work(), table_in_ram=False))
    assert parts["embeddings and head"] == own.resident


def test_a_draft_models_scores_are_counted() -> None:
    """525 MB at 1024 nodes and 128k words, and what a step makes of them on the way."""
    draft = replace(LLAMA_7B, vocab=128_256)
    scores = [
        dict(gpu_parts(LLAMA_7B, draft, Work(budget=budget, batch=8)))["scores of draft nodes"]
        for budget in (16, 1040)
    ]
    assert scores[1] - scores[0] == 1024 * 128_256 * 4
    assert "scores of draft nodes" not in dict(gpu_parts(LLAMA_7B, None, Work()))


def test_cuda_is_counted_once() -> None:
    """What is free on a device was asked for with its context in place."""
    parts = [dict(gpu_parts(LLAMA_7B, None, Work(), *given))["CUDA context"]
             for given in ((), (GPU_LIBRARY_BYTES,))]  # fmt: skip
    assert parts == [600 * MB, GPU_LIBRARY_BYTES]
    described = Machine(ram_bytes=64 * GB, vram_bytes=12 * GB)
    here = replace(described, context_bytes=GPU_LIBRARY_BYTES)
    plans = [make_plan(LLAMA_7B, None, Work(), machine) for machine in (described, here)]
    assert plans[1].peak_vram_bytes <= 12 * GB
    assert plans[1].tiers.count("resident") == plans[0].tiers.count("resident") + 1


@pytest.mark.parametrize("ram", [5 * GB, 20 * GB, 64 * GB])
def test_memory_that_is_not_pinned_is_left_beside_a_gpu(ram: int) -> None:
    machine = Machine(ram_bytes=ram, vram_bytes=8 * GB)
    left = max(4 * GB, ram // 10)
    assert machine.usable_ram() == ram - left
    assert machine.usable_ram(least_bytes=ram - GB) == min(ram - GB, int(ram * 0.96))
    assert machine.usable_ram(least_bytes=ram) == int(ram * 0.96)
    for needed in (GB, 30 * GB, 100 * GB):
        enough = machine.ram_for(needed)
        assert replace(machine, ram_bytes=enough).usable_ram() == pytest.approx(needed, abs=2)
    on_cpu = replace(machine, vram_bytes=0)
    assert on_cpu.usable_ram() == int(ram * 0.96)
    assert replace(on_cpu, ram_bytes=on_cpu.ram_for(GB)).usable_ram() == pytest.approx(GB, abs=2)


def test_a_gpu_with_room_keeps_everything() -> None:
    gpu = GpuRates(card="a GPU", memory_bytes_per_s=1e12, tensor_flops=2e14)
    machine = Machine(ram_bytes=64 * GB, vram_bytes=48 * GB, memory_bytes_per_s=1e12, gpu=gpu)
    plan = make_plan(LLAMA_7B, None, Work(), machine)
    assert set(plan.tiers) == {"resident"}
    assert (plan.ssd_buffers, plan.device_buffers, plan.link_bytes) == (0, 0, 0)
    assert usual_pass(plan).bottleneck == "memory"


@pytest.mark.parametrize("change", [{"ssd_bytes_per_s": 0.0}, {"ram_bytes": -1}])
def test_a_machine_checks_itself(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        Machine(**{"ram_bytes": GB, **change})  # type: ignore[arg-type]
