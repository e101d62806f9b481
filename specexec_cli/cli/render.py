"""Output for people on stderr: notices, progress bars, and lines of status and statistics."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from specexec_cli.cli.mends import with_options

if TYPE_CHECKING:
    from rich.progress import Progress

    from specexec_cli.core import GenerationStats, PassProgress


def notice(text: str) -> None:
    """Prints a notice to the user on stderr, in one line."""
    print(f"notice: {with_options(text)}", file=sys.stderr)


def stats_line(stats: GenerationStats, *, brief: bool = False) -> str:
    """One generation's statistics on one line.

    Args:
        brief: leave out the number of passes and the times of drafting and verifying.
    """
    passes = "" if brief else f" ({stats.target_passes} passes)"
    new = f" ({stats.prompt_rows} new)" if stats.prompt_rows < stats.prompt_tokens else ""
    parts = [
        f"prompt {stats.prompt_tokens} tok{new}, first text {stats.ttft_s:.2f} s",
        f"{stats.generated_tokens} tok at {stats.tokens_per_s:.2f} tok/s",
        f"{stats.generation_rate:.2f} tok/pass{passes}",
    ]
    if not brief:
        parts.append(f"draft {stats.draft_s:.2f} s, verify {stats.verify_s:.2f} s")
    if stats.bytes_streamed:
        streamed = (
            f"{stats.bytes_streamed / 1e9:.2f} GB at {stats.stream_bytes_per_s / 1e9:.2f} GB/s"
        )
        if stats.link_bytes_per_s:
            streamed += f" ({stats.stream_bytes_per_s / stats.link_bytes_per_s:.0%} of the link)"
        parts.append(streamed)
    if stats.experts_asked:
        parts.append(
            f"{stats.experts_asked / stats.generated_tokens:.0f} experts/tok, "
            f"{stats.experts_held / stats.experts_asked:.0%} in memory, "
            f"{stats.bytes_per_token / 1e6:.0f} MB/tok"
        )
    loss = stats.drafting_loss
    if loss is not None:
        drafted_s, plain_s = loss
        parts.append(
            f"drafting does not pay here: a token took {drafted_s * 1e3:.0f} ms with trees and "
            f"{plain_s * 1e3:.0f} ms without, so {stats.paused_passes} passes went without"
        )
    parts.append(f"peak RAM {stats.peak_ram_bytes / 1e9:.2f} GB")
    if stats.peak_vram_bytes:
        parts.append(f"VRAM {stats.peak_vram_bytes / 1e9:.2f} GB")
    return " · ".join(parts)


def pass_line(progress: PassProgress) -> str:
    """The progress of a pass, as in 'pass 3 · layer 41/80 · 21.3 GB/s · draft 118 nodes'."""
    parts = [f"pass {progress.number}", f"layer {progress.layer}/{progress.layers}"]
    if progress.bytes_per_s:
        parts.append(f"{progress.bytes_per_s / 1e9:.1f} GB/s")
    if progress.draft_nodes:
        parts.append(f"draft {progress.draft_nodes} node{'s' * (progress.draft_nodes > 1)}")
    return " · ".join(parts)


class LoadingBar:
    """Shows bytes, GB/s and time left while weights load; silent unless stderr is a terminal."""

    def __init__(self, *, shown: bool, title: str = "loading") -> None:
        self._title = title
        self._progress: Progress | None = None
        self._shown = shown and sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        """Reports bytes loaded so far."""
        if not self._shown:
            return
        if self._progress is None:
            from rich import progress
            from rich.console import Console

            self._progress = progress.Progress(
                progress.TextColumn(self._title), progress.BarColumn(), progress.DownloadColumn(),
                progress.TransferSpeedColumn(), progress.TimeRemainingColumn(),
                console=Console(stderr=True), transient=True,
            )  # fmt: skip
            self._progress.start()
            self._progress.add_task(self._title, total=total)
        self._progress.update(self._progress.task_ids[0], completed=done)
        if done >= total:
            self.close()

    def close(self) -> None:
        """Clears the bar; idempotent."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class CountBar:
    """Shows finished runs, the last run's name and time left; silent if stderr is no terminal."""

    def __init__(self, title: str, total: int | None, *, done: int = 0, shown: bool) -> None:
        self._progress: Progress | None = None
        if shown and sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            self._progress = progress.Progress(
                progress.TextColumn(title), progress.BarColumn(), progress.MofNCompleteColumn(),
                progress.TimeRemainingColumn(), progress.TextColumn("{task.fields[last]}"),
                console=Console(stderr=True), transient=True,
            )  # fmt: skip
            self._progress.add_task(title, total=total, completed=done, last="")

    def advance(self, last: str) -> None:
        """Counts one more finished run."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], advance=1, last=last)

    def __enter__(self) -> CountBar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._progress is not None:
            self._progress.stop()
