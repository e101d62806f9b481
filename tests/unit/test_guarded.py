"""The one reader of JSON and TOML: a value or a short ValueError, whatever the text."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from specexec_cli.errors import SpecexecError
from specexec_cli.guarded import parse_json, parse_toml, read_json, read_toml
from specexec_cli.kept import file_name, replacing, write_json


def refused(text: str | bytes, **options: bool) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the message is what is looked at
        parse_json(text, **options)
    assert len(str(caught.value)) < 200
    return str(caught.value)


@pytest.mark.parametrize("opens", ["[", '{"a":'])
@pytest.mark.parametrize("depth", [101, 1000, 100_000])
def test_nesting_has_an_end(opens: str, depth: int) -> None:
    closes = "]" if opens == "[" else "}"
    assert "nested more than 100 deep" in refused(opens * depth + "1" + closes * depth)
    assert "nested more than 100 deep" in refused(opens * depth) or depth == 101
    assert parse_json(opens * 99 + "1" + closes * 99)


def test_whole_numbers_have_40_digits_at_most() -> None:
    assert parse_json("[1000000000000000019884624838656]") == [10**30 + 19884624838656]
    for digits in ("1" * 41, "-" + "1" * 400, "1" * 5000):
        assert refused(f"[{digits}]") == "a whole number has more than 40 digits"


def test_texts_are_whole_characters() -> None:
    assert parse_json(r'["\ud83d\ude00", "\\ud800"]') == ["😀", r"\ud800"]
    assert "half of a character" in refused(r'{"a": ["\ud83d"]}')
    assert "half of a character" in refused(r'{"\uDE00": 1}')
    assert "utf-8" in refused(b'"\xff"')


def test_names_of_an_object_may_have_to_be_unique() -> None:
    assert parse_json('{"a": 1, "a": 2}') == {"a": 2}
    assert refused('{"b": {"a": 1, "a": 2}}', unique_names=True) == "a name appears twice"


@pytest.mark.parametrize(
    ("text", "message"),
    [("a = " + "[" * 200 + "]" * 200, "nested"), ("a = " + "[" * 3000, "nested"),
     ("a = 1" + "0" * 41, "40 digits"), ("a = " + "1" * 3900, "40 digits"),
     ("a = 0x" + "f" * 100, "40 digits"), ("a" + ".a" * 200 + " = 1", "nested"),
     ("a" + ".a" * 50_000 + " = 1", "line 1 has more than"), ("a = ", "Invalid value")],
)  # fmt: skip
def test_toml_has_the_same_bounds(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_toml(text.encode())
    assert len(str(caught.value)) < 200


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "none", tmp_path / "pipe", tmp_path / ("x" * 300)):
        for read in (read_json, read_toml):
            with pytest.raises(OSError):  # noqa: PT011
                read(path)
    (tmp_path / "large").write_text(f'"{"x" * 100}"')
    assert read_json(tmp_path / "large") == "x" * 100
    with pytest.raises(ValueError, match="more than 50 bytes"):
        read_json(tmp_path / "large", most_bytes=50)


def test_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"bits": 4}')
    tracemalloc.start()
    try:
        assert read_json(path) == {"bits": 4}
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_a_message_is_one_line_of_bounded_length() -> None:
    assert str(SpecexecError("a\nb\x1b[31m\ud800 ü")) == r"a\nb\x1b[31m\ud800 ü"
    message = str(SpecexecError("begin " + "x" * 5000 + " end"))
    assert message.startswith("begin ")
    assert message.endswith(" end")
    assert len(message) < 1000


def test_writers_have_files_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    with replacing(path) as one, replacing(path) as other:
        assert one != other
        one.write_text("1")
        other.write_text("2")
    assert path.read_text() == "1", "the one that ended last"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, object())
    with pytest.raises(UnicodeEncodeError), replacing(path) as partial:
        partial.write_text("\ud800")
    assert [each.name for each in tmp_path.iterdir()] == ["kept.json"]
    assert path.read_text() == '{"a": 1}\n'


def test_names_of_files_are_short_enough(tmp_path: Path) -> None:
    long = "/".join(["folder"] * 100)
    assert file_name("org/name", "/home/x") == "org-name---home-x"
    assert file_name(long, "a") != file_name(long, "b")
    write_json(tmp_path / f"{file_name(long, 'a')}.json", 1)
