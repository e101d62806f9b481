"""Where layers are placed under each --offload mode, and how fast the others can stream."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import BYTE_VOCAB, byte_llama, save_checkpoint
from computer import Computer
from quantized_checkpoints import save_quantized

from specexec_cli.catalog.registry import load_registry
from specexec_cli.cli.mends import with_mend
from specexec_cli.config import OffloadMode
from specexec_cli.device import HUGE_PAGE_BYTES
from specexec_cli.errors import OutOfMemoryError
from specexec_cli.offload.slabs import SLAB_BYTES
from specexec_cli.planning import dtype_choice
from specexec_cli.planning.machine import Setting, Site
from specexec_cli.planning.memory import BLOCK_ROWS, activation_bytes
from specexec_cli.planning.request import Request, TreeRequest
from specexec_cli.planning.resolve import Decision, resolve

LINK, SSD = 20e9, 2e9


def site(ram_bytes: int, vram_bytes: int) -> Site:
    settings = {"ram": ram_bytes, "vram": vram_bytes, "ssd": SSD, "link": LINK, "memory": 1e12}
    return Site(
        device="cuda:0" if vram_bytes else "cpu",
        settings={name: Setting(value, "given") for name, value in settings.items()},
        program_bytes=0,
    )


def decided(folder: Path, where: Site, offload: OffloadMode = "auto") -> Decision:
    request = Request(
        model=str(folder), method="autoregressive", offload=offload, context_tokens=100
    )
    return resolve(request, where)


def test_the_rate_that_streamed_bytes_can_come_at(tmp_path: Path) -> None:
    """The SSD's where all comes from there, more where RAM adds its part, the link's at most."""
    save_checkpoint(tmp_path, byte_llama(num_hidden_layers=8))
    rates: dict[str, set[float | None]] = {}
    unpinned = 4_000_000_000  # that stays free beside a GPU
    least = int(SLAB_BYTES / 0.96)  # beside the margin
    beside = SLAB_BYTES + unpinned
    for ram_bytes in (least + (6 << 20), beside + (12 << 20), beside + (40 << 20)):
        for vram_bytes in range(700_000_000, 740_000_000, HUGE_PAGE_BYTES):
            try:
                found = decided(tmp_path, site(ram_bytes, vram_bytes))
            except OutOfMemoryError:
                continue
            assert found.tiers is not None
            ssd, ram = found.tiers.count("ssd"), found.tiers.count("ram")
            if ssd or ram:
                assert found.ssd_share == ssd / (ssd + ram)
            rates.setdefault(found.plan.label, set()).add(found.link_bytes_per_s)
    assert rates["resident"] == {None}
    assert rates["ram+resident"] == {LINK}
    assert rates["resident+ssd"] == {SSD}
    for rate in rates["ram+resident+ssd"]:
        assert rate is not None
        assert SSD < rate < LINK


def test_what_is_measured_takes_the_place_of_what_was_known(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, byte_llama())
    where = replace(site(10**9, 0), measure=lambda *arguments: {"ssd": Setting(3e9, "measured")})
    found = decided(tmp_path, where, "ssd")
    assert found.tiers == ("ssd",) * 4
    assert found.link_bytes_per_s == 3e9
    assert found.settings["ssd"] == Setting(3e9, "measured")
    assert found.machine.ssd_bytes_per_s == 3e9


@pytest.mark.parametrize(
    ("ram_bytes", "offload", "label"),
    [
        (10**9, "auto", "none"),  # small beside the memory that is free
        (140_000_000, "auto", "ram"),
        (140_000_000, "none", "none"),
        (140_000_000, "ram", "ram"),
        (10**9, "ssd", "ssd"),
    ],
)
def test_a_cpu_loads_small_targets_and_streams_others(
    ram_bytes: int, offload: OffloadMode, label: str, tmp_path: Path
) -> None:
    """A byte Llama of 27 MB once it is loaded in float32."""
    save_checkpoint(tmp_path, byte_llama(hidden_size=512, intermediate_size=1024))
    found = decided(tmp_path, site(ram_bytes, 0), offload)
    assert found.plan.label == label
    assert (found.tiers is None) == (label == "none")
    loaded = dict(found.plan.ram).get("loaded layers", 0)
    assert loaded == (found.target.sizes.layer_params * 4 if label == "none" else 0)


def test_no_room_for_a_whole_target(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, byte_llama())
    for where, words in (
        (site(10_000, 0), "of RAM"),
        (site(10**9, 1_000_000), "of GPU memory"),
    ):
        with pytest.raises(OutOfMemoryError, match=f"{words} but .* are free") as error:
            decided(tmp_path, where, "none")
        # streamed, it does not fit either
        assert with_mend(error.value).endswith(". Use a smaller or quantized model")


@pytest.mark.parametrize("offload", ["ssd", "ram"])
def test_a_named_place_is_refused_where_memory_ends(tmp_path: Path, offload: OffloadMode) -> None:
    """As nothing checked it, a text too long for the memory was killed instead."""
    save_checkpoint(tmp_path, byte_llama())
    needed = decided(tmp_path, site(10**9, 0), offload).plan.peak_ram_bytes
    with pytest.raises(OutOfMemoryError, match=r"^the models need [\d.]+ MB of RAM but [\d.]+ MB"):
        decided(tmp_path, site(needed, 0), offload)  # the margin is missing
    assert decided(tmp_path, site(int(needed / 0.96) + 1, 0), offload).plan.peak_ram_bytes == needed


def test_a_ring_has_two_buffers_where_three_are_too_many(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, byte_llama())
    three = decided(tmp_path, site(10**9, 0), "ssd").plan
    two = decided(tmp_path, site(int(three.peak_ram_bytes / 0.96) - 1, 0), "ssd").plan
    assert (three.ssd_buffers, two.ssd_buffers) == (3, 2)


def test_a_tree_larger_than_recommended_is_welcome_not_needed() -> None:
    """The policy that sizes trees may try twice the pair's budget, where memory allows it."""
    recommended = load_registry().pairs["llama2-70b-chat"].budget
    budgets = []
    for gigabytes in range(24, 48, 2):
        where = site(256 * 10**9, gigabytes * 10**9)
        try:
            budgets.append(resolve(Request(model="llama2-70b-chat"), where).tree.budget)
        except OutOfMemoryError:
            asked = Request(model="llama2-70b-chat", tree=TreeRequest(budget=recommended))
            with pytest.raises(OutOfMemoryError):
                resolve(asked, where)
    assert budgets == sorted(budgets)
    # less the root, which is a row of the last block
    assert set(budgets) == {recommended - 1, 2 * recommended - 1}


@pytest.mark.parametrize(
    ("vram_bytes", "offload", "tiers", "converted"),
    [
        (0, "ssd", ["ssd"] * 4, {"draft layers"}),
        (0, "none", ["resident"] * 4, {"draft layers", "target layers"}),
        (8 * 10**9, "ram", ["resident"] * 4, {"draft layers", "draft tables"}),
        (8 * 10**9, "none", ["resident"] * 4,
         {"draft layers", "draft tables", "target layers", "target tables"}),
    ],
)  # fmt: skip
def test_one_table_says_where_every_part_of_both_models_is(
    tmp_path: Path, vram_bytes: int, offload: OffloadMode, tiers: list[str], converted: set[str]
) -> None:
    save_checkpoint(tmp_path / "target", byte_llama(num_hidden_layers=4))
    save_checkpoint(tmp_path / "draft", byte_llama(num_hidden_layers=2, tie_word_embeddings=True))
    request = Request(
        model=str(tmp_path / "target"), draft=str(tmp_path / "draft"), offload=offload,
        context_tokens=100,
    )  # fmt: skip
    found = resolve(request, site(10**9, vram_bytes))
    rows = found.placement
    assert [(row.model, row.part, row.index) for row in rows] == [
        (model, part, index)
        for model, layers in (("target", 4), ("draft", 2))
        for part, index in [
            ("embeddings", None), *(("layer", layer) for layer in range(layers)), ("head", None)
        ]
    ]  # fmt: skip
    assert [row.tier for row in rows[1:5]] == tiers
    assert {row.tier for row in rows[5:]} == {"resident"}
    in_ram = offload == "ram"  # on a GPU, where layers may be streamed
    assert rows[0].tier == ("ram" if in_ram else "resident")
    assert dict(found.plan.ram).get("embeddings", 0) == (found.target.sizes.table if in_ram else 0)
    resident = found.target.sizes.resident - (found.target.sizes.table if in_ram else 0)
    assert dict(found.plan.vram or found.plan.ram)["embeddings and head"] == resident
    assert found.target.sizes.table == BYTE_VOCAB * 32 * 4
    assert found.tiers == (None if found.plan.stays else tuple(tiers))
    kinds = {
        f"{row.model} {'layers' if row.part == 'layer' else 'tables'}"
        for row in rows
        if row.converted
    }
    assert kinds == converted
    assert found.draft is not None
    stored = [sum(row.stored_bytes for row in rows if row.model == model)
              for model in ("target", "draft")]  # fmt: skip
    assert stored == [found.target.sizes.total, found.draft.sizes.total]
    assert rows[5].stored_bytes > 0, "a head of its own"
    assert rows[-1].stored_bytes == 0, "the head is the table of embeddings"


def test_a_gpu_looks_up_and_multiplies_tables_of_two_bytes_wherever_layers_wait(
    tmp_path: Path,
) -> None:
    save_checkpoint(tmp_path, byte_llama())
    modes: list[OffloadMode] = ["none", "ram"]
    for offload in modes:
        request = Request(
            model=str(tmp_path),
            method="autoregressive",
            offload=offload,
            dtype="bfloat16",
            context_tokens=100,
        )
        rows = resolve(request, site(10**9, 8 * 10**9)).placement
        assert [row.converted for row in rows if row.part != "layer"] == [True, True]


def test_experts_that_come_one_by_one_are_rows_of_their_own() -> None:
    found = resolve(Request(model="qwen3-30b-a3b"), site(32 * 10**9, 0))
    rows = [row for row in found.placement if row.model == "target"]
    assert found.plan.expert_bytes > 0
    assert {(row.part, row.tier) for row in rows} == {
        ("embeddings", "resident"), ("layer", "ram"), ("experts", "ssd"), ("head", "resident")
    }  # fmt: skip
    assert sum(row.stored_bytes for row in rows) == found.target.sizes.total
    whole = resolve(Request(model="qwen3-30b-a3b"), site(96 * 10**9, 0))
    assert not whole.plan.expert_bytes
    assert "experts" not in {row.part for row in whole.placement}


def test_packed_weights_count_as_what_they_unpack_to(
    tmp_path: Path, computer: Computer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small models compute in float32; 0.9 GB in 4 bits are 1.5 billion weights, and do not."""
    _, folder = save_quantized(tmp_path)
    computer.has_cpu("A CPU", "avx512_bf16")
    sizes = decided(folder, site(1 << 30, 0)).target.sizes
    unpacked_bytes = 2 * sizes.layer_params
    assert sizes.packed
    assert sizes.total < unpacked_bytes
    for limit, dtype in ((unpacked_bytes, "bfloat16"), (unpacked_bytes + 1, "float32")):
        monkeypatch.setattr(dtype_choice, "SMALL_MODEL_BYTES", limit)
        assert decided(folder, site(1 << 30, 0)).dtype == dtype


@pytest.mark.parametrize("pair", ["llama2-70b-chat-gptq-160m", "llama3.3-70b-instruct-awq-1b"])
def test_prompts_fill_what_trees_will_need(pair: str) -> None:
    """More rows of a prompt go through a layer together, and no more memory is planned for them."""
    where = site(64 * 10**9, 24 * 10**9)
    decision = resolve(Request(model=pair, context_tokens=8192), where)
    rows, work, sizes = decision.prompt_rows, decision.work, decision.target.sizes
    assert work.chunk_rows + 512 <= rows < work.context_tokens
    logits = work.verify_rows * sizes.vocab * 4
    spare = where.machine(decision.dtype).usable(24 * 10**9) - decision.plan.peak_vram_bytes
    usual = activation_bytes(sizes, work)
    together = activation_bytes(sizes, replace(work, chunk_rows=rows))
    assert usual < together <= usual + logits + spare
    again = activation_bytes(sizes, replace(work, chunk_rows=rows + BLOCK_ROWS))
    assert again > usual + logits + spare


def test_prompts_of_weights_that_nothing_converts_go_as_ever() -> None:
    decision = resolve(Request(model="llama2-70b-chat-160m"), site(64 * 10**9, 24 * 10**9))
    assert decision.prompt_rows == decision.work.chunk_rows
    on_cpu = resolve(Request(model="llama2-70b-chat-gptq-160m"), site(64 * 10**9, 0))
    assert on_cpu.prompt_rows == on_cpu.work.chunk_rows
