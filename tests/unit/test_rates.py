"""Rates that are kept: for which machine they hold, and arithmetic measured at first use."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from busy_machine import Fake
from computer import Computer

from specexec_cli import loading
from specexec_cli.device import usable_cores
from specexec_cli.models import arithmetic_probe
from specexec_cli.models.arithmetic_probe import probe_flops
from specexec_cli.planning import machine_rates as rates
from specexec_cli.planning.machine import Machine, Setting, Site
from specexec_cli.planning.machine_rates import (
    PROBED_ROWS,
    FlopsByRows,
    LayerCost,
    load_rates,
    new_rates,
    rates_file,
    save_rates,
)
from specexec_cli.planning.memory import Work
from specexec_cli.planning.sizes import architecture_bytes
from specexec_cli.planning.tiers import Plan, make_plan
from specexec_cli.session import cost_prior

POINTS: FlopsByRows = ((1, 1e9), (64, 1e11))
COST = LayerCost(layer_s=1e-3, row_s=1e-4, slot_s=1e-7)


GPU = {"card": "Card", "memory_bytes_per_s": 9e11, "tensor_flops": 1e14}


@pytest.fixture
def kept(computer: Computer) -> Path:
    """The file of rates, with those of everything, measured here."""
    path = rates_file()
    everything = replace(
        new_rates(), ssd_bytes_per_s=2e9, memory_bytes_per_s=3e10, link_bytes_per_s=2e10,
        flops={"float32": POINTS}, layers={"float32": COST},
    )  # fmt: skip
    save_rates(everything, path)
    return path


def test_what_is_kept_is_read_back(kept: Path) -> None:
    assert load_rates(kept.with_name("other.json")) is None
    found = load_rates(kept)
    assert found is not None
    assert (found.flops, found.layers) == ({"float32": POINTS}, {"float32": COST})
    assert (found.ssd_bytes_per_s, found.memory_bytes_per_s) == (2e9, 3e10)
    assert [file.name for file in kept.parent.iterdir()] == ["rates.json"]


def test_another_hosts_disk_is_not_ours(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "node", lambda: "elsewhere")
    found = load_rates(kept)
    assert found is not None
    assert found.flops == {"float32": POINTS}
    assert (found.ssd_bytes_per_s, found.link_bytes_per_s) == (None, None)


def other_cpu(computer: Computer, monkeypatch: pytest.MonkeyPatch) -> None:
    computer.has_cpu("Another CPU")


def fewer_cores(computer: Computer, monkeypatch: pytest.MonkeyPatch) -> None:
    computer.files["/proc/self/cgroup"] = "0::/\n"
    computer.files["/sys/fs/cgroup/cpu.max"] = "100000 100000\n"
    assert usable_cores() == 1


def other_torch(computer: Computer, monkeypatch: pytest.MonkeyPatch) -> None:
    true = rates.installed_version
    monkeypatch.setattr(
        rates, "installed_version", lambda name: "0" if name == "torch" else true(name)
    )


def other_kernels(computer: Computer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "kernels_version", lambda: "changed")


@pytest.mark.parametrize("change", [other_cpu, fewer_cores, other_torch, other_kernels])
def test_arithmetic_is_of_one_cpu_and_one_set_of_versions(
    kept: Path,
    computer: Computer,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Computer, pytest.MonkeyPatch], None],
) -> None:
    change(computer, monkeypatch)
    found = load_rates(kept)
    assert found is not None
    assert (found.flops, found.layers, found.memory_bytes_per_s) == (None, None, None)
    assert found.ssd_bytes_per_s == 2e9
    save_rates(replace(new_rates(), flops={"bfloat16": POINTS}), kept)
    found = load_rates(kept)
    assert found is not None
    assert found.flops == {"bfloat16": POINTS}
    assert found.ssd_bytes_per_s == 2e9


def test_the_kernels_version_follows_their_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = rates.kernels_version()
    assert now == rates.kernels_version.__wrapped__()

    class Spec:
        submodule_search_locations = (str(tmp_path),)

    (tmp_path / "kernel.py").write_text("1")
    monkeypatch.setattr(rates.importlib.util, "find_spec", lambda name: Spec)
    one = rates.kernels_version.__wrapped__()
    (tmp_path / "kernel.py").write_text("2")
    assert len({now, one, rates.kernels_version.__wrapped__()}) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"flops": {"float32": [1]}}, {"flops": [1]}, {"flops": {"float32": [[2, 1e9], [1, 1e9]]}},
        {"flops": {"float32": [[1, float("nan")]]}}, {"flops": {"float32": [[1, 10**30]]}},
        {"layers": [1]}, {"layers": {"float32": {"layer_s": 1.0}}},
        {"layers": {"float32": {"layer_s": -1.0, "row_s": 0.0, "slot_s": 0.0}}},
        {"layers": {"float32": {"layer_s": 0.0, "row_s": 0.0, "slot_s": 0.0, "call_s": []}}},
        {"gpu": [1]}, {"gpu": {"card": "Card"}}, {"gpu": {**GPU, "memory_bytes_per_s": 0}},
        {"gpu": {**GPU, "products": [[4, [[1, 1e-12]]]]}}, {"gpu": {**GPU, "card": 1}},
        {"gpu": {**GPU, "products": [[4, [[n, 0.0] for n in PROBED_ROWS]]]}},
        {"gpu": {**GPU, "wait_s": float("nan")}},
        {"ssd_bytes_per_s": 0}, {"ssd_bytes_per_s": "x"}, {"cpu": 1}, {"new": 1},
    ],
)  # fmt: skip
def test_damaged_rates_are_measured_again(kept: Path, change: dict[str, object]) -> None:
    kept.write_text(json.dumps({**json.loads(kept.read_text()), **change}))
    assert load_rates(kept) is None
    for text in ("{", "[" * 100_000, "[]", "1" * 5000):
        kept.write_text(text)
        assert load_rates(kept) is None


@pytest.mark.parametrize("product_s", [1e-6, 0.001, 0.01, 0.05])
def test_a_calibration_takes_at_most_two_seconds(
    product_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs of very different speeds; a product of many rows takes as long as 20 of one."""
    now = 0.0

    def linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        nonlocal now
        now += product_s * max(1.0, rows.shape[0] / 6)
        return rows

    monkeypatch.setattr(arithmetic_probe.time, "perf_counter", lambda: now)
    points = probe_flops(torch.float32, torch.float32, linear, weight_bytes=4 * 256, width=8)
    assert {1, 128} <= {rows for rows, _ in points}
    assert now <= (2.0 if product_s < 0.05 else 4.0)
    if product_s <= 0.001:
        assert [rows for rows, _ in points] == [1, 8, 32, 128, 256]
    rates_found = dict(points)
    assert rates_found[1] == pytest.approx(2 * 64 / product_s)


SETTINGS = {name: Setting(1e9, "given") for name in ("ram", "ssd", "link", "memory")} | {
    "vram": Setting(0, "given")
}


def test_a_site_measures_what_it_does_not_know_once() -> None:
    asked = []

    def calibrate(
        dtype: str, packed_bits: int, eight_bit_rows: bool
    ) -> tuple[FlopsByRows, LayerCost]:
        asked.append((dtype, packed_bits))
        return POINTS, COST

    site = Site(
        device="cpu", settings=SETTINGS, flops={"float32": ((1, 1.0),)}, layers={"float32": COST},
        calibrate=calibrate,
    )  # fmt: skip
    assert site.calibrated("float32", 0) is site
    known = site.calibrated("float32", 4)
    assert known.machine("float32", packed_bits=4).flops == POINTS
    assert known.machine("float32").layer_cost == COST
    assert known.machine("float32").flops == ((1, 1.0),)
    assert known.calibrated("float32", 4) is known
    assert asked == [("float32", 4)]
    assert known.machine("float32", packed_bits=4, eight_bit_rows=True).flops == POINTS
    rounding = known.calibrated("float32", 4, eight_bit_rows=True)
    assert rounding.flops["8-bit rows, 4 bits"] == POINTS
    assert len(asked) == 2
    assert replace(site, calibrate=None).calibrated("bfloat16", 0).flops == site.flops
    assert replace(site, layers={}).calibrated("float32", 0).layers == {"float32": COST}


@pytest.mark.parametrize(
    ("share", "others", "told"),
    [
        (1.0, 0.0, ""),
        (0.95, 0.1, ""),
        (0.5, 0.0, "this program waited for a core 50% of the time"),
        (1.0, 1.0, "other programs used 50% of the CPU"),
    ],
)
def test_a_session_keeps_what_it_measured_undisturbed(
    kept: Path,
    computer: Computer,
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    others: float,
    told: str,
) -> None:
    """By its own thread's clock, and by what others used of two cores."""
    machine = Fake(thread_share=share, others_cores=others)
    machine.install(monkeypatch)
    computer.computes_at(lambda: machine.passes(1.5) or POINTS, COST)
    notices: list[str] = []
    site = loading.this_site(torch.device("cpu"), notice=notices.append)
    assert site.calibrated("bfloat16", 4).flops["bfloat16, 4 bits"] == POINTS
    found = load_rates(kept)
    assert found is not None
    new = {} if told else {"bfloat16, 4 bits": POINTS}
    assert found.flops == {"float32": POINTS} | new
    assert found.layers == {"float32": COST} | ({} if told else {"bfloat16": COST})
    line = f"{told} while arithmetic in bfloat16, 4 bits was measured: what was found is used for "
    assert notices == ([f"{line}this run and not kept"] if told else [])
    assert loading.this_site(torch.device("cpu")).flops == found.flops


def test_a_folder_that_cannot_be_written_only_costs_the_next_session_time(
    computer: Computer,
) -> None:
    rates_file().parent.parent.mkdir()
    rates_file().parent.write_text("")
    computer.computes_at(lambda: POINTS, COST)
    site = loading.this_site(torch.device("cpu"))
    assert site.calibrated("float32", 0).flops == {"float32": POINTS}


def plan_of(weights: int, flops: FlopsByRows, cost: LayerCost) -> Plan:
    """A plan for a target of so many weights, the head's among them, on a CPU so fast."""
    config = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "vocab_size": 8,
              "num_hidden_layers": 10, "num_attention_heads": 1}  # fmt: skip
    target = replace(architecture_bytes(config), active_params=weights - 64)
    machine = Machine(ram_bytes=10**11, flops=flops, layer_cost=cost)
    return make_plan(target, None, Work(), machine)


def test_the_prior_follows_the_measured_rates() -> None:
    """1e9 weights: rows beyond the knee take what their arithmetic does."""
    flops: FlopsByRows = ((1, 1e10), (10, 1e11), (100, 2e11), (200, 2e11))
    plan = plan_of(10**9, flops, LayerCost(0.0, 0.0, 0.0))
    # one row takes 0.2 s, as ten do; 100 take 1 s, and each further one 0.01 s
    found = cost_prior.by_rates(plan, stream_s=1.0)
    assert found == pytest.approx((1.0, 0.01, 100.0))
    base_s, row_s, knee = cost_prior.by_rates(plan, stream_s=0.01) or (0.0, 0.0, 0.0)
    assert base_s == pytest.approx(0.2)
    assert knee == 10
    assert 0.2 + 64 * row_s == pytest.approx(0.2 + 64 * 0.8 / 90)
    # layers of 10 ms, ten of them, are computed beside the stream too
    slower = cost_prior.by_rates(plan_of(10**9, flops, LayerCost(1e-2, 0.0, 0.0)), stream_s=1.0)
    assert slower == pytest.approx((1.0, (55 * 0.01 + 9 * 0.8 / 90) / 64, 88.0), rel=0.05)
    nothing = LayerCost(0.0, 0.0, 0.0)
    assert cost_prior.by_rates(plan_of(10**9, (), nothing), stream_s=1.0) is None
    # of so few weights a pass is run instead
    assert cost_prior.by_rates(plan_of(10**6, flops, nothing), stream_s=1.0) is None
