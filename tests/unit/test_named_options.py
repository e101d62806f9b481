"""A name that an option of a script lists and that is misspelt is told in one line."""

from __future__ import annotations

import sys

import measure_joined_trees
import pytest
import train_demo_heads
from named_options import named


def test_names_are_split_where_they_are_known() -> None:
    assert named("--heads", "a, b", ["b", "a"]) == ["a", "b"]
    assert named("--cases", "a, b;a", ["a", "a, b"], ";") == ["a, b", "a"]


@pytest.mark.parametrize(
    ("main", "options", "told"),
    [
        (train_demo_heads.main, ["--heads", "mtp,egle"],
         "error: --heads 'egle': the names are mtp,eagle,jetspec,dflash\n"),
        (measure_joined_trees.main, ["target", "--draft", "draft", "--cases", "head;drat"],
         "error: --cases 'drat': the names are head;head, past;draft;draft, past;head, draft;"
         "head, draft, past\n"),
    ],
)  # fmt: skip
def test_one_that_is_misspelt_ends_with_one_line(
    main: object, options: list[str], told: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, value in train_demo_heads.MALLOC.items():
        monkeypatch.setenv(name, value)  # or the script would begin anew
    monkeypatch.setattr(sys, "argv", ["script", *options])
    assert callable(main)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == told
