"""Which layers go to which machine, and what a file of hosts may say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cli_runner import run_cli
from hypothesis import given, settings
from hypothesis import strategies as st

from specexec_cli.core import Piece
from specexec_cli.errors import ConfigError
from specexec_cli.hosts.facts import hello_of, read_facts
from specexec_cli.hosts.wire import WireError
from specexec_cli.planning.hosts import HostEntry, WaveTimes, in_waves, part_of, read_hosts, spread
from specexec_cli.planning.machine import ASSUMED_FLOPS, Host, Machine, Setting, Site
from specexec_cli.planning.machine_rates import LayerCost
from specexec_cli.planning.memory import DoesNotFitError, Work
from specexec_cli.planning.pass_time import pass_time
from specexec_cli.planning.sizes import ModelBytes
from specexec_cli.planning.tiers import Plan, make_plan

GB = 10**9
LAYER = LayerCost(layer_s=1e-3, row_s=0.0, slot_s=0.0)
WORK = Work(context_tokens=512, budget=63)


def model(layers: int, layer_bytes: int) -> ModelBytes:
    return ModelBytes(
        layers=(layer_bytes,) * layers, resident=GB, layer_params=layers * layer_bytes // 2,
        largest_matrix=layer_bytes // 8, active_params=layers * layer_bytes // 2,
        kv_elements=layers * 2048, layer_kv=(2048,) * layers, hidden=4096, intermediate=11008,
        vocab=32000,
    )  # fmt: skip


def placed(sizes: ModelBytes, work: Work, machine: Machine) -> Plan:
    return make_plan(sizes, None, work, machine)


def host(name: str, ram_gb: float, **changes: object) -> Host:
    found = Host(
        name=name, machine=Machine(ram_bytes=int(ram_gb * GB)), link_bytes_per_s=117e6,
        delay_s=3e-4,
    )  # fmt: skip
    return replace(found, **changes)


def test_layers_that_fit_no_machine_alone_wait_in_the_memory_of_all() -> None:
    target, here = model(40, GB // 2), Machine(ram_bytes=12 * GB)
    alone = placed(target, WORK, here)
    found = spread(target, WORK, here, [host("attic", 10), host("cellar", 10)], placed)
    assert alone.ssd_bytes
    assert not found.ssd_bytes
    assert not any(each.plan.ssd_bytes for each in found.others)
    assert [each.host.name for each in found.others] == ["attic", "cellar"]
    ours = pass_time(found, 64)
    assert ours.hosts_s > 0
    assert ours.seconds < pass_time(alone, 64).seconds


def test_a_model_that_fits_here_stays_here() -> None:
    found = spread(model(8, GB // 4), WORK, Machine(ram_bytes=12 * GB), [host("attic", 64)], placed)
    assert found.others == ()
    assert len(found.tiers) == 8


def test_a_faster_machine_gets_more_layers_and_so_does_a_faster_link() -> None:
    target, here = model(56, GB // 2), Machine(ram_bytes=8 * GB)
    fast = replace(host("fast", 16).machine, memory_bytes_per_s=80e9)
    slow, quick = host("slow", 16), host("quick", 16, machine=fast)
    counts = {
        each.host.name: len(each.layers)
        for each in spread(target, WORK, here, [slow, quick], placed).others
    }
    assert counts["quick"] > counts["slow"]
    wifi, wire = host("wifi", 12, link_bytes_per_s=3e6), host("wire", 12)
    (one,) = spread(model(18, GB // 2), WORK, here, [wifi, wire], placed).others
    assert one.host.name == "wire"


def test_a_way_that_pays_only_with_many_layers_is_taken() -> None:
    """The first layer of a fast machine saves less than the way there takes; all of them do not."""
    fast = replace(host("fast", 64).machine, memory_bytes_per_s=200e9)
    target, far = model(24, GB // 2), host("fast", 64, machine=fast, delay_s=0.05)
    here = Machine(ram_bytes=32 * GB)
    (other,) = spread(target, WORK, here, [far], placed).others
    assert len(other.layers) == 23
    assert spread(target, WORK, here, [replace(far, delay_s=5.0)], placed).others == ()


def test_products_of_a_described_machine_take_time() -> None:
    slow, fast = (
        HostEntry(name="attic", ram_gb=64, tflops=tflops).described() for tflops in (0.5, 2)
    )
    target, here = model(24, GB // 2), Machine(ram_bytes=6 * GB)
    taken = [
        pass_time(spread(target, WORK, here, [each], placed), 256).hosts_s for each in (slow, fast)
    ]
    assert taken[0] > 2 * taken[1]


def over_three(tflops: float, ram_gb: float = 64, ssd_gb_s: float = 3.0) -> Plan:
    """Twenty-four layers over three machines alike, a third on each."""
    entries = [
        HostEntry(name=name, ram_gb=ram_gb, tflops=tflops, ssd_gb_s=ssd_gb_s, layers=8)
        for name in ("attic", "cellar")
    ]
    hosts = [entry.described() for entry in entries]
    return spread(model(24, GB // 2), WORK, hosts[0].machine, hosts, placed)


def test_many_rows_go_in_waves_that_keep_all_machines_busy() -> None:
    found = over_three(0.5)
    times, prompt = WaveTimes(found), [(2048, 2048)]
    waves = times.fastest(prompt)
    assert len(waves) == 12  # four for each machine
    turn, *_ = pass_time(found, -(-2048 // 12)).turns_s
    assert times.seconds(waves) == pytest.approx(14 * turn, rel=0.2)
    assert pass_time(found, 2048).seconds == pytest.approx(36 * turn, rel=0.2)
    assert times.seconds(in_waves(prompt, 2048)) == pass_time(found, 2048).seconds


def test_waves_that_would_read_the_weights_again_for_nothing_are_not_made() -> None:
    few, slow = over_three(2.0), over_three(0.05)
    prompt = [(17, 17)]
    assert len(WaveTimes(few).fastest(prompt)) == 1  # every machine waits for its memory
    assert len(WaveTimes(slow).fastest(prompt)) > 1  # and here for its products
    streams = over_three(2.0, ram_gb=3.5)
    assert all(each.plan.streams for each in streams.others)
    assert len(WaveTimes(streams).fastest([(512, 512)])) == 1
    alone = placed(model(8, GB // 4), WORK, Machine(ram_bytes=12 * GB))
    assert len(WaveTimes(alone).fastest([(2048, 2048)])) == 1


@pytest.mark.parametrize(
    "texts", [[(17, 1)] * 4, [(17, 1)] * 8, [(9, 1)] * 8, [(129, 1)] * 2, [(65, 1)], [(576, 512)]]
)
@pytest.mark.parametrize("tflops", [0.05, 0.5, 2.0])
def test_no_other_waves_that_a_pass_can_go_in_take_less(
    texts: list[tuple[int, int]], tflops: float
) -> None:
    """Whose trees are not divided, and whose weights each machine reads again for every one."""
    found = over_three(tflops)
    times, total = WaveTimes(found), sum(rows for rows, _ in texts)
    ways = [in_waves(texts, -(-total // count)) for count in range(1, 13)]
    least = min(map(times.seconds, ways))
    best = times.fastest(texts)
    assert best == next(way for way in ways if times.seconds(way) == least)


def test_each_machine_begins_with_a_wave_behind_the_one_before() -> None:
    """So a pass takes as long as the longest way through its turns, to the next wave or machine."""
    found = over_three(0.01)
    times, rows = WaveTimes(found), (8, 1, 8)
    waves = [[Piece(text, 0, count)] for text, count in enumerate(rows)]
    turns = [pass_time(found, count).turns_s for count in rows]
    ways = [
        sum(
            each[machine]
            for machine, part in enumerate((turns[: a + 1], turns[a : b + 1], turns[b:]))
            for each in part
        )
        for a in range(3)
        for b in range(a, 3)
    ]
    assert times.seconds(waves) == pytest.approx(max(ways))


def test_rooms_for_large_trees_do_not_make_one_machine_the_fastest() -> None:
    """A budget is the most that a tree may have, and seldom worth it on a CPU."""
    slow = [replace(each, layers=None) for each in (host("attic", 64), host("cellar", 64))]
    slow = [each.computing("bfloat16", 0, eight_bit_rows=False) for each in slow]
    here = Machine(ram_bytes=12 * GB, ssd_bytes_per_s=5e9).with_products()
    found = spread(model(56, GB // 2), replace(WORK, budget=2048), here, slow, placed)
    assert found.others
    assert not found.ssd_bytes


def test_a_worker_is_planned_with_the_arithmetic_that_it_tells() -> None:
    told = host("attic", 64, flops={"float32": ((1, 1e11),)}, layer_costs={"float32": LAYER})
    known = told.computing("float32", 4, eight_bit_rows=False).machine
    assert (known.flops, known.layer_cost) == (((1, 1e11),), LAYER)
    unknown = told.computing("bfloat16", 0, eight_bit_rows=False).machine
    assert (unknown.flops, unknown.layer_cost) == (((1, ASSUMED_FLOPS),), None)
    entry = HostEntry(name="attic", tflops=2.0).host(Machine(ram_bytes=GB), 1e8, 0.0)
    said = replace(entry, flops=told.flops).computing("float32", 0, eight_bit_rows=False)
    assert said.machine.flops == ((1, 2e12),)


def hello(**arithmetic: object) -> dict[str, object]:
    """What a worker tells, as it arrives."""
    rates = {"ssd": 2e9, "link": 2e10, "memory": 1e10, "vram": 0, "ram": GB}
    known = {"flops": {"float32": ((1, 1e11), (8, 2e11))}, "layers": {"float32": LAYER}}
    settings = {name: Setting(value, "given") for name, value in rates.items()}
    told = hello_of("attic", Site(device="cpu", settings=settings, **known))
    return json.loads(json.dumps({**told, **arithmetic}))


def test_a_worker_tells_the_arithmetic_of_its_machine() -> None:
    found = read_facts(hello())
    assert found.flops == {"float32": ((1, 1e11), (8, 2e11))}
    assert found.layers == {"float32": LAYER}


@pytest.mark.parametrize(
    "told",
    [
        None, 3, {"flops": {"float32": [[0, 1e11]]}},
        {"flops": {"float32": [[8, 1e11], [1, 1e11]]}},
        {"flops": 3}, {"layers": {"float32": 3}}, {"unknown": 1},
    ],
)  # fmt: skip
def test_a_worker_whose_arithmetic_cannot_be_read_is_refused(told: object) -> None:
    with pytest.raises(WireError, match="tells no arithmetic of its machine"):
        read_facts(hello(arithmetic=told))


def test_a_number_of_layers_that_was_asked_for_is_given() -> None:
    target, here = model(8, GB // 4), Machine(ram_bytes=12 * GB)
    (one,) = spread(target, WORK, here, [host("attic", 8, layers=3)], placed).others
    assert one.layers == range(5, 8)
    with pytest.raises(ConfigError, match="8 layers are asked for"):
        spread(target, WORK, here, [host("attic", 8, layers=8)], placed)
    with pytest.raises(DoesNotFitError, match="attic: even fully streamed"):
        spread(target, WORK, here, [host("attic", 0.1, layers=3)], placed)


def test_this_machine_keeps_the_first_recurrent_layer_and_states_go_with_their_layers() -> None:
    kv = (2048, 0, 0, 0) * 2
    target = replace(
        model(8, GB // 4), layer_kv=kv, layer_states=tuple(0 if each else 10**6 for each in kv),
        state_elements=6 * 10**6, node_elements=6 * 10**5,
    )  # fmt: skip
    attic = host("attic", 64, machine=replace(host("attic", 64).machine, memory_bytes_per_s=2e12))
    found = spread(target, WORK, Machine(ram_bytes=12 * GB), [attic], placed)
    assert len(found.tiers) == 2
    assert found.target.state_elements == 10**6
    assert found.others[0].plan.target.state_elements == 5 * 10**6
    assert found.others[0].plan.target.node_elements == 5 * 10**5
    with pytest.raises(ConfigError, match="7 layers are asked for and this machine takes 2"):
        spread(target, WORK, Machine(ram_bytes=12 * GB), [replace(attic, layers=7)], placed)


def test_layers_that_keep_nothing_do_not_count_as_the_first_recurrent_one() -> None:
    """As in Nemotron-H, where feed-forward layers stand alone; layers of Falcon-H1 attend too."""
    stands_alone = replace(
        model(8, GB // 4), layer_kv=(0, 0, 2048, 0) * 2, layer_states=(0, 10**6, 0, 0) * 2,
        state_elements=2 * 10**6,
    )  # fmt: skip
    both = replace(model(8, GB // 4), layer_states=(10**6, 0, 0, 0) * 2, state_elements=2 * 10**6)
    attic = host("attic", 64, machine=replace(host("attic", 64).machine, memory_bytes_per_s=2e12))
    for target, here in ((stands_alone, 2), (both, 1)):
        found = spread(target, WORK, Machine(ram_bytes=12 * GB), [attic], placed)
        assert len(found.tiers) == here
        assert found.target.state_elements == 10**6
        assert found.others[0].plan.target.state_elements == 10**6


@settings(max_examples=25, deadline=None)
@given(
    layers=st.integers(2, 24), size=st.integers(1, 12), ram=st.integers(6, 30),
    hosts=st.lists(st.integers(2, 40), min_size=1, max_size=3),
)  # fmt: skip
def test_every_layer_has_one_place_and_no_memory_is_overfilled(
    layers: int, size: int, ram: int, hosts: list[int]
) -> None:
    target = model(layers, size * GB // 8)
    named = [host(f"host-{at}", each) for at, each in enumerate(hosts)]
    found = spread(target, WORK, Machine(ram_bytes=ram * GB), named, placed)
    at = len(found.tiers)
    assert at >= 1
    for each in found.others:
        assert each.layers.start == at
        at = each.layers.stop
        assert each.plan.peak_ram_bytes <= each.host.machine.ram_bytes
    assert at == layers
    assert found.peak_ram_bytes <= ram * GB


@given(cut=st.integers(1, 23))
def test_parts_add_up_to_the_whole(cut: int) -> None:
    target = model(24, GB // 2)
    parts = part_of(target, range(cut), ends=True), part_of(target, range(cut, 24), ends=False)
    assert sum(part.total for part in parts) == target.total
    assert sum(part.kv_elements for part in parts) == target.kv_elements
    assert abs(sum(part.layer_params for part in parts) - target.layer_params) <= 1


def test_the_file_says_where_and_who(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(
        'listen = "10.0.0.2:99"\nwait_s = 5\n[[host]]\nname = "attic"\nram_gb = 32\n'
        'link_gbit_s = 2.5\ndelay_ms = 1\nssd_gb_s = 3\n[[host]]\nname = "cellar"\nlayers = 4\n'
    )
    found = read_hosts(path)
    assert (found.listen, found.wait_s) == ("10.0.0.2:99", 5)
    attic = found.hosts[0].described()
    assert attic.machine.ram_bytes == 32 * GB
    assert attic.machine.ssd_bytes_per_s == 3e9
    assert (attic.link_bytes_per_s, attic.delay_s) == (2.5e9 / 8, 1e-3)
    assert found.hosts[1].layers == 4
    with pytest.raises(ConfigError, match="the memory of 'cellar' is not told"):
        found.hosts[1].described()


def test_a_machine_without_memory_of_a_gpu_has_the_rates_of_its_cpu() -> None:
    plain, none, card = (
        HostEntry(name="attic", ram_gb=32, vram_gb=vram).described().machine
        for vram in (None, 0, 24)
    )
    assert none == plain
    assert card.memory_bytes_per_s > plain.memory_bytes_per_s


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "at least one"),
        ("listen = 3\n[[host]]\nname='a'", "must be an address"),
        ("listen = 'a..b'\n[[host]]\nname='a'", "'a..b' is no address"),
        ("host = 3", "at least one"),
        ("host = [3]", "needs a 'name'"),
        ("[[host]]\nram_gb = 3", "needs a 'name'"),
        ("[[host]]\nname='a'\nram = 3", "unknown key 'ram'"),
        ("hots = 3\n[[host]]\nname='a'", "unknown key 'hots'"),
        ("[[host]]\nname='a'\nram_gb = '3'", "'ram_gb' of 'a' cannot be '3'"),
        ("[[host]]\nname='a'\nlayers = 1.5", "'layers' of 'a' cannot be 1.5"),
        ("[[host]]\nname='a'\nram_gb = nan", "'ram_gb' of 'a' cannot be nan"),
        ("[[host]]\nname='a'\nssd_gb_s = 0", "'ssd_gb_s' of 'a' cannot be 0"),
        ("[[host]]\nname='a'\n[[host]]\nname='a'", "two hosts are called 'a'"),
        ("wait_s = 0\n[[host]]\nname='a'", "'wait_s' must be seconds"),
        ("listen", "cannot be read"),
    ],
)
def test_a_file_that_says_nonsense_gets_one_line(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"hosts\.toml") as error:
        read_hosts(path)
    assert told in str(error.value)


def test_a_plan_over_machines_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text('[[host]]\nname = "attic"\nram_gb = 64\n')
    common = ("plan", "llama3.3-70b-instruct", "--ram", "24GB", "--vram", "0", "--draft", "suffix")
    alone, over = run_cli(*common), run_cli(*common, "--hosts", path)
    assert over.code == 0, over.err
    told = " ".join(over.out.split())
    assert "attic: layers" in told
    assert "there and back take" in told
    assert "attic" not in alone.out
    assert "attic" in run_cli(*common, "--hosts", path, "--json").out
    assert "known of this machine, attic: taken as a usual CPU's, 0.5 TFLOP/s" in over.err
    assert "usual CPU" not in alone.err
    path.write_text('[[host]]\nname = "attic"\nram_gb = 64\ntflops = 1.5\n')
    assert "known of this machine: taken" in run_cli(*common, "--hosts", path).err


def test_a_plan_tells_of_a_machine_that_gets_no_layers(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text('[[host]]\nname = "attic"\nram_gb = 64\n')
    planned = run_cli("plan", "demo", "--ram", "24GB", "--vram", "0", "--hosts", path)
    assert planned.code == 0, planned.err
    assert "attic has no layers: a pass takes least without it" in planned.err


def test_a_mixture_whose_first_layers_are_dense_is_planned_over_machines(tmp_path: Path) -> None:
    """A machine may have those alone, a GPU or not."""
    path = tmp_path / "hosts.toml"
    path.write_text('[[host]]\nname = "attic"\nram_gb = 512\n')
    for vram in ("0", "24GB"):
        ran = run_cli(
            "plan", "deepseek-v3.1", "--ram", "64GB", "--vram", vram, "--draft", "suffix",
            "--hosts", path,
        )  # fmt: skip
        assert ran.code == 0, ran.err
        assert "attic: layers" in " ".join(ran.out.split())


@pytest.mark.parametrize(
    ("options", "told"),
    [(("--method", "dsi"), "leave --hosts out"), (("--offload", "none"), "leave --offload at")],
)
def test_what_hosts_do_not_go_with_is_refused(
    options: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text('[[host]]\nname = "attic"\n')
    ran = run_cli("generate", "-m", "demo", "x", "--hosts", path, *options)
    assert ran.code == 2
    assert told in ran.error
