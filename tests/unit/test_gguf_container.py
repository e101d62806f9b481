import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFWriter

from specexec_cli.errors import CheckpointError
from specexec_cli.gguf.container import is_gguf, part_names, read_gguf, read_once
from specexec_cli.gguf.types import GGML_TYPES, OTHER_TYPES


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return (
        text(name)
        + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        + struct.pack("<IQ", kind, offset)
    )


def write(
    path: Path,
    tensors: list[bytes],
    entries: list[bytes],
    *,
    data_bytes: int = 256,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> Path:
    """A file with exactly this header, its data aligned to 32 bytes."""
    n_tensors, n_entries = counts or (len(tensors), len(entries))
    head = struct.pack("<4sIQQ", b"GGUF", version, n_tensors, n_entries)
    head += b"".join(entries) + b"".join(tensors)
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(data_bytes))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_gguf(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_types_are_those_of_the_gguf_package() -> None:
    from gguf import GGML_QUANT_SIZES

    names = {int(kind): kind.name for kind in GGMLQuantizationType}
    for number, known in GGML_TYPES.items():
        assert names[number] == known.name
        sizes = (known.block_weights, known.block_bytes)
        assert GGML_QUANT_SIZES[GGMLQuantizationType(number)] == sizes
    missing = set(names) - set(GGML_TYPES) - set(OTHER_TYPES)
    assert not {number for number in missing if number <= 40}, "types that have no name here"


@pytest.mark.parametrize("alignment", [32, 64, 4096])
def test_places_are_those_that_the_gguf_package_reads(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "a.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    rng = np.random.default_rng(0)
    writer.add_tensor("a", rng.normal(size=(3, 5)).astype(np.float32))
    writer.add_tensor("b", rng.normal(size=7).astype(np.float16))
    blocks = rng.integers(0, 256, (2, 3, 34), np.uint8)
    writer.add_tensor("c", blocks, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_array("numbers", [1, 2, 3])
    writer.add_float32("half", 0.5)
    writer.add_int64("below", -5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found, expected, raw = read_gguf(path), GGUFReader(path), path.read_bytes()
    assert [found.metadata[key] for key in ("numbers", "half", "below")] == [[1, 2, 3], 0.5, -5]
    assert list(found.tensors) == [each.name for each in expected.tensors]
    for each in expected.tensors:
        ours = found.tensors[each.name]
        assert ours.start == each.data_offset
        assert ours.shape == tuple(int(size) for size in reversed(each.shape))
        assert raw[ours.start : ours.stop] == each.data.tobytes()


def test_version_2_is_read_and_others_are_refused_by_number(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    assert read_gguf(write(path, [tensor("a", (4,))], [], version=2)).tensors["a"].shape == (4,)
    assert "version 1, only 2 and 3" in refusal(write(path, [], [], version=1))
    assert "version 4, only 2 and 3" in refusal(write(path, [], [], version=4))


def test_big_endian_files_are_refused_by_that_name(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf", "llama", endianess=GGUFEndian.BIG)
    writer.add_tensor("a", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "big-endian" in refusal(tmp_path / "a.gguf")


STRING, ARRAY, U32, U64 = 8, 9, 4, 10
ABSURD: list[tuple[str, dict[str, Any], str]] = [
    ("tensor count", {"tensors": [], "entries": [], "counts": (2**63, 0)}, "impossible in"),
    ("entry count", {"tensors": [], "entries": [], "counts": (0, 2**64 - 1)}, "impossible in"),
    (
        "string length",
        {"tensors": [], "entries": [entry("k", STRING, struct.pack("<Q", 2**64 - 8))]},
        "needs 18446744073709551608 bytes",
    ),
    (
        "array length",
        {"tensors": [], "entries": [entry("k", ARRAY, struct.pack("<IQ", U64, 2**61))]},
        "for which the file is too short",
    ),
    (
        "array of arrays",
        {"tensors": [], "entries": [entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1))]},
        "an array of type 9",
    ),
    ("kind of entry", {"tensors": [], "entries": [entry("k", 77, bytes(8))]}, "of type 77"),
    ("name", {"tensors": [tensor("a", ())], "entries": [text(b"\xff") + bytes(12)]}, "not UTF-8"),
    (
        "same entry",
        {"tensors": [], "entries": [entry("k", U32, bytes(4))] * 2},
        "metadata 'k' is there twice",
    ),
    (
        "alignment",
        {
            "tensors": [tensor("a", (4,))],
            "entries": [entry("general.alignment", U32, struct.pack("<I", 48))],
        },
        "alignment 48 is not a power of two",
    ),
    ("dimensions", {"tensors": [tensor("a", (1,) * 5)], "entries": []}, "5 dimensions"),
    ("type of tensor", {"tensors": [tensor("a", (4,), 99)], "entries": []}, "of type 99"),
    ("type not read", {"tensors": [tensor("a", (256,), 34)], "entries": []}, "TQ1_0, which is"),
    ("rows of blocks", {"tensors": [tensor("a", (2, 48), 2)], "entries": []}, "rows of 48 weights"),
    ("offset", {"tensors": [tensor("a", (4,), 0, 2**63)], "entries": []}, "the file has only"),
    ("odd offset", {"tensors": [tensor("a", (4,), 0, 8)], "entries": []}, "no multiple of 32"),
    ("size", {"tensors": [tensor("a", (2**40, 2**40))], "entries": []}, "the file has only"),
    (
        "overlap",
        {"tensors": [tensor("a", (16,)), tensor("b", (4,), 0, 32)], "entries": []},
        "'a' and 'b' overlap",
    ),
    (
        "same tensor",
        {"tensors": [tensor("a", (4,)), tensor("a", (4,), 0, 32)], "entries": []},
        "tensor 'a' is there twice",
    ),
]


@pytest.mark.parametrize(("header", "message"), [case[1:] for case in ABSURD],
                         ids=[case[0] for case in ABSURD])  # fmt: skip
def test_absurd_headers_are_refused_in_a_line(
    tmp_path: Path, header: dict[str, Any], message: str
) -> None:
    found = refusal(write(tmp_path / "a.gguf", **header))
    assert message in found
    assert str(tmp_path / "a.gguf") in found


def test_what_is_no_gguf_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert "begins with b'PK" in refusal(path)
    assert not is_gguf(path)
    path.write_bytes(b"GGUF\x03")
    assert "has only 5 bytes" in refusal(path)
    assert is_gguf(path)
    assert "no file" in refusal(tmp_path / "absent.gguf")
    assert not is_gguf(tmp_path)


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", [tensor("a", (64,))], [entry("k", STRING, text("value"))])
    raw = path.read_bytes()
    for size in range(len(raw)):
        path.write_bytes(raw[:size])
        assert "truncated or damaged" in refusal(path), size


def split_entries(number: int, count: int, tensors: int) -> list[bytes]:
    return [
        entry("split.no", 2, struct.pack("<H", number)),
        entry("split.count", 2, struct.pack("<H", count)),
        entry("split.tensors.count", 5, struct.pack("<i", tensors)),
    ]


def test_a_split_file_is_whole_from_any_of_its_parts(tmp_path: Path) -> None:
    names = part_names("m-00002-of-00002.gguf")
    assert names == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    first, second = (tmp_path / name for name in names)
    own = [entry("own", STRING, text("first's"))]
    write(first, [tensor("a", (4,))], [*split_entries(0, 2, 2), *own])
    write(second, [tensor("b", (4,))], split_entries(1, 2, 2))
    for path in (first, second):
        found = read_gguf(path)
        assert {name: each.path for name, each in found.tensors.items()} == {
            "a": first,
            "b": second,
        }
        assert found.metadata["own"] == "first's"
    write(second, [tensor("a", (4,))], split_entries(1, 2, 2))
    assert "tensor 'a' is there twice" in refusal(first)
    write(second, [tensor("b", (4,))], split_entries(0, 2, 2))
    assert "it is part 0 of 2" in refusal(first)
    write(second, [], split_entries(1, 2, 2))
    assert "1 tensors, the first says 2" in refusal(first)
    second.unlink()
    assert f"no file {second}" in refusal(first)


def test_a_header_is_read_once_until_a_part_of_the_file_changes(tmp_path: Path) -> None:
    first, second = (tmp_path / name for name in part_names("m-00001-of-00002.gguf"))
    write(first, [tensor("a", (4,))], split_entries(0, 2, 2))
    write(second, [tensor("b", (4,))], split_entries(1, 2, 2))
    alone = read_gguf(first)
    with read_once():
        found = read_gguf(first)
        assert found == alone
        assert found is not alone
        with read_once():
            assert read_gguf(first) is found
        write(second, [tensor("c", (4,))], split_entries(1, 2, 2), data_bytes=512)
        assert [*read_gguf(first).tensors] == ["a", "c"]
        second.unlink()
        assert f"no file {second}" in refusal(first)


def test_a_part_that_cannot_be_is_refused(tmp_path: Path) -> None:
    assert "there is no part 3 of 2" in refusal(tmp_path / "m-00003-of-00002.gguf")


def test_a_long_array_of_numbers_takes_little_more_than_its_bytes(tmp_path: Path) -> None:
    """No model has so many, and nothing reads them: they are passed over."""
    size = 8 << 20
    long = entry("k", ARRAY, struct.pack("<IQ", 0, size) + bytes(size))
    few = entry("few", ARRAY, struct.pack("<IQ2B", 0, 2, 3, 4))
    path = write(tmp_path / "a.gguf", [], [long, few])
    tracemalloc.start()
    try:
        found = read_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.metadata == {"few": [3, 4]}
    assert peak < 5 * size
    assert "'k' is there twice" in refusal(write(path, [], [long, long]))
    vocabulary = long.replace(text("k"), text("tokenizer.k"), 1)
    assert "more numbers than vocabularies" in refusal(write(path, [], [vocabulary]))


def test_arrays_as_long_as_vocabularies_are_numbers(tmp_path: Path) -> None:
    scores = entry("s", ARRAY, struct.pack("<IQ600000f", 6, 600_000, *[0.5] * 600_000))
    kinds = entry("t", ARRAY, struct.pack("<IQ600000i", 5, 600_000, *[3] * 600_000))
    found = read_gguf(write(tmp_path / "a.gguf", [], [scores, kinds])).metadata
    assert found == {"s": [0.5] * 600_000, "t": [3] * 600_000}
