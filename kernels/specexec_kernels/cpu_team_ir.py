"""LLVM IR of threads that run a kernel together, without waiting for any that has not joined.

A kernel's threads claim its strips one by one, so the threads that are awake can do all of them. An
OpenMP region, in contrast, ends only when every one of its threads has come and is done: while one
sleeps, or another program has its core, each product waits (docs/tried.md, "Threads that spin").

Helpers wait for a launch, enter it while it is open, and leave when no strip is left to claim. The
launching thread computes too, then closes the launch and waits for the helpers inside. A helper
that comes late finds that launch closed, or the next one open; both are correct.

The IR is written as text, not built by calls, so that the memory order of each access can be read.
"""

from __future__ import annotations

import platform

# Byte offsets in a team's memory. Each variable has a cache line of its own, since threads write
# them at the same time.
LAUNCHES = 0  # number of launches so far; helpers sleep on this word
STATE = 64  # of the present launch, in the bits below
BUSY = 128  # 1 while a thread launches
SLEEPERS = 192  # number of helpers that sleep or are about to
KERNEL, ARGUMENTS = 256, 264  # of the present launch
STOP = 320  # 1 tells helpers to return
TEAM_BYTES = 384

# Bits of STATE: number of helpers inside (12), the most that may be inside (12), whether the
# launching thread sleeps, whether the launch is open.
MOST_HELPERS = 0xFFF
_LIMIT_SHIFT = 12
_WAITED_FOR = 1 << 30
_OPEN = -(1 << 31)  # the sign of an int32

# How often a thread looks before it sleeps, some 0.2 ms: Python takes that long between two
# products of a pass of one row, and waking a thread takes half of that.
_LOOKS = 6000

_MACHINES = {  # number of the system call futex; the instruction that hints at a waiting loop
    "x86_64": (202, "declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()"),
    "aarch64": (98, "declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)"),
}
_WAIT, _WAKE = 128, 129  # futex operations within one process


def has_team() -> bool:
    """Whether a team can run on this system: Linux on x86-64 or 64-bit Arm."""
    return platform.system() == "Linux" and platform.machine() in _MACHINES


def build_helper(name: str) -> str:
    """LLVM IR of `void name(team)`, the loop of a helper; it returns when the team is stopped."""
    futex, declared, pause = _MACHINES[platform.machine()]
    return f"""
declare i64 @syscall(i64, ...)
{declared}

define void @{name}(ptr %team) {{
{_wait_for_launch(futex, pause)}
{_enter_and_work(futex)}done:
  ret void
}}
"""


def _wait_for_launch(futex: int, pause: str) -> str:
    """A helper's blocks that wait: they end in `join` at a new launch, or in `done` when the team
    is stopped."""
    return f"""entry:
  %state_at = getelementptr i8, ptr %team, i64 {STATE}
  %sleepers_at = getelementptr i8, ptr %team, i64 {SLEEPERS}
  %kernel_at = getelementptr i8, ptr %team, i64 {KERNEL}
  %arguments_at = getelementptr i8, ptr %team, i64 {ARGUMENTS}
  %stop_at = getelementptr i8, ptr %team, i64 {STOP}
  br label %wait

wait:
  %seen = phi i32 [ 0, %entry ], [ %seen, %look ], [ %seen, %sleep ], [ %now, %join ],
                  [ %now, %work ], [ %now, %wake ]
  %looks = phi i32 [ 0, %entry ], [ %looked, %look ], [ 0, %sleep ], [ 0, %join ],
                   [ 0, %work ], [ 0, %wake ]
  %now = load atomic i32, ptr %team acquire, align 4
  %is_old = icmp eq i32 %now, %seen
  br i1 %is_old, label %look, label %came

look:
  {pause}
  %looked = add i32 %looks, 1
  %again = icmp ult i32 %looked, {_LOOKS}
  br i1 %again, label %wait, label %sleep

sleep:  ; counted first: who launches then either sees a sleeper or has changed what futex compares
  atomicrmw add ptr %sleepers_at, i32 1 seq_cst
  call i64 (i64, ...) @syscall(i64 {futex}, ptr %team, i32 {_WAIT}, i32 %seen, ptr null)
  atomicrmw sub ptr %sleepers_at, i32 1 seq_cst
  br label %wait

came:
  %stop = load atomic i32, ptr %stop_at acquire, align 4
  %is_stopped = icmp ne i32 %stop, 0
  br i1 %is_stopped, label %done, label %join
"""


def _enter_and_work(futex: int) -> str:
    """A helper's blocks from `join` on: it enters the launch if that is open, works, and waits
    again."""
    return f"""join:
  %state = load atomic i32, ptr %state_at acquire, align 4
  %open = and i32 %state, {_OPEN}
  %is_open = icmp ne i32 %open, 0
  %inside = and i32 %state, {MOST_HELPERS}
  %shifted = lshr i32 %state, {_LIMIT_SHIFT}
  %limit = and i32 %shifted, {MOST_HELPERS}
  %has_room = icmp ult i32 %inside, %limit
  %may = and i1 %is_open, %has_room
  br i1 %may, label %enter, label %wait

enter:
  %entered = add i32 %state, 1
  %pair = cmpxchg ptr %state_at, i32 %state, i32 %entered acq_rel acquire
  %is_in = extractvalue {{ i32, i1 }} %pair, 1
  br i1 %is_in, label %work, label %join

work:
  %kernel = load ptr, ptr %kernel_at, align 8
  %arguments = load ptr, ptr %arguments_at, align 8
  call void %kernel(ptr %arguments)
  %before = atomicrmw sub ptr %state_at, i32 1 acq_rel
  %left = sub i32 %before, 1
  %told = and i32 %left, {_OPEN | _WAITED_FOR | MOST_HELPERS}
  %is_last = icmp eq i32 %told, {_WAITED_FOR}
  br i1 %is_last, label %wake, label %wait

wake:
  call i64 (i64, ...) @syscall(i64 {futex}, ptr %state_at, i32 {_WAKE}, i32 1)
  br label %wait

"""


def build_launch(name: str) -> str:
    """LLVM IR of `void name(int64 [4])`, which runs a kernel together with a team's helpers.

    The four arguments are addresses of the team, of the kernel and of the kernel's arguments, and
    the most helpers. While another thread launches, the kernel runs on the calling thread alone.
    With a null kernel, the team is stopped.
    """
    futex, declared, pause = _MACHINES[platform.machine()]
    return f"""
declare i64 @syscall(i64, ...)
{declared}

define void @{name}(ptr %given) {{
{_open_launch(futex)}
{_work_and_close(futex, pause)}}}
"""


def _open_launch(futex: int) -> str:
    """The launching thread's blocks up to `work`: opens the launch and wakes sleeping helpers."""
    return f"""entry:
  %team = load ptr, ptr %given, align 8
  %kernel_given = getelementptr i8, ptr %given, i64 8
  %kernel = load ptr, ptr %kernel_given, align 8
  %arguments_given = getelementptr i8, ptr %given, i64 16
  %arguments = load ptr, ptr %arguments_given, align 8
  %helpers_given = getelementptr i8, ptr %given, i64 24
  %helpers = load i32, ptr %helpers_given, align 8
  %state_at = getelementptr i8, ptr %team, i64 {STATE}
  %busy_at = getelementptr i8, ptr %team, i64 {BUSY}
  %sleepers_at = getelementptr i8, ptr %team, i64 {SLEEPERS}
  %kernel_at = getelementptr i8, ptr %team, i64 {KERNEL}
  %arguments_at = getelementptr i8, ptr %team, i64 {ARGUMENTS}
  %stop_at = getelementptr i8, ptr %team, i64 {STOP}
  %is_stop = icmp eq ptr %kernel, null
  br i1 %is_stop, label %stop, label %take

stop:
  store atomic i32 1, ptr %stop_at release, align 4
  atomicrmw add ptr %team, i32 1 seq_cst
  call i64 (i64, ...) @syscall(i64 {futex}, ptr %team, i32 {_WAKE}, i32 {MOST_HELPERS})
  ret void

take:
  %taken = atomicrmw xchg ptr %busy_at, i32 1 acquire
  %is_free = icmp eq i32 %taken, 0
  br i1 %is_free, label %open, label %alone

alone:
  call void %kernel(ptr %arguments)
  ret void

open:
  store ptr %kernel, ptr %kernel_at, align 8
  store ptr %arguments, ptr %arguments_at, align 8
  %limit = shl i32 %helpers, {_LIMIT_SHIFT}
  %opened = or i32 %limit, {_OPEN}
  store atomic i32 %opened, ptr %state_at release, align 4
  atomicrmw add ptr %team, i32 1 seq_cst
  %sleepers = load atomic i32, ptr %sleepers_at seq_cst, align 4
  %someone_sleeps = icmp ne i32 %sleepers, 0
  br i1 %someone_sleeps, label %rouse, label %work

rouse:
  call i64 (i64, ...) @syscall(i64 {futex}, ptr %team, i32 {_WAKE}, i32 %helpers)
  br label %work
"""


def _work_and_close(futex: int, pause: str) -> str:
    """The launching thread's blocks from `work` on: it works, closes the launch, and waits for the
    helpers inside."""
    return f"""work:
  call void %kernel(ptr %arguments)
  atomicrmw and ptr %state_at, i32 {~_OPEN} acq_rel
  br label %wait

wait:
  %looks = phi i32 [ 0, %work ], [ %looked, %look ], [ {_LOOKS}, %say ], [ {_LOOKS}, %sleep ]
  %state = load atomic i32, ptr %state_at acquire, align 4
  %inside = and i32 %state, {MOST_HELPERS}
  %is_empty = icmp eq i32 %inside, 0
  br i1 %is_empty, label %leave, label %patience

patience:
  %may_look = icmp ult i32 %looks, {_LOOKS}
  br i1 %may_look, label %look, label %say

look:
  {pause}
  %looked = add i32 %looks, 1
  br label %wait

say:
  %waited_for = or i32 %state, {_WAITED_FOR}
  %pair = cmpxchg ptr %state_at, i32 %state, i32 %waited_for acq_rel acquire
  %is_said = extractvalue {{ i32, i1 }} %pair, 1
  br i1 %is_said, label %sleep, label %wait

sleep:
  call i64 (i64, ...) @syscall(i64 {futex}, ptr %state_at, i32 {_WAIT}, i32 %waited_for, ptr null)
  br label %wait

leave:
  store atomic i32 0, ptr %busy_at release, align 4
  ret void
"""
