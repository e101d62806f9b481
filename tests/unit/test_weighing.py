"""The draft that the planner chooses by itself: the one expected to be fastest, and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_runner import run_cli

import specexec_cli
from specexec_cli.catalog.registry import load_registry
from specexec_cli.config import Method, OffloadMode
from specexec_cli.errors import ConfigError
from specexec_cli.planning import speed as speed_module
from specexec_cli.planning.alternatives import check_own_copy, weighed, with_best_draft
from specexec_cli.planning.chosen_models import choose_pair
from specexec_cli.planning.expected_speed import predicted
from specexec_cli.planning.machine import Setting, Site, described_site
from specexec_cli.planning.machine_rates import new_rates, rates_file, save_rates
from specexec_cli.planning.request import Request
from specexec_cli.planning.resolve import resolve
from specexec_cli.planning.speed import Pace, Speed
from specexec_cli.planning.tiers import Plan


@pytest.fixture(autouse=True)
def _nothing_learned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def site(ram_bytes: float, memory_bytes_per_s: float) -> Site:
    """A CPU beside an SSD of 2 GB/s."""
    found = described_site(ram_bytes=int(ram_bytes), vram_bytes=0, ssd_bytes_per_s=2e9)
    settings = {**found.settings, "memory": Setting(memory_bytes_per_s, "given")}
    return replace(found, settings=settings, host_bytes_per_s=memory_bytes_per_s)


def test_the_fastest_of_those_at_hand_is_taken_and_the_others_are_named() -> None:
    request, here = Request(model="llama2-7b-chat", draft="auto"), site(12e9, 40e9)
    found, told = weighed(request, here), []
    speeds = {
        name: predicted(resolve(replace(request, draft=name), here)).typical
        for name in ("self", "self-3", "self-2")
    }
    assert {one.draft: one.tokens_per_s for one in found} == pytest.approx(speeds, rel=1e-6)
    best = max(speeds, key=lambda name: speeds[name])
    assert found[0].draft == best
    assert with_best_draft(request, here, told.append).draft == best
    assert f"`draft='{best}'` is expected to be fastest" in told[0]
    assert all(name in told[0] for name in (*speeds, "none"))


def test_no_copy_is_taken_where_reading_it_takes_longer_than_it_saves() -> None:
    demo = Path(specexec_cli.__file__).parent / "demo" / "target"  # as many layers, all in memory
    request, told = Request(model=str(demo), draft="auto"), []
    assert with_best_draft(request, site(2e9, 20e9), told.append).draft == "suffix"
    assert "no draft model is expected to pay" in told[0]
    assert "none" in told[0]


def test_heads_that_are_known_and_not_here_are_proposed() -> None:
    request, told = Request(model="llama3.1-8b-instruct", draft="auto"), []
    with_best_draft(request, site(16e9, 40e9), told.append)
    assert told[1] == (
        "trained for this target: "
        "llama3.1-8b-instruct-eagle3, 0.4B weights, licence not stated; "
        "llama3.1-8b-instruct-eagle3-authors, 0.42B weights, apache-2.0. "
        "To weigh one: specexec pull NAME"
    )
    with_best_draft(replace(request, offline=True), site(16e9, 40e9), told.append)
    assert len(told) == 3, "nothing can be fetched"


def test_a_copy_that_does_not_fit_is_no_candidate() -> None:
    request = Request(model="llama2-7b-chat", draft="auto", dtype="bfloat16")
    found = {one.draft: one for one in weighed(request, site(7e9, 40e9))}
    assert found["self"].speed is None
    assert "draft model" in found["self"].obstacle
    assert not found["self"].pays


def test_a_quantized_target_has_no_copy_and_a_draft_model_on_this_machine_is_weighed() -> None:
    here = site(4e9, 40e9)
    names = {one.draft for one in weighed(Request(model="demo-target", draft="auto"), here)}
    assert names == {"self", "self-3", "self-2", "demo-draft"}
    packed = weighed(Request(model="demo-target-gptq", draft="auto"), here)
    assert "self" not in {one.draft for one in packed}


def test_a_copy_that_cannot_be_made_is_no_candidate() -> None:
    request, here = Request(model="demo-target", draft="auto"), site(4e9, 40e9)
    found = weighed(request, here, lambda target, bits: "no" if bits == 4 else "")
    assert {one.draft: one.obstacle for one in found if one.speed is None} == {"self": "no"}


def test_the_prompt_takes_memory_too() -> None:
    request, here = Request(model="llama2-7b-chat", draft="auto"), site(12e9, 40e9)
    long = replace(request, prompt="word" * 5000, context_tokens=100)
    assert weighed(long, here) == weighed(replace(request, context_tokens=5100), here)
    assert weighed(long, here) != weighed(replace(request, context_tokens=100), here)


@pytest.mark.parametrize("method", ["specexec", "autoregressive"])
def test_what_was_not_left_open_stays(method: Method) -> None:
    for draft in ("demo-draft", None, "suffix"):
        request = Request(model="demo-target", draft=draft, method=method)
        assert with_best_draft(request, site(4e9, 40e9)) is request


def test_before_it_is_weighed_nothing_but_the_target_is_needed() -> None:
    pair = choose_pair(load_registry(None), Request(model="llama2-7b-chat", draft="auto"))
    assert pair.draft is None


def test_an_own_copy_that_was_asked_for_is_refused_where_it_cannot_pay() -> None:
    """From a CPU that multiplies fast enough for trees to one that does not, in small steps."""
    request, here = Request(model="llama2-7b-chat", draft="self"), site(12e9, 2.2e9)
    found = set()
    for power in range(80):
        rate = 1e9 * 1.1**power
        flops = dict.fromkeys(("float32", "bfloat16"), ((1, rate), (256, rate)))
        decision = resolve(request, replace(here, flops=flops))
        speed, told = predicted(decision), []
        if speed.high <= speed.plain:
            with pytest.raises(ConfigError, match=r"`draft='self'` is expected to be slower.*tok/s,"
                               r" and .* at best. Give `draft='suffix'`"):  # fmt: skip
                check_own_copy(decision, told.append)
            found.add("refused")
        else:
            check_own_copy(decision, told.append)
            assert bool(told) is not speed.drafting_pays
            found.add("told" if told else "taken")
    assert found == {"refused", "told", "taken"}
    plain = replace(request, draft="suffix")
    check_own_copy(resolve(plain, here), pytest.fail)


def test_a_small_target_s_own_copy_is_made_whatever_is_predicted_of_it() -> None:
    told: list[str] = []
    check_own_copy(
        resolve(Request(model="demo-target", draft="self"), site(2e9, 20e9)), told.append
    )
    assert "`draft='self'` is expected to be slower here than no draft model" in told[0]


def test_plan_refuses_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Speed(hard=Pace(1, 1, 9), usual=Pace(2, 1, 9), easy=Pace(3, 1, 9), alone=Pace(1, 1, 0),
                 nodes=1, tokens_per_pass=None)  # fmt: skip
    monkeypatch.setattr("specexec_cli.planning.alternatives.predicted", lambda *arguments: slow)
    ran = run_cli("plan", "llama2-7b-chat", "--draft", "self", "--ram", "12GB")
    assert ran.code == 2
    assert "is expected to be slower here than no draft model: 0.20 against 1.0 tok/s" in ran.error
    assert "0.30 at best. Give --draft suffix, or --draft auto" in ran.error
    ran = run_cli("plan", "llama2-7b-chat", "--draft", "suffix", "--ram", "12GB")
    assert ran.code == 0


def test_an_own_copy_in_memory_hardly_faster_than_the_ssd_is_refused_in_one_line() -> None:
    """A tree takes longer to draft than so fast an SSD takes to read the target again and again."""
    flops = dict.fromkeys(("float32", "bfloat16"), ((1, 1e11), (256, 1e11)))
    save_rates(replace(new_rates(), memory_bytes_per_s=8e9, flops=flops), rates_file())
    asked = ("plan", "llama2-7b-chat", "--draft", "self", "--ram", "12GB",
             "--vram", "0GB")  # fmt: skip
    ran = run_cli(*asked, "--ssd", "7GB/s")
    assert ran.code == 2
    assert ran.error.startswith("the target's own copy takes ")
    assert "so --draft self is expected to be slower here than no draft model: " in ran.error
    assert ran.error.endswith(" at best. Give --draft suffix, or --draft auto")
    assert run_cli(*asked, "--ssd", "1GB/s").code == 0, "memory eight times as fast as the SSD"


@pytest.mark.parametrize("draft", ["self", "self-2"])
def test_a_target_in_4_bits_has_no_own_copy_whatever_room_there_is(draft: str) -> None:
    line = (
        f"--draft {draft}: the target's weights are quantized already, so a copy in fewer bits "
        "would hardly be smaller and much worse. Give another --draft, such as --draft suffix"
    )
    for ram in ("4GB", "64GB"):
        ran = run_cli("plan", "llama2-7b-chat-gptq", "--draft", draft, "--ram", ram)
        assert (ran.code, ran.error) == (2, line)
    ran = run_cli("generate", "x", "-m", "demo-target-gptq", "--draft", draft)
    assert (ran.code, ran.error) == (2, line)


def test_plan_says_why() -> None:
    result = run_cli("plan", "demo-target", "--draft", "auto")
    assert "demo-draft" in result.err
    assert "self-2" in result.err


@pytest.mark.parametrize(
    ("draft", "vram_gb", "shares"),
    [("self", 16, False), ("self", 18, True), ("self-2", 12, True), ("self-3", 18, True)],
)
def test_a_copy_drafts_with_the_layers_that_stay_on_a_gpu_where_that_is_faster(
    draft: str, vram_gb: int, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they do, copies of them are not loaded, and more layers stay."""
    here = described_site(ram_bytes=64 * 10**9, vram_bytes=vram_gb * 10**9)
    request = Request(model="llama2-7b-chat", draft=draft)
    chosen = resolve(request, here)
    assert chosen.work.shares_layers == shares
    shown = run_cli("plan", "llama2-7b-chat", "--draft", draft, "--vram",
                    f"{vram_gb}GB", "--ram", "64GB")  # fmt: skip
    assert ("draft in the place of their copies" in " ".join(shown.out.split())) == shares
    plans, speeds = {}, {}
    for way in (True, False):

        def first(*given: object, way: bool = way) -> SimpleNamespace:
            [plan] = [each for each in given if isinstance(each, Plan)]
            return SimpleNamespace(typical=float(plan.work.shares_layers == way))

        with monkeypatch.context() as patch:
            patch.setattr(speed_module, "predict", first)
            found = resolve(request, here)
        assert found.work.shares_layers == way
        plans[way], speeds[way] = found, predicted(found).typical
    assert (speeds[True] > speeds[False]) == shares
    stay = {way: found.plan.tiers.count("resident") for way, found in plans.items()}
    sizes = chosen.draft.sizes if chosen.draft is not None else None
    assert sizes is not None
    copies = {way: dict(found.plan.vram)["draft model"] for way, found in plans.items()}
    assert copies[False] == sizes.total - sizes.head
    assert copies[True] == copies[False] - stay[True] * sizes.layers[0]
    assert stay[True] > stay[False]
    for way, found in plans.items():
        own = [row for row in found.placement if row.model == "draft"]
        assert sum(row.stored_bytes for row in own) == copies[way]
        assert found.plan.shared_layers == (stay[True] if way else 0)


@pytest.mark.parametrize("offload", ["auto", "none"])
def test_where_all_layers_stay_copies_of_all_are_loaded(offload: OffloadMode) -> None:
    """Small layers take as long to start as to read, so that copies seem to gain nothing."""
    here = described_site(ram_bytes=64 * 10**9, vram_bytes=24 * 10**9)
    request = Request(model="demo-target", draft="self", offload=offload, dtype="bfloat16")
    found = resolve(request, here)
    assert set(found.plan.tiers) == {"resident"}
    assert found.work.shares_tables
    assert (found.work.shares_layers, found.plan.shared_layers) == (False, 0)


def test_on_a_cpu_a_copy_takes_the_tables_of_its_target() -> None:
    """And no layers: RAM would be read for each draft step as long as for a pass."""
    found = resolve(Request(model="llama2-7b-chat", draft="self"), site(16e9, 20e9))
    assert found.draft is not None
    sizes = found.draft.sizes
    assert "ram" in found.plan.tiers
    norm = sizes.resident - sizes.head - sizes.table
    assert dict(found.plan.ram)["draft model"] == sum(sizes.layers) + norm
    own = [row.stored_bytes for row in found.placement if row.model == "draft"]
    assert own == [0, *sizes.layers, 0]
