"""A team's threads share a kernel's strips, whichever of them join in time."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from specexec_kernels import cpu_jit, cpu_team_ir
from specexec_kernels.cpu_team import Team

pytestmark = pytest.mark.skipif(not cpu_team_ir.has_team(), reason="no team on this system")

# int64 arguments: claims, strips, address of one int64 a strip, turns of a loop for the last strip;
# a strip waits as long as the number of strips that have begun is smaller than the last argument
CLAIMS, STRIPS, OUT, TURNS, BEGUN, TOGETHER = range(6)
_PATIENCE = 3_000_000_000  # turns of the loop after which a strip no longer waits for another


def counting_kernel(name: str) -> str:
    """IR of a kernel that adds 1 to each strip's number at the end of the strip."""
    loads = "\n".join(
        f"  %p{i} = getelementptr i64, ptr %args, i64 {i}\n  %a{i} = load i64, ptr %p{i}"
        for i in (STRIPS, OUT, TURNS, TOGETHER)
    )
    return f"""
define void @{name}(ptr %args) {{
entry:
{loads}
  %begun_at = getelementptr i64, ptr %args, i64 {BEGUN}
  %out = inttoptr i64 %a{OUT} to ptr
  %last = sub i64 %a{STRIPS}, 1
  br label %claim
claim:
  %strip = atomicrmw add ptr %args, i64 1 monotonic
  %found = icmp slt i64 %strip, %a{STRIPS}
  br i1 %found, label %begin, label %done
begin:
  atomicrmw add ptr %begun_at, i64 1 seq_cst
  %is_last = icmp eq i64 %strip, %last
  %turns = select i1 %is_last, i64 %a{TURNS}, i64 0
  br label %wait
wait:
  %turn = phi i64 [ 0, %begin ], [ %next, %wait ]
  %next = add i64 %turn, 1
  %begun = load atomic i64, ptr %begun_at seq_cst, align 8
  %alone = icmp slt i64 %begun, %a{TOGETHER}
  %patient = icmp slt i64 %turn, {_PATIENCE}
  %waits = and i1 %alone, %patient
  %busy = icmp slt i64 %turn, %turns
  %again = or i1 %waits, %busy
  br i1 %again, label %wait, label %end
end:
  %place = getelementptr i64, ptr %out, i64 %strip
  %before = load i64, ptr %place
  %after = add i64 %before, 1
  store i64 %after, ptr %place
  br label %claim
done:
  ret void
}}
"""


def count(team: Team, strips: int, threads: int, turns: int = 0, together: int = 0) -> list[int]:
    """How often each strip was computed when the launch had returned."""
    kernel = cpu_jit.compiled("counting", counting_kernel("any"), counting_kernel)
    out = np.zeros(strips, dtype=np.int64)
    arguments = np.array([0, strips, out.ctypes.data, turns, 0, together])
    team.run(kernel, arguments.ctypes.data, threads)
    return out.tolist()


@contextmanager
def opened() -> Iterator[Team]:
    team = Team()
    try:
        yield team
    finally:
        team.stop()


def test_each_strip_is_computed_once() -> None:
    with opened() as team:
        for launch in range(3000):
            strips = 1 + launch % 7
            assert count(team, strips, threads=1 + launch % 4) == [1] * strips


def test_who_is_inside_is_waited_for() -> None:
    """Also by sleeping: the last strip takes longer than a thread looks for its end."""
    with opened() as team:
        for _ in range(30):
            assert count(team, 2, threads=2, turns=2_000_000) == [1, 1]


def test_helpers_that_sleep_are_woken() -> None:
    with opened() as team:
        for _ in range(5):
            # as many strips at once as there are threads; else each would wait for long
            assert count(team, 3, threads=3, together=3) == [1, 1, 1]
            time.sleep(0.05)


def test_who_does_not_come_is_not_waited_for() -> None:
    with opened() as team:
        absent = threading.Event()
        team._help = lambda at: absent.wait()
        try:
            assert count(team, 5, threads=3) == [1] * 5
        finally:
            absent.set()


def test_several_threads_launch_at_once() -> None:
    found: list[Any] = []
    with opened() as team:

        def launch() -> None:
            found.append([count(team, 4, threads=3) for _ in range(300)])

        callers = [threading.Thread(target=launch) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert found == [[[1] * 4] * 300] * 4


def test_stopped_helpers_have_ended() -> None:
    with opened() as team:
        count(team, 4, threads=3)
        helpers = list(team._helpers)
    assert len(helpers) == 2
    assert not any(helper.is_alive() for helper in helpers)


def test_a_forked_child_has_a_team_of_its_own() -> None:
    program = """
import os, threading, torch
from specexec_kernels import cpu_team
from specexec_kernels.cpu_matmul import matmul
from specexec_kernels.formats.plain import plain_weight
torch.set_num_threads(3)
rows, weight = torch.randn(2, 64), torch.randn(512, 64)
first = matmul(rows, plain_weight(weight))
mine = cpu_team.team()
child = os.fork()
if not child:
    same = torch.equal(matmul(rows, plain_weight(weight)), first)
    os._exit(0 if same and cpu_team.team() is not mine else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), threading.active_count())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          timeout=60, check=False)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 3\n", "")
