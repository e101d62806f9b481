"""What `specexec plan` promises before a download is what a session does after it.

The run has checkpoints of the true size: a header and holes, since no weight is read before a
Decision is made. GPU, free memory and probes are stand-ins; everything else is the real way.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import pytest
from checkpoints import save_byte_tokenizer
from computer import Computer
from typer.testing import CliRunner

from specexec_cli import loading
from specexec_cli.catalog.registry import load_registry
from specexec_cli.cli.main import app
from specexec_cli.device import format_bytes
from specexec_cli.errors import OutOfMemoryError
from specexec_cli.planning import chosen_models, machine
from specexec_cli.planning.memory import GPU_CONTEXT_BYTES, GPU_LIBRARY_BYTES
from specexec_cli.planning.pass_time import pass_time
from specexec_cli.planning.request import Request
from specexec_cli.planning.sizes import architecture_bytes

RAM_BYTES = 64 * 10**9
CARDS = (0, 8, 12, 16, 24, 48)  # GB; 0 is a machine without a GPU
PAIRS = [pair.name for pair in load_registry().pairs.values() if "demo" not in pair.name]
WHOLE = 12  # every twelfth pair is held against every card, the others each against one


def write_holes(folder: Path, config: dict[str, object]) -> None:
    """A checkpoint of the architecture's size whose weights are a hole in the file."""
    sizes, header, end = architecture_bytes(config), {}, 0
    # a table that is the head too is counted with the norm, as what stays
    tensors = [("lm_head.weight", sizes.head), ("model.embed_tokens.weight", sizes.table),
               ("model.norm.weight", sizes.resident - sizes.head - sizes.table)]  # fmt: skip
    tensors += [(f"model.layers.{n}.weight", size) for n, size in enumerate(sizes.layers)]
    for name, size in tensors:
        if not size:
            continue
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    words = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        file.truncate(8 + len(words) + end)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every model that a pair names, by repository."""
    registry, folders = load_registry(), {}
    byte_tokenizer = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(byte_tokenizer)
    for pair in (registry.pairs[name] for name in PAIRS):
        for entry in (registry.resolve(pair.target), registry.draft_of(pair)):
            if entry is None or entry.repo in folders:
                continue
            folder = folders[entry.repo] = tmp_path_factory.mktemp("model")
            write_holes(folder, entry.config_json())
            for path in byte_tokenizer.iterdir():
                (folder / path.name).write_bytes(path.read_bytes())
    return folders


@pytest.fixture(autouse=True)
def bare_machine(computer: Computer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty hub cache, nothing measured."""
    computer.reads_at(3e9, 25e9)
    monkeypatch.setattr(loading, "load_tokenizer", lru_cache(loading.load_tokenizer))
    # a plan's machine is not here to be measured
    monkeypatch.setattr(machine.Site, "calibrated", lambda here, *rows, **how: here)


@pytest.mark.parametrize("pair", PAIRS)
def test_rows_context_tiers_and_bytes_are_the_same(
    pair: str, downloads: dict[str, Path], computer: Computer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen_models, "fetch", lambda entry, **options: downloads[entry.repo])
    for card in CARDS:
        # the process of a run is loaded when free memory is read, and CUDA's context is there; a
        # plan leaves room for both
        usable = 0.9 if card else 0.96
        computer.has_free_ram(RAM_BYTES - int(machine.PROGRAM_BYTES / usable))
        context = int((GPU_CONTEXT_BYTES - GPU_LIBRARY_BYTES) / 0.96) if card else 0
        free = card * 10**9 - context
        computer.torch_sees(int(card > 0), lambda free=free: free)
        planned = CliRunner().invoke(
            app,
            ["plan", pair, "--vram", f"{card}GB", "--ram", format_bytes(RAM_BYTES),
             "--ssd", "3GB/s", "--link", "25GB/s", "--json"],
        )  # fmt: skip
        try:
            run: loading.Prepared | None = loading.prepare(Request(model=pair))
        except OutOfMemoryError:
            run = None
        if run is None:
            assert isinstance(planned.exception, OutOfMemoryError), card
            continue
        assert planned.exception is None, (card, planned.exception)
        told, plan = json.loads(planned.stdout), run.decision.plan
        usual = pass_time(plan, told["rows"])
        assert told["work"]["budget"] == run.decision.work.budget == run.pair.tree.budget
        assert told["work"]["context_tokens"] == run.decision.work.context_tokens
        assert told["work"]["item_bytes"] == run.dtype.itemsize
        assert told["tiers"] == list(plan.tiers)
        vram = {name: size for name, size in told["vram"].items() if name != "CUDA context"}
        assert vram == {name: size for name, size in plan.vram if name != "CUDA context"}
        assert (told["ssd_bytes"], told["link_bytes"]) == (usual.ssd_bytes, usual.link_bytes)
        assert told["pass_s"] == usual.seconds
        ram = {name: size for name, size in told["ram"].items() if name != "program"}
        assert ram == {name: size for name, size in plan.ram if name != "program"}
