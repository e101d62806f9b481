"""scripts/first_gpu: its report of faked steps, what passes, and its own steps on the stand-in."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from computer import Computer
from fake_cuda import fake_cuda
from slot_toys import few_slots

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import first_gpu_passes as passes
import first_gpu_plan as plan
import first_gpu_report as report
import first_gpu_steps as own
from first_gpu_report import Check, Step

from specexec_cli.config import TreeConfig
from specexec_cli.core import StepResult
from specexec_cli.device import GpuInfo
from specexec_cli.models.own_copy import own_copy
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.machine import described_site
from specexec_cli.planning.machine_rates import GpuRates, card_named
from specexec_cli.planning.pass_time import pass_launches, pass_time
from specexec_cli.planning.request import Request
from specexec_cli.planning.resolve import resolve
from specexec_cli.planning.sizes import ExpertBytes, ModelBytes
from specexec_cli.planning.speed import TokensPerPass, with_trees

SCRIPTS = Path(__file__).parents[2] / "scripts"
FEW_SLOTS = 256
GPU = GpuInfo(0, "Card", 24 * 10**9, 23 * 10**9, 4, 16, "570.86.15")


def step(name: str, code: str, **changes: Any) -> Step:
    """A step that runs a line of Python."""
    made = Step(name=name, title=f"Step {name}", command=(sys.executable, "-c", code), limit_s=60,
                judge=report.exit_status)  # fmt: skip
    return replace(made, **changes)


def run(steps: Sequence[Step], folder: Path) -> tuple[list[report.Outcome], str]:
    outcomes = report.run_steps(steps, folder / "report.md", "# heading", folder / "logs")
    return outcomes, (folder / "report.md").read_text()


def test_a_step_that_fails_ends_no_other(tmp_path: Path) -> None:
    checks = json.dumps({"checks": [{"name": "a", "passed": True, "found": "1", "wanted": "1"}]})
    outcomes, text = run(
        [
            step("good", f"print('first'); print({checks!r})", judge=report.own_checks),
            step("bad", "print('what it said'); raise SystemExit(3)"),
            step("garbled", "print('no json')", judge=report.own_checks),
            step("absent", "", obstacle=lambda: "it has no wings"),
            step("missing", "", command=("/no/such/program",)),
            step("last", "import os; assert os.environ['X'] == '1'", environment={"X": "1"}),
        ],
        tmp_path,
    )
    assert [each.verdict for each in outcomes] == [
        "pass", "FAIL", "FAIL", "not possible", "FAIL", "pass"
    ]  # fmt: skip
    assert "- pass: a: 1 (wanted: 1)" in text
    assert "- FAIL: exit status: 3 (wanted: 0)\n\n```\nwhat it said\n```" in text
    assert "exit status 0, and its output cannot be read" in text
    assert "Not possible here: it has no wings" in text
    assert "/no/such/program: No such file or directory" in text
    assert "| Step last | pass |" in text
    assert text.rstrip().endswith("**FAIL**: 2 steps passed, 3 failed, 1 not possible.")
    assert (tmp_path / "logs" / "bad.log").read_text() == "what it said\n"


def test_nothing_that_was_not_possible_counts_as_passed(tmp_path: Path) -> None:
    passed, _ = run([step("a", ""), step("b", "", obstacle=lambda: "no")], tmp_path)
    assert report.verdict(passed).startswith("**pass**: 1 steps passed, 0 failed, 1 not")
    skipped, _ = run([step("b", "", obstacle=lambda: "no")], tmp_path)
    assert report.verdict(skipped).startswith("**FAIL**")


def test_a_step_that_takes_too_long_ends_with_all_it_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "print(child.pid, flush=True); time.sleep(600)"
    )
    began = time.monotonic()
    outcomes, text = run([step("late", code, limit_s=6.0), step("next", "")], tmp_path)
    assert time.monotonic() - began < 200
    assert [each.verdict for each in outcomes] == ["FAIL", "pass"]
    assert "- FAIL: time: stopped after 6 s" in text
    child = int((tmp_path / "logs" / "late.log").read_text().split()[0])
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z", "its child runs on"


def test_the_report_is_written_as_steps_end(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    code = (
        f"text = open({str(path)!r}).read(); assert 'Step one' in text and 'Step two' not in text"
    )
    outcomes, _ = run([step("one", ""), step("two", code)], tmp_path)
    assert outcomes[1].verdict == "pass"


def test_an_interrupted_run_says_where(tmp_path: Path) -> None:
    def interrupted() -> str | None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([step("one", ""), step("two", "", obstacle=interrupted)], tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "## Step one" in text
    assert "Interrupted in step 2 of 2" in text


def test_a_report_ends_with_the_lines_that_proved_right_or_wrong(tmp_path: Path) -> None:
    def judged(passed: bool, ends: int = 0) -> report.Judge:
        ended = report.exit_status(ends, "")
        return lambda status, output: [
            Check("a pass", True, "1"), Check("a wait", passed, "2"), *ended
        ]  # fmt: skip

    def impossible(status: int, output: str) -> list[Check]:
        raise report.NotPossibleError("it is small")

    steps = [
        step("one", "", judge=judged(True)), step("two", "", judge=judged(False)),
        step("ended", "", judge=judged(True, 9)), step("late", "", judge=impossible),
        step("garbled", "print('no json')", judge=report.own_checks),
        step("absent", "", obstacle=lambda: "no wings"),
        step("slow", "import time; time.sleep(60)", limit_s=0.5),
        step("missing", "", command=("/no/such/program",)),
    ]  # fmt: skip
    both = ("pass", "wait")
    claims = [
        report.Claim("A.", {"one": ("pass",), "two": ("pass",)}),
        report.Claim("B.", {"one": ("wait",), "two": both}),
        report.Claim("C.", {"one": both, "absent": both, "late": both}),
        report.Claim("D.", {"one": both, "three": both}), report.Claim("E.", {"one": ("start",)}),
        report.Claim("F.", {"one": both, "ended": both}),
        report.Claim("G.", {"garbled": (), "slow": (), "missing": ()}),
        report.Claim("H.", {"absent": both, "late": both}),
        report.Claim("I.", {"two": both, "three": both}),
    ]  # fmt: skip
    report.run_steps(steps, tmp_path / "report.md", "# heading", tmp_path / "logs", claims)
    lines = (tmp_path / "report.md").read_text().strip().splitlines()
    broken = (f"{name} did not run to its end" for name in ("garbled", "slow", "missing"))
    assert lines[-len(claims) :] == [
        "- right: A.", "- **wrong**: B. (a wait: 2)", "- right: C.",
        "- not judged, because three was not run: D.",
        "- not judged, because one has no check 'start': E.",
        "- not judged, because ended did not run to its end: F.",
        f"- not judged, because {'; '.join(broken)}: G.",
        "- not judged, because absent was not possible: no wings; late was not possible: it is "
        "small: H.",
        "- **wrong**: I. (a wait: 2)",
    ]  # fmt: skip


# Steps whose checks hold_claims below is given by some test, as these name them.
HELD = {
    "tests",
    "environment",
    "growth",
    "self-draft",
    "interrupt-capture",
    "passes",
    "offload-ram",
    "offload-ssd",
    "offload-tiers",
    "memory-8",
    "memory-12",
    "memory-24",
}


def hold_claims(checks: Sequence[Check], *steps: str) -> None:
    """What claims name of these steps is among their checks."""
    words = {word for claim in plan.CLAIMS for name in steps for word in claim.proofs.get(name, ())}
    assert words
    assert set(steps) <= HELD
    for word in words:
        assert any(word in check.name for check in checks), word


def test_what_is_claimed_stands_in_the_documentation_and_is_tried(tmp_path: Path) -> None:
    text = (SCRIPTS.parent / "docs" / "gpu.md").read_text()
    said = " ".join(text.replace("*", "").split())
    for claim in plan.CLAIMS:
        assert claim.line in said
        assert all(claim.proofs.values())
    assert {name for claim in plan.CLAIMS for name in claim.proofs} == HELD
    assert {each.name for each in plan.steps(tmp_path, 20)} >= HELD


def verdicts(checks: Sequence[Check]) -> list[bool]:
    return [check.passed for check in checks]


def offload_report(stream: float, worst: float, same: bool = True) -> str:
    """As much of bench_offload's last line as is judged."""
    found = {
        "stream": {"ratio": {"p50": stream}}, "same_tokens": same,
        "passes": [{"rows": 1, "ratio": {"p50": 1.0}}, {"rows": 16, "ratio": {"p50": worst}}],
        "raw": {"bytes_per_s": {"p50": 25e9}},
        "decode": {name: {"tokens_per_s": 1.5, "tau": 2.0, "over_pass": {"p50": 1.1}}
                   for name in ("autoregressive", "specexec")},
    }  # fmt: skip
    return f"a table\n{json.dumps(found)}\n"


@pytest.mark.parametrize(
    ("output", "status", "expected"),
    [
        (offload_report(1.04, 1.08), 0, [True, True, True, True, True]),
        (offload_report(1.06, 1.08), 0, [True, False, True, True, True]),
        (offload_report(1.04, 1.11), 0, [True, True, False, True, True]),
        (offload_report(1.04, 1.08, same=False), 0, [True, True, True, False, True]),
        (offload_report(1.04, 1.08), 1, [False, True, True, True, True]),
    ],
)
def test_streams_are_held_against_the_bare_rate(
    output: str, status: int, expected: list[bool]
) -> None:
    checks = plan.offload_checks(status, output, plan.RAM_SHARE)
    assert verdicts(checks) == expected
    hold_claims(checks, "offload-ram", "offload-ssd", "offload-tiers")
    assert checks[-1].found.endswith("2.0 an iteration of 1.10 passes")


def kernel_report(dequantize: float, few: float, many: float) -> str:
    def case(name: str, kernel: str, share: float, rows: int = 0) -> dict[str, Any]:
        runs = {"PyTorch": {"of_floor": 0.1}, kernel: {"of_floor": share}}
        return {"case": name, "rows": rows, "implementations": runs}

    cases = [
        case("dequantize", "Triton", dequantize),
        case("linear, 1 rows", "fused", few, 1),
        case("linear, 16 rows", "fused", few, 16),
        case("linear, 64 rows", "fused", many, 64),
    ]
    return json.dumps({"results": cases})  # fmt: skip


def test_kernels_are_held_against_the_memorys_rate() -> None:
    checks = plan.kernel_checks(0, kernel_report(0.81, 0.59, 0.01))
    assert verdicts(checks) == [True, True, False, False], "many rows are not judged"
    with pytest.raises(ValueError, match="missing"):
        plan.kernel_checks(0, json.dumps({"results": []}))


@pytest.mark.parametrize(
    ("output", "status", "passed"),
    [
        ("....\n104 passed, 3 skipped in 60.1s", 0, True),
        ("====== 2 failed, 104 passed in 60.1s ======", 1, False),
        ("no tests ran in 3.2s", 0, False),
    ],
)
def test_tests_count_where_some_ran(output: str, status: int, passed: bool) -> None:
    checks = plan.pytest_checks(status, output)
    assert verdicts(checks) == [passed]
    hold_claims(checks, "tests")


@pytest.mark.parametrize(
    ("output", "status"),
    [("====== 612 deselected in 3.2s ======", 5), ("Fatal Python error: Aborted", -6)],
)
def test_tests_that_broke_off_have_no_result(output: str, status: int) -> None:
    (check,) = plan.pytest_checks(status, output)
    assert (check.name, check.passed, check.found) == ("exit status", False, f"{status}, {output}")


@pytest.mark.parametrize(
    ("output", "status", "passed"),
    [
        ("12 passed\n========= ERROR SUMMARY: 0 errors", 0, True),
        ("12 passed\n========= ERROR SUMMARY: 4 errors", 9, False),
        ("12 passed", 0, False),  # nobody watched
    ],
)
def test_a_sanitizer_must_have_watched(output: str, status: int, passed: bool) -> None:
    assert verdicts(plan.sanitizer_checks(status, output)) == [passed]


def test_every_step_can_be_asked_for_alone(tmp_path: Path) -> None:
    steps = plan.steps(tmp_path, 20)
    names = [each.name for each in steps]
    assert len(set(names)) == len(names) == 19
    assert [each.name for each in plan.only(steps, ["trees", "text"])] == ["text", "trees"]
    with pytest.raises(ValueError, match="--only tress: the steps are environment, doctor"):
        plan.only(steps, ["tress"])
    for each in steps:
        assert Path(each.command[0]).name in ("compute-sanitizer", Path(sys.executable).name)
        scripts = [part for part in each.command if part.endswith(".py")]
        assert all(Path(part).is_file() for part in scripts)
    on_rig = {each.name: each.obstacle() for each in steps if "rig" in " ".join(each.command)}
    assert on_rig["memory-24"] == "the rig was not written, see its step"
    assert plan.rig_layers(10**12, 10**12) == plan.RIG_LAYERS
    assert plan.rig_layers(12 * 10**9, 10**12) == 9


def first_gpu() -> Any:
    """The script as a module; its name has no suffix."""
    loader = importlib.machinery.SourceFileLoader("first_gpu", str(SCRIPTS / "first_gpu"))
    spec = importlib.util.spec_from_loader("first_gpu", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_without_a_gpu_there_is_one_line_and_no_report(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, str(SCRIPTS / "first_gpu")], cwd=tmp_path,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_gpu_that_torch_does_not_see_is_told_why(
    computer: Computer, capsys: pytest.CaptureFixture[str]
) -> None:
    module = first_gpu()
    computer.has_cards(GPU)
    computer.torch_is("9.9", cuda="13.0")
    assert module.main([]) == 2
    said = capsys.readouterr().err
    assert "torch does not see the Card" in said
    assert "needs driver R580 or newer" in said


def test_the_script_runs_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = first_gpu()
    monkeypatch.setattr(module, "obstacle", lambda: None)
    monkeypatch.setattr(module, "steps", lambda work, layers: [step("a", ""), step("b", "1 / 0")])
    folders = ["--out", str(tmp_path / "out.md"), "--work", str(tmp_path / "work")]
    assert module.main([*folders, "--only", "a"]) == 0
    assert "1 steps passed, 0 failed" in capsys.readouterr().out
    assert module.main(folders) == 1
    assert "ZeroDivisionError" in (tmp_path / "out.md").read_text()
    assert module.main([*folders, "--only", "c"]) == 2
    assert "the steps are a, b" in capsys.readouterr().err


@pytest.fixture(name="few_slots")
def short_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft steps attend to all slots of their buffers: so many as short texts need."""
    few_slots(monkeypatch, FEW_SLOTS, planned=FEW_SLOTS)


def test_caches_grow_within_a_text(few_slots: None) -> None:
    with fake_cuda():
        checks = own.growth_step(FEW_SLOTS)
    assert verdicts(checks) == [True, True], checks
    hold_claims(checks, "growth")


def test_a_copy_that_drafts_over_the_target_s_rows(
    few_slots: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own_copy(read_checkpoint(own.DEMO / "target"), 4)  # faster where nothing is watched
    with fake_cuda():
        checks = own.self_draft_step(8)
    assert verdicts(checks) == [True] * 4, checks
    hold_claims(checks, "self-draft")


def test_large_trees_over_streamed_layers() -> None:
    with fake_cuda():
        checks = own.trees_step()
    assert verdicts(checks) == [True, True], checks


@pytest.mark.parametrize("where", ["copy", "capture"])
def test_an_interrupted_session_writes_the_text_of_the_cpu(where: str, few_slots: None) -> None:
    with fake_cuda():
        checks = own.interrupt_step(where)
    assert verdicts(checks) == [True, True], checks
    hold_claims(checks, "interrupt-capture")


def test_a_session_of_an_act_order_checkpoint(few_slots: None) -> None:
    with fake_cuda():
        checks = own.text_step()
    assert verdicts(checks) == [True, True, True], checks


OF_TWO = "the plan's 129 rows over 128"  # of passes of 128 and of 129 rows
PARTS = ("pass", "GPU busy", "host", "kernels started", "waits")


def test_passes_and_iterations_are_held_against_the_plan_part_by_part(
    few_slots: None, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    steps = [iteration(9.0), iteration(1.0), replace(iteration(9.0), tree_nodes=4), iteration(9.0)]
    texts = list[str]()  # trees take the stand-in long: what is done with their steps is tried

    def decoded(session: object, prompt: str, tree: TreeConfig, count: int) -> list[StepResult]:
        assert tree == passes.TREE
        texts.append(prompt)
        return steps

    monkeypatch.setattr(passes, "decoded", decoded)
    own.write_act_order(tmp_path)
    rates = GpuRates(card="stand-in", memory_bytes_per_s=1e12, tensor_flops=1e14)
    with fake_cuda():
        checks = passes.passes_step(tmp_path, [1], rates, repeats=1, count=2)
    names = [check.name for check in checks]
    of_rows = [f"the plan's 1 rows, {part}" for part in PARTS]
    of_nodes = [f"the plan's 127 nodes, {part}" for part in ("iteration", "drafting")]
    assert names == ["layers", "memory", *of_rows, *of_nodes, "tokens an iteration"]
    assert checks[-1].found == "3.0, of 2 iterations"  # whole trees between prompt and end
    assert len(set(texts)) == 3  # the first one warms up
    assert checks[-3].found.endswith(": 1000 ms")
    hold_claims([*checks, Check(OF_TWO, True, "")], "passes")
    assert "1 rows: pass" in capsys.readouterr().out
    assert report.own_checks(0, json.dumps(passes.report(checks))) == checks


def test_memory_that_can_be_pinned_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "PINNED_BYTES", 1 << 21)
    with fake_cuda():
        checks = own.environment_step()
    hold_claims(checks, "environment")


def test_memory_is_held_against_plan_and_card(
    few_slots: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.write_act_order(tmp_path)
    monkeypatch.setattr(own, "tokens", lambda *args: [0] * 24)  # what a text takes is not asked
    with fake_cuda() as runtime:
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *args: None)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: runtime.memory.peak)
        checks = own.memory_step(6, tmp_path)
        with pytest.raises(report.NotPossibleError, match="a card of 8 GB holds no cap of 24 GB"):
            own.memory_step(24, tmp_path)
    assert verdicts(checks) == [True] * 4, checks
    hold_claims(checks, "memory-8", "memory-12", "memory-24")
    with pytest.raises(report.NotPossibleError, match="small"):
        report.own_checks(0, json.dumps({"not_possible": "it is small"}))


@pytest.mark.parametrize(("card", "streams"), [("4090", False), ("4060", True)])
def test_passes_as_the_plan_has_them_prove_it_right_and_others_wrong(
    card: str, streams: bool, computer: Computer
) -> None:
    site = described_site(ram_bytes=64 * 10**9, card=card_named(card))
    plan = resolve(Request(model="qwen2.5-14b-instruct-gptq"), site).plan
    streamed = sum(tier != "resident" for tier in plan.tiers)
    assert bool(streamed) == streams
    found = []
    for rows in (128, 129):
        told = pass_time(plan, rows)
        started = pass_launches(plan.target, None, streamed=streamed)
        busy_s = max(told.memory_s, told.compute_s) + told.layers_s
        count = round(started.operations + started.kernels)
        found.append(
            passes.Passes(
                rows, told.seconds, told.starting_s, busy_s, {"kernel": (count, busy_s)},
                round(started.waits),
            )
        )  # fmt: skip
    checks = passes.points(plan, found)
    assert [check.name for check in checks] == [
        *(f"the plan's {rows} rows, {part}" for rows in (128, 129) for part in PARTS),
        OF_TWO,
    ]
    assert all(verdicts(checks)), checks
    slow = [replace(each, pass_s=2 * each.pass_s) for each in found]
    assert [check.name for check in passes.points(plan, slow) if not check.passed] == [
        "the plan's 128 rows, pass", "the plan's 129 rows, pass",
    ]  # fmt: skip


def test_a_point_of_the_plan_is_right_within_a_quarter() -> None:
    point = passes.point("pass", 1.2e-3, 1e-3, "ms", 1e3)
    assert (point.passed, point.found) == (True, "right: 1.2 ms")
    point = passes.point("pass", 1e-3, 1.3e-3, "ms", 1e3)
    assert (point.passed, point.found, point.wanted) == (
        False, "wrong: 1 ms", "the plan says 1.3 ms",
    )  # fmt: skip


def test_texts_part_where_they_part() -> None:
    assert own.same("x", [1, 2], [1, 2]).passed
    assert own.same("x", [1, 3], [1, 2]).found == "they part at token 1 of 2"
    assert own.same("x", [1], [1, 2]).found == "they part at token 1 of 2"


def iteration(seconds: float, tokens: int = 3) -> StepResult:
    return StepResult(
        tokens=(1,) * tokens, drafted=(True,) * tokens, tree_nodes=127, tree_depth=9,
        draft_s=seconds / 4, verify_s=seconds * 3 / 4, bytes_streamed=0, pending_rows=1,
    )  # fmt: skip


def test_iterations_as_the_plan_has_them_prove_it_right_and_others_wrong(
    computer: Computer,
) -> None:
    site = described_site(ram_bytes=64 * 10**9, card=card_named("4090"))
    pair = resolve(Request(model="qwen2.5-14b-instruct-gptq"), site)
    assert pair.draft is not None
    rate = TokensPerPass(3.0, 3.0, 3.0, "")
    told = with_trees(pair.plan, pair.draft.sizes, passes.TREE, passes.NODES, rate).usual
    planned = replace(iteration(1.0), draft_s=told.draft_s, verify_s=told.pass_s)
    checks = passes.iteration_points(pair.plan, pair.draft.sizes, [planned] * 3)
    assert verdicts(checks) == [True] * 3, checks
    slow = replace(planned, draft_s=2 * told.draft_s)
    checks = passes.iteration_points(pair.plan, pair.draft.sizes, [slow] * 3)
    assert [check.name for check in checks if not check.passed][-1] == (
        "the plan's 127 nodes, drafting"
    )


def test_iterations_that_no_text_had_are_neither_right_nor_wrong(
    computer: Computer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    site = described_site(ram_bytes=64 * 10**9, card=card_named("4090"))
    pair = resolve(Request(model="qwen2.5-14b-instruct-gptq"), site)
    assert pair.draft is not None
    checks = passes.iteration_points(pair.plan, pair.draft.sizes, [])
    assert "no text had a tree of 127 nodes" in capsys.readouterr().out
    (claim,) = (each for each in plan.CLAIMS if each.line == "iteration = pass + drafting")
    (outcome,), _ = run([step("passes", "", judge=lambda status, output: checks)], tmp_path)
    assert claim.verdict([outcome]).startswith("- not judged, because passes has no check 'nodes")


def test_kernels_have_the_weights_and_products_of_the_calls_that_they_had() -> None:
    size = ModelBytes(
        layers=(50,), resident=0, layer_params=100, largest_matrix=0, active_params=100,
        kv_elements=0, hidden=5, intermediate=8, vocab=4,
    )  # fmt: skip
    counts = {"_product_kernel": 6, "nvjet_128x128": 3, "nvjet_64x64": 1, "copy": 9, "_unpack": 7}
    kernels = {name: (count, 1.0) for name, count in counts.items()}
    found = passes.Passes(129, 1.0, 1.0, 1.0, kernels, 0)
    flops = {name: passes.product_flops(name, size, found) for name in counts}
    assert sum(flops.values()) == 2 * (100 + 20) * 129  # each once
    assert flops == {
        "_product_kernel": 0.6 * 30960, "nvjet_128x128": 0.3 * 30960,
        "nvjet_64x64": pytest.approx(0.1 * 30960), "copy": 0.0, "_unpack": 0.0,
    }  # fmt: skip
    moved = {name: passes.weight_bytes(name, size, found) for name in counts}
    assert moved == {
        "_product_kernel": pytest.approx(0.6 * 2 * 120 / 2), "_unpack": 250, "copy": 0,
        "nvjet_128x128": pytest.approx(0.3 * 2 * 120 * 2),
        "nvjet_64x64": pytest.approx(0.1 * 2 * 120 * 2),
    }  # fmt: skip
    mixture = replace(size, experts=ExpertBytes(layers=(40,), count=4, chosen=1, largest=10))
    one = replace(found, rows=1, kernels={"_product_kernel": (6, 1.0)})
    assert passes.weight_bytes("_product_kernel", mixture, one) == pytest.approx(
        (20 + 80 / 4 + 20) / 2
    )
