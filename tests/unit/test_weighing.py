"""Which draft is taken where it is left to the planner: the fastest one expected, and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cli_runner import run_cli

import specexec_cli
from specexec_cli.catalog.registry import load_registry
from specexec_cli.config import Method
from specexec_cli.planning.pair import choose_pair
from specexec_cli.planning.request import Request
from specexec_cli.planning.resolve import resolve
from specexec_cli.planning.site import Setting, Site, described_site
from specexec_cli.planning.tokens import predicted
from specexec_cli.planning.weighing import weighed, with_best_draft


@pytest.fixture(autouse=True)
def _nothing_learned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def site(ram_bytes: float, memory_bytes_per_s: float) -> Site:
    """A CPU beside an SSD of 2 GB/s."""
    found = described_site(ram_bytes=int(ram_bytes), vram_bytes=0, ssd_bytes_per_s=2e9)
    settings = {**found.settings, "memory": Setting(memory_bytes_per_s, "given")}
    return replace(found, settings=settings, host_bytes_per_s=memory_bytes_per_s)


def test_the_fastest_of_those_at_hand_is_taken_and_the_others_are_named() -> None:
    request, here = Request(target="llama2-7b-chat", draft="auto"), site(12e9, 40e9)
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
    request, told = Request(target=str(demo), draft="auto"), []
    assert with_best_draft(request, site(2e9, 20e9), told.append).draft == "suffix"
    assert "no draft model is expected to pay" in told[0]
    assert "none" in told[0]


def test_a_copy_that_does_not_fit_is_no_candidate() -> None:
    request = Request(target="llama2-7b-chat", draft="auto")
    found = {one.draft: one for one in weighed(request, site(7e9, 40e9))}
    assert found["self"].speed is None
    assert "draft model" in found["self"].obstacle
    assert not found["self"].pays


def test_a_quantized_target_has_no_copy_and_a_draft_model_on_this_machine_is_weighed() -> None:
    here = site(4e9, 40e9)
    names = {one.draft for one in weighed(Request(target="demo-target", draft="auto"), here)}
    assert names == {"self", "self-3", "self-2", "demo-draft"}
    packed = weighed(Request(target="demo-target-gptq", draft="auto"), here)
    assert "self" not in {one.draft for one in packed}


def test_a_copy_that_cannot_be_made_is_no_candidate() -> None:
    request, here = Request(target="demo-target", draft="auto"), site(4e9, 40e9)
    found = weighed(request, here, lambda target, bits: "no" if bits == 4 else "")
    assert {one.draft: one.obstacle for one in found if one.speed is None} == {"self": "no"}


def test_the_prompt_takes_memory_too() -> None:
    request, here = Request(target="llama2-7b-chat", draft="auto"), site(12e9, 40e9)
    long = replace(request, prompt="word" * 5000, context_tokens=100)
    assert weighed(long, here) == weighed(replace(request, context_tokens=5100), here)
    assert weighed(long, here) != weighed(replace(request, context_tokens=100), here)


@pytest.mark.parametrize("method", ["specexec", "autoregressive"])
def test_what_was_not_left_open_stays(method: Method) -> None:
    for draft in ("demo-draft", None, "suffix"):
        request = Request(target="demo-target", draft=draft, method=method)
        assert with_best_draft(request, site(4e9, 40e9)) is request


def test_before_it_is_weighed_nothing_but_the_target_is_needed() -> None:
    pair = choose_pair(load_registry(None), Request(target="llama2-7b-chat", draft="auto"))
    assert pair.draft is None


def test_plan_says_why() -> None:
    result = run_cli("plan", "--target", "demo-target", "--draft", "auto")
    assert "demo-draft" in result.err
    assert "self-2" in result.err
