"""scripts/first_gpu: its report of faked steps, what passes, and its own steps on the stand-in."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import re
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

from specexec_cli.device import GpuInfo
from specexec_cli.models.own_copy import own_copy
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.machine import described_site
from specexec_cli.planning.machine_rates import GpuRates, card_named
from specexec_cli.planning.pass_time import pass_launches, pass_time
from specexec_cli.planning.request import Request
from specexec_cli.planning.resolve import resolve
from specexec_cli.planning.sizes import ModelBytes

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
    def judged(passed: bool) -> report.Judge:
        return lambda status, output: [Check("a pass", True, "1"), Check("a wait", passed, "2")]

    steps = [step("one", "", judge=judged(True)), step("two", "", judge=judged(False))]
    claims = [
        report.Claim("Passes are short.", "one|two", "pass"), report.Claim("No waits.", "one|two"),
        report.Claim("One has none.", "one$"), report.Claim("Others are.", "three"),
        report.Claim("It starts.", "two", "start"),
    ]  # fmt: skip
    report.run_steps(steps, tmp_path / "report.md", "# heading", tmp_path / "logs", claims)
    lines = (tmp_path / "report.md").read_text().strip().splitlines()
    assert lines[-len(claims) :] == [
        "- right: Passes are short.", "- **wrong**: No waits. (a wait: 2)",
        "- right: One has none.", "- not tried: Others are.", "- not tried: It starts.",
    ]  # fmt: skip


def test_what_is_claimed_stands_in_the_documentation_and_is_tried(tmp_path: Path) -> None:
    text = (SCRIPTS.parent / "docs" / "gpu.md").read_text()
    said = " ".join(text.replace("*", "").split())
    names = [each.name for each in plan.steps(tmp_path, 20)]
    for claim in plan.CLAIMS:
        assert claim.line in said
        assert any(re.match(claim.steps, name) for name in names), claim


def verdicts(checks: Sequence[Check]) -> list[bool]:
    return [check.passed for check in checks]


def offload_report(stream: float, worst: float, same: bool = True) -> str:
    """As much of bench_offload's last line as is judged."""
    found = {
        "stream": {"ratio": {"p50": stream}}, "same_tokens": same,
        "passes": [{"rows": 1, "ratio": {"p50": 1.0}}, {"rows": 16, "ratio": {"p50": worst}}],
        "raw": {"bytes_per_s": {"p50": 25e9}},
        "decode": {name: {"tokens_per_s": 1.5, "tau": 2.0}
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
    assert verdicts(plan.offload_checks(status, output, plan.RAM_SHARE)) == expected


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
        ("====== 612 deselected in 3.2s ======", 5, False),
    ],
)
def test_tests_count_where_some_ran(output: str, status: int, passed: bool) -> None:
    assert verdicts(plan.pytest_checks(status, output)) == [passed]


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


def test_a_copy_that_drafts_over_the_target_s_rows(
    few_slots: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own_copy(read_checkpoint(own.DEMO / "target"), 4)  # faster where nothing is watched
    with fake_cuda():
        checks = own.self_draft_step(8)
    assert verdicts(checks) == [True] * 4, checks


def test_large_trees_over_streamed_layers() -> None:
    with fake_cuda():
        checks = own.trees_step()
    assert verdicts(checks) == [True, True], checks


@pytest.mark.parametrize("where", ["copy", "capture"])
def test_an_interrupted_session_writes_the_text_of_the_cpu(where: str, few_slots: None) -> None:
    with fake_cuda():
        checks = own.interrupt_step(where)
    assert verdicts(checks) == [True, True], checks


def test_a_session_of_an_act_order_checkpoint(few_slots: None) -> None:
    with fake_cuda():
        checks = own.text_step()
    assert verdicts(checks) == [True, True, True], checks


PARTS = ("pass", "GPU busy", "host", "kernels started", "waits")


def test_passes_are_held_against_the_plan_part_by_part(
    few_slots: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own.write_act_order(tmp_path)
    rates = GpuRates(card="stand-in", memory_bytes_per_s=1e12, tensor_flops=1e14)
    with fake_cuda():
        checks = passes.passes_step(tmp_path, [1], rates, repeats=1)
    names = [check.name for check in checks]
    assert names == ["layers", "memory", *(f"the plan's 1 rows, {part}" for part in PARTS)]
    assert "1 rows: pass" in capsys.readouterr().out
    assert report.own_checks(0, json.dumps(passes.report(checks))) == checks


def test_passes_as_the_plan_has_them_prove_it_right_and_others_wrong(computer: Computer) -> None:
    site = described_site(ram_bytes=64 * 10**9, card=card_named("4090"))
    plan = resolve(Request(model="qwen2.5-14b-instruct-gptq"), site).plan
    found = []
    for rows in (128, 129):
        told, started = pass_time(plan, rows), pass_launches(len(plan.tiers), None)
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
        "the plan's 129 rows over 128",
    ]
    assert all(verdicts(checks)), checks
    slow = [replace(each, pass_s=2 * each.pass_s) for each in found]
    assert [check.name for check in passes.points(plan, slow) if not check.passed] == [
        "the plan's 128 rows, pass", "the plan's 129 rows, pass",
    ]  # fmt: skip


def test_a_point_of_the_plan_is_right_within_a_quarter() -> None:
    size = ModelBytes(
        layers=(50,), resident=0, layer_params=100, largest_matrix=0, active_params=100,
        kv_elements=0, hidden=8, intermediate=8, vocab=8,
    )  # fmt: skip
    assert passes.weight_bytes("_product_kernel", size, 129) == 100
    assert passes.weight_bytes("_unpack_kernel", size, 129) == 250
    assert passes.weight_bytes("nvjet_hsh_128x128", size, 1) == 200
    assert passes.weight_bytes("elementwise", size, 1) == 0
    assert passes.product_flops("_product_kernel", size, 129) == 2 * 100 * 129
    assert passes.product_flops("nvjet_hsh_128x128", size, 1) == 2 * 100
    assert passes.product_flops("_unpack_kernel", size, 129) == 0
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
