"""Files of torch.save are read for what torch.load finds in them, and nothing in them is run."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_toys import EagleToy, eagle_toy, save_target
from safetensors.torch import load_file

from specexec_cli.errors import CheckpointError
from specexec_cli.offload.eagle import eagle_checkpoint
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.offload.stream import read_tensors
from specexec_cli.offload.torch_files import read_torch_file

_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip


def _tensors() -> dict[str, Any]:
    """One of each dtype, a part of a larger one, an empty one, a scalar and a parameter."""
    torch.manual_seed(2)
    found: dict[str, Any] = {
        name: (torch.randn(3, 5) * 4).to(getattr(torch, name)) for name in _DTYPES
    }
    whole = torch.randn(6, 4)
    return found | {
        "rows": whole[2:5], "same": whole, "none": torch.zeros(0, 3), "one": torch.tensor(3.0),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)), "wide": torch.randn(1, 7)[:, :7],
    }  # fmt: skip


def test_every_tensor_is_what_torch_loads(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(_tensors(), path)
    places, loaded = read_torch_file(path), torch.load(path, weights_only=True)
    assert places.keys() == loaded.keys()
    for name, place in places.items():
        if place.n_bytes:
            assert torch.equal(read_tensors([place])[name], loaded[name].detach()), name
        assert place.shape == tuple(loaded[name].shape), name


def test_an_eagle_head_in_such_a_file_is_the_one_in_safetensors(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    config = read_checkpoint(tmp_path / "target").config
    toy: EagleToy = eagle_toy()
    plain = eagle_checkpoint(read_checkpoint(toy.save(tmp_path / "plain")), config)
    head = toy.save(tmp_path / "head")
    torch.save(load_file(head / "model.safetensors"), head / "pytorch_model.bin")
    (head / "model.safetensors").unlink()
    found = eagle_checkpoint(read_checkpoint(head), config)
    assert found.keys() == plain.keys()
    for name, place in found.items():
        [read] = read_tensors([place]).values()
        [expected] = read_tensors([plain[name]]).values()
        assert torch.equal(read, expected), name


def test_a_modules_own_state_is_read(tmp_path: Path) -> None:
    """Its table carries versions of modules beside the tensors."""
    path = tmp_path / "pytorch_model.bin"
    torch.save(torch.nn.Linear(3, 2).state_dict(), path)
    found = read_torch_file(path)
    assert {name: place.shape for name, place in found.items()} == {"weight": (2, 3), "bias": (2,)}


def test_a_pickle_changes_nothing_of_what_it_calls(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"weight": torch.ones(2)}, path)
    named = b"ctorch._utils\n_rebuild_tensor_v2\n"  # found, and given a state
    other = b"\x80\x02" + named + b"N}X\x0c\x00\x00\x00__defaults__)s\x86b."
    _rewritten(path, lambda name, each: other if name.endswith("data.pkl") else each)
    with pytest.raises(CheckpointError, match="no table of tensors"):
        read_torch_file(path)


class _Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self._path),)


def test_nothing_that_a_pickle_asks_for_is_run(tmp_path: Path) -> None:
    path, made = tmp_path / "pytorch_model.bin", tmp_path / "made"
    torch.save({"weight": torch.ones(2), "other": _Runs(made)}, path)
    with pytest.raises(CheckpointError, match=r"it asks for posix\.mkdir"):
        read_torch_file(path)
    assert not made.exists()
    torch.load(path, weights_only=False)
    assert made.exists(), "the file would have run it"


def _rewritten(path: Path, change: Callable[[str, bytes], bytes | None], pack: int = 0) -> None:
    """Writes a file's entries anew, changed; None leaves one out."""
    with zipfile.ZipFile(path) as whole:
        parts = {entry.filename: whole.read(entry) for entry in whole.infolist()}
    with zipfile.ZipFile(path, "w", compression=pack) as whole:
        for name, content in parts.items():
            if (changed := change(name, content)) is not None:
                whole.writestr(name, changed)


def _pickled(value: Any) -> Callable[[str, bytes], bytes]:
    """Another pickle in the place of the file's."""
    other = io.BytesIO()
    pickle.Pickler(other, protocol=2).dump(value)
    return lambda name, content: other.getvalue() if name.endswith("data.pkl") else content


_DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (lambda path: os.truncate(path, 700), "BadZipFile"),
    "of an older form": (
        lambda path: torch.save(_tensors(), path, _use_new_zipfile_serialization=False),
        "BadZipFile",
    ),
    "bytes left out": (
        lambda path: _rewritten(path, lambda name, each: None if name.endswith("/3") else each),
        "are not in it as they are",
    ),
    "packed": (
        lambda path: _rewritten(path, lambda name, each: each, zipfile.ZIP_DEFLATED),
        "are not in it as they are",
    ),
    "bytes too few": (
        lambda path: _rewritten(path, lambda name, each: each[:8] if "/data/" in name else each),
        "ends behind its bytes",
    ),
    "big-endian": (
        lambda path: _rewritten(path, lambda name, each: b"big" if "order" in name else each),
        "not little-endian",
    ),
    "a list": (lambda path: _rewritten(path, _pickled([1, 2])), "does more than torch.save"),
    "a pair": (lambda path: _rewritten(path, _pickled((1, 2))), "no table of tensors"),
    "other things": (lambda path: _rewritten(path, _pickled({"a": 1})), "as 'a' is no tensor"),
    "a huge pickle": (
        lambda path: _rewritten(path, _pickled("x" * (17 << 20))), "its pickle has 178",
    ),
    "negated": (lambda path: torch.save({"n": torch._neg_view(torch.ones(3))}, path), "otherwise"),
    "turned": (
        lambda path: torch.save({"turned": torch.ones(3, 5).T}, path), "not lie in one piece",
    ),
    "nothing": (lambda path: path.write_bytes(b""), "BadZipFile"),
}  # fmt: skip


@pytest.mark.parametrize("name", _DAMAGE)
def test_what_is_not_a_table_of_tensors_is_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(_tensors(), path)
    damage, line = _DAMAGE[name]
    damage(path)
    with pytest.raises(CheckpointError, match=line) as refused:
        read_torch_file(path)
    assert "\n" not in str(refused.value)


def test_damaged_bytes_are_refused_or_tensors_that_fit(tmp_path: Path) -> None:
    """Of the pickle, which says where tensors lie; the zip's check of its bytes is made anew."""
    path = tmp_path / "pytorch_model.bin"
    torch.save({"first": torch.ones(3, 4), "second": torch.ones(7).half()}, path)
    whole, numbers = path.read_bytes(), torch.Generator().manual_seed(1)
    for _ in range(300):
        path.write_bytes(whole)

        def change(name: str, content: bytes) -> bytes:
            if not name.endswith("data.pkl"):
                return content
            at = int(torch.randint(len(content), (1,), generator=numbers))
            byte = int(torch.randint(256, (1,), generator=numbers))
            return content[:at] + bytes([byte]) + content[at + 1 :]

        _rewritten(path, change)
        places = {}
        with suppress(CheckpointError):
            places = read_torch_file(path)
        for place in places.values():
            assert 0 <= place.start <= place.stop <= path.stat().st_size


_STRING = b"X\x01\x00\x00\x00a"
_HOSTILE = {
    "a key so deep that hashing it overflows the stack": b"}N" + b"\x85" * 300_000 + b"Ns.",
    "tuples that hold themselves twice, forty deep": (
        b"}" + _STRING + b"N\x85" + b"q\x00h\x00\x86" * 40 + b"s."
    ),
    "a place in the memo that takes gigabytes": b"}r\xff\xff\xff\x7f" + _STRING + b"Ns.",
    "a call of what it made": b"}" + _STRING + b"})Rs.",
    "no value at all": b".",
}  # fmt: skip


@pytest.mark.parametrize("name", _HOSTILE)
def test_a_small_pickle_neither_crashes_nor_hangs_nor_fills_the_memory(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"weight": torch.ones(2)}, path)
    hostile = b"\x80\x02" + _HOSTILE[name]
    _rewritten(path, lambda entry, each: hostile if entry.endswith("data.pkl") else each)
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from specexec_cli.errors import CheckpointError\n"
        "from specexec_cli.offload.torch_files import read_torch_file\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n"
        "    read_torch_file(Path(sys.argv[1]))\n"
        "except CheckpointError as error:\n"
        "    print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    line, grown = done.stdout.splitlines()
    assert "is no file of tensors alone" in line
    assert int(grown) < 100_000, "kilobytes"


def test_an_order_of_bytes_that_unpacks_to_gigabytes_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"weight": torch.ones(2)}, path)
    with zipfile.ZipFile(path, "a") as whole:
        [order] = [name for name in whole.namelist() if name.endswith("byteorder")]
    _rewritten(
        path, lambda entry, each: bytes(1 << 28) if entry == order else each, zipfile.ZIP_DEFLATED
    )
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="not little-endian"):
            read_torch_file(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()
