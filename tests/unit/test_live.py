"""The lines that change at the end of a terminal: where they stand, and what is left of them."""

from __future__ import annotations

import io
from os import terminal_size
from types import SimpleNamespace

import pyte
import pytest

from specexec_cli.cli import live
from specexec_cli.cli.live import LiveStatus, Region
from specexec_cli.core import PassProgress

COLUMNS, LINES = 30, 6


class Screen(io.StringIO):
    """A terminal that both streams write to."""

    def __init__(self) -> None:
        super().__init__()
        self.screen = pyte.HistoryScreen(COLUMNS, LINES, history=100, ratio=1)
        self._stream = pyte.Stream(self.screen)

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._stream.feed(text.replace("\n", "\r\n"))  # as a terminal's driver does
        return len(text)

    def lines(self) -> list[str]:
        above = ["".join(line[x].data for x in range(COLUMNS)) for line in self.screen.history.top]
        return (
            "\n".join(row.rstrip() for row in [*above, *self.screen.display]).rstrip().split("\n")
        )


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    found = Screen()
    monkeypatch.setattr(live, "sys", SimpleNamespace(stdout=found, stderr=found))
    size = terminal_size((COLUMNS, LINES))
    monkeypatch.setattr(live.shutil, "get_terminal_size", lambda fallback=(80, 24): size)
    monkeypatch.setenv("XTERM_VERSION", "1")
    monkeypatch.setattr(LiveStatus, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(LiveStatus, "_REDRAW_S", 0.0)
    return found


def progress(layer: int) -> PassProgress:
    return PassProgress(number=1, layer=layer, layers=4, bytes_per_s=0.0, draft_nodes=0)


def test_the_status_stands_below_the_text_and_leaves_nothing(screen: Screen) -> None:
    with LiveStatus(shown=True) as status:
        for text in ("Once upon", " a time\nthere", " was"):
            for layer in (1, 2):
                status.layer(progress(layer))
                assert screen.lines()[-1] == f"pass 1 · layer {layer}/4"
            status.step(text)
            print(text, end="", file=screen)
            assert "pass" not in "".join(screen.lines())
        status.layer(progress(3))
    assert screen.lines() == ["Once upon a time", "there was"]
    assert screen.screen.cursor.x == len("there was"), "what follows goes on behind the text"


def test_text_goes_on_at_the_bottom_of_the_screen(screen: Screen) -> None:
    with LiveStatus(shown=True) as status:
        for number in range(12):
            status.step(f"\nline {number}")
            print(f"\nline {number}", end="", file=screen)
            status.layer(progress(1))
    assert screen.lines() == ["", *(f"line {number}" for number in range(12))]


def test_a_line_that_is_just_full_is_left_alone(screen: Screen) -> None:
    with LiveStatus(shown=True) as status:
        status.step("x" * COLUMNS)
        print("x" * COLUMNS, end="", file=screen)
        status.layer(progress(1))
        assert screen.lines() == ["x" * COLUMNS]
        status.step("yy")
        print("yy", end="", file=screen)
        status.layer(progress(1))
        assert screen.lines() == ["x" * COLUMNS, "yy", "pass 1 · layer 1/4"]
    assert screen.lines() == ["x" * COLUMNS, "yy"]


def test_a_region_settles_lines_above_those_that_still_change(screen: Screen) -> None:
    region = Region(screen)
    region.draw([], ["one", "status"])
    region.draw(["one"], ["two", "status"])
    assert screen.lines() == ["one", "two", "status"]
    region.draw(["two"], [])
    assert screen.lines() == ["one", "two"]
    assert not region.drawn
