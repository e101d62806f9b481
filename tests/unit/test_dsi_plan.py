"""Planning is arithmetic: worth it or not, and with which lookahead."""

from __future__ import annotations

import pytest

from specexec_cli.dsi.closed_forms import dsi_s, servers_needed
from specexec_cli.dsi.layout import Layout
from specexec_cli.dsi.plan import advise, make_plan, pass_seconds
from specexec_cli.planning.machine import described_site


def test_seconds_are_interpolated_and_extended():
    measured = {1: 10.0, 33: 42.0}
    assert pass_seconds(measured, 1) == 10.0
    assert pass_seconds(measured, 17) == 26.0
    assert pass_seconds(measured, 65) == 74.0
    assert pass_seconds({1: 10.0}, 500) == 10.0
    assert pass_seconds({1: 10.0, 33: 9.0}, 65) == 10.0, "noise is not a speedup"


def test_the_chosen_lookahead_is_the_best_that_the_servers_can_follow():
    plan = make_plan({1: 37.7}, 2.5, servers=7, acceptance=0.63)
    assert plan.lookahead == 3
    assert servers_needed(37.7, 2.5, 3) <= 7 < servers_needed(37.7, 2.5, 2)
    assert plan.dsi_token_s == pytest.approx(dsi_s(37.7, 2.5, 0.63, 3))
    assert plan.worthwhile
    assert 1.05 < plan.gain < 1.5


def test_a_slow_drafter_is_not_worth_it():
    plan = make_plan({1: 10.0}, 12.0, servers=4)
    assert not plan.worthwhile
    assert plan.dsi_token_s == plan.plain_token_s


def test_rows_that_cost_time_count_against_dsi():
    """Each server must catch up with the others' blocks."""
    free = make_plan({1: 10.0, 33: 10.0}, 1.0, servers=4)
    dear = make_plan({1: 10.0, 33: 60.0}, 1.0, servers=4)
    assert free.worthwhile
    assert dear.gain < free.gain


def test_one_server_is_plain_speculation_at_best():
    assert not make_plan({1: 10.0}, 12.0, servers=1).worthwhile


def test_a_fixed_lookahead_is_kept():
    assert make_plan({1: 10.0}, 1.0, servers=4, lookahead=9).lookahead == 9


GB = 10**9


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ([], "this machine has none"),
        ([80 * GB], "this machine has one"),
        ([24 * GB, 24 * GB], "0 of 2 devices can hold the target"),
        ([80 * GB, 80 * GB, 80 * GB], "DSI is worth it at an acceptance rate of 0.8: DSI: looka"),
    ],
)
def test_advice_is_one_line_that_says_why(devices, words):
    line = advise(35 * GB, 2 * GB, devices, 1e12)
    assert words in line
    assert "\n" not in line


GB = 10**9


@pytest.mark.parametrize("servers", [1, 2, 3, 5])
@pytest.mark.parametrize("drafters", [1, 3])
@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0", "cuda:1"], ["cuda:0"] * 2, ["cpu"]])
def test_what_all_workers_take_is_what_there_is(devices, servers, drafters):
    """Programs, contexts and further draft models, and what every target server may fill."""
    on_gpu = devices != ["cpu"]
    whole = described_site(ram_bytes=64 * GB, vram_bytes=24 * GB if on_gpu else 0)
    layout = Layout(devices=devices, servers=servers, drafters=drafters, further_draft_bytes=3 * GB)
    share = layout.share(whole)
    ram, vram = (int(share.settings[name].value) for name in ("ram", "vram"))
    programs = (servers + drafters) * whole.program_bytes
    weights = servers * (ram - share.program_bytes)
    assert programs + weights + (0 if on_gpu else 3 * GB) <= 64 * GB
    assert ram * servers > 64 * GB - 3 * GB - servers
    for name in set(devices) if on_gpu else ():
        here = [layout.server_device(number) for number in range(servers)].count(name)
        drafting = drafters if name == layout.drafter_device else 0
        contexts = (here + drafting) * whole.context_bytes
        filled = here * (vram - share.context_bytes) + (3 * GB if drafting else 0)
        assert contexts + filled <= 24 * GB or not here
    if devices == ["cuda:0"]:
        assert share.context_bytes >= whole.context_bytes * (servers + drafters) / servers


def test_a_drafter_with_a_gpu_to_itself_takes_nothing_from_target_servers():
    whole = described_site(ram_bytes=64 * GB, vram_bytes=24 * GB)
    share = Layout(devices=["cuda:0", "cuda:1", "cuda:2"], servers=2).share(whole)
    assert share.context_bytes == whole.context_bytes
    assert share.settings["vram"] == whole.settings["vram"]
    assert share.program_bytes == whole.program_bytes * 3 // 2
