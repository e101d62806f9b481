"""`draft` may be the folder of an EAGLE-3 head; no text changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from block_toys import BlockToy, block_toy
from checkpoints import save_byte_tokenizer
from eagle_toys import FEATURES, EagleToy, eagle_toy, save_target
from head_texts import joined, texts, together
from hosts_rig import TOKEN, WorkerProcess, free_port
from mtp_toys import save_mtp_toy
from safetensors.torch import load_file, save_file

from specexec_cli.config import SamplingConfig
from specexec_cli.errors import ConfigError
from specexec_cli.planning.alternatives import weighed
from specexec_cli.planning.machine import Host, Machine, described_site
from specexec_cli.planning.memory import fixed_parts
from specexec_cli.planning.request import Request, TreeRequest
from specexec_cli.planning.resolve import resolve


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _recite(folder: Path, toy: EagleToy) -> EagleToy:
    """Changes a target so that each token is followed by one certain other, and has the head
    predict the token after the next from the target's row alone.

    Layers add nothing to a row. A token's embedding is one number; the target's head leads from it
    to the token that follows, and the other head to the one behind that.
    """
    path = folder / "model.safetensors"
    stored = load_file(path)
    vocab, hidden = stored["lm_head.weight"].shape
    follows = torch.randperm(vocab, generator=torch.Generator().manual_seed(5))
    one = torch.eye(vocab, hidden)
    changed = dict(toy.tensors)
    for tensors in (stored, changed):
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensors[name] = torch.zeros_like(tensor)
            elif name.endswith("norm.weight"):
                tensors[name] = torch.ones_like(tensor)
    stored["model.embed_tokens.weight"] = one
    stored["lm_head.weight"] = torch.zeros(vocab, hidden)
    stored["lm_head.weight"][follows] = 10.0 * one
    save_file(stored, path, metadata={"format": "pt"})
    changed["fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, 2 * hidden)], dim=1)
    changed["lm_head.weight"] = torch.zeros(vocab, hidden)
    changed["lm_head.weight"][follows[follows]] = 10.0 * one
    return EagleToy(changed, toy.hidden)


@pytest.mark.parametrize(
    ("dtype", "activations"),
    [("float32", "full"), ("bfloat16", "full"), ("bfloat16", "8bit")],
)
def test_the_text_is_that_of_plain_decoding(tmp_path: Path, dtype: str, activations: str) -> None:
    """One text after another, and several that share passes."""
    folder = tmp_path / "target"
    save_target(folder)
    save_byte_tokenizer(folder)
    head = eagle_toy().save(tmp_path / "head", absent=("embed_tokens.weight",))
    sampling = SamplingConfig(temperature=0.8, seed=3)
    alike = {"dtype": dtype, "activations": activations, "offload": "ssd"}
    plain = texts(folder, sampling, method="autoregressive", **alike)
    tree = TreeRequest(budget=24, depth=8, batch=4, policy="fixed")
    drafted = texts(folder, sampling, draft=str(head), tree=tree, **alike)
    at_once = together(folder, sampling, draft=str(head), tree=tree, **alike)
    assert joined(at_once) == joined(drafted) == joined(plain)
    assert any(len(step) > 1 for text in drafted for step in text)


def test_a_target_with_recurrent_layers_has_heads_too(tmp_path: Path) -> None:
    """Its rows are replayed when a path is committed; those that a head reads are kept."""
    folder = tmp_path / "target"
    save_mtp_toy("qwen3_5_text", folder, std=0.4)
    save_byte_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    numbers = [1, 2, config["num_hidden_layers"]]
    head = eagle_toy(of_target=config["hidden_size"]).save(
        tmp_path / "head", eagle_aux_hidden_state_layer_ids=numbers
    )
    sampling = SamplingConfig(temperature=0.8, seed=3)
    plain = texts(folder, sampling, method="autoregressive", offload="ssd")
    tree = TreeRequest(budget=24, depth=8, batch=4, policy="fixed")
    drafted = texts(folder, sampling, draft=str(head), tree=tree, offload="ssd")
    assert joined(drafted) == joined(plain)


def test_what_the_head_knows_is_accepted_in_every_pass(tmp_path: Path) -> None:
    """From the right row it knows one token more: a row too early or late, and it knows none."""
    folder = tmp_path / "target"
    save_target(folder, hidden=64)
    save_byte_tokenizer(folder)
    toy = _recite(folder, eagle_toy(hidden=64, of_target=64, vocab=64))
    whole = ("d2t", "t2d", "embed_tokens.weight")
    head = toy.save(tmp_path / "head", absent=whole)
    plain = texts(folder, SamplingConfig(), method="autoregressive")
    tree = TreeRequest(budget=1, depth=1, policy="fixed", past=False)
    drafted = texts(folder, SamplingConfig(), draft=str(head), tree=tree)
    assert joined(drafted) == joined(plain)
    for text in drafted:
        assert {len(step) for step in text[1:-1]} == {2}


@pytest.mark.parametrize(
    "toy", [eagle_toy, partial(block_toy, causal=True)], ids=["EAGLE-3", "JetSpec"]
)
def test_over_two_machines_a_head_drafts_from_rows_of_layers_on_both(
    toy: Callable[[], EagleToy | BlockToy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pass commits what it does where one machine has all layers."""
    monkeypatch.setenv("SPECEXEC_TOKEN", TOKEN)
    folder, port, hosts = tmp_path / "target", free_port(), tmp_path / "hosts.toml"
    save_target(folder)
    save_byte_tokenizer(folder)
    tree = TreeRequest(budget=24, depth=8, batch=4, policy="fixed", past=False)
    head = toy().save(tmp_path / "head")
    alike = {"draft": str(head), "tree": tree, "dtype": "bfloat16"}
    sampling = SamplingConfig(temperature=0.8, seed=3)
    alone = texts(folder, sampling, **alike)
    assert any(len(step) > 1 for text in alone for step in text)
    hosts.write_text(
        f'listen = "127.0.0.1:{port}"\nwait_s = 60\n[[host]]\nname = "other"\nlayers = 5\n'
    )
    with WorkerProcess(str(folder), port, "other"):
        assert texts(folder, sampling, hosts=hosts, **alike) == alone


def test_a_plan_counts_the_head_and_the_rows_that_it_reads(tmp_path: Path) -> None:
    folder, toy = tmp_path / "target", eagle_toy()
    save_target(folder)
    save_byte_tokenizer(folder)
    card = described_site(ram_bytes=int(32e9), vram_bytes=int(6e9), ssd_bytes_per_s=2e9)
    head = toy.save(tmp_path / "head", absent=("embed_tokens.weight",))
    asked = Request(model=str(folder), draft=str(head), dtype="bfloat16")
    decision = resolve(asked, card)
    assert decision.draft is not None
    maps = ("d2t", "t2d", "embed_tokens.weight")
    own = sum(each.nbytes for name, each in toy.tensors.items() if name not in maps)
    assert decision.draft.sizes.total == own
    work, parts = (
        decision.work,
        dict(fixed_parts(decision.target.sizes, decision.draft.sizes, decision.work)),
    )
    kept = (3 * 32 + 32) * work.slots * 2  # of the target and of the head, in 16 bits
    assert parts["hidden rows"] == kept + 2 * 3 * 32 * work.pass_rows * 2
    whole = toy.save(tmp_path / "whole", torch_dtype="float32")
    here = resolve(replace(asked, draft=str(whole)), card).draft
    (whole / "model.safetensors").unlink()  # as of a head on the hub, of which a plan is asked
    absent = resolve(replace(asked, draft=str(whole)), card).draft
    assert here is not None
    assert absent is not None
    assert absent.sizes.layers == here.sizes.layers
    assert absent.sizes.resident == here.sizes.resident
    assert absent.head is not None
    assert here.head is not None
    assert absent.head.features == here.head.features == FEATURES
    for method in ("specexec", "autoregressive"):
        with pytest.raises(ConfigError, match="is an EAGLE-3 head, which drafts for another model"):
            resolve(Request(model=str(head), draft="suffix", method=method), card)
    with pytest.raises(ConfigError, match="reads rows of its target"):
        resolve(Request(model=str(folder), draft=str(head), method="dsi"), card)
    more = Machine(ram_bytes=int(8e9))
    attic = Host(name="attic", machine=more, link_bytes_per_s=117e6, delay_s=3e-4)
    away = resolve(asked, replace(card, hosts=(replace(attic, layers=5),))).plan.others
    assert [(each.layers, each.plan.work.features) for each in away] == [(range(3, 8), (4, 5))]
    parts = dict(fixed_parts(away[0].plan.target, None, away[0].plan.work))
    assert parts["hidden rows"] == 2 * 32 * work.pass_rows * 2  # which are sent as they are
    between = tuple(replace(attic, name=name, layers=n) for name, n in (("attic", 2), ("hall", 3)))
    spans = resolve(asked, replace(card, hosts=between)).plan.others
    assert [(each.layers, each.plan.work.features) for each in spans] == [
        (range(3, 5), (4,)), (range(5, 8), None),
    ], "rows between two spans travel anyway"  # fmt: skip
    rows = [each.host.hop_s(9, 32) for each in away]
    assert [each.hop_s(9) - own for each, own in zip(away, rows, strict=True)] == [
        pytest.approx(2 * 2 * 9 * 32 / 117e6)
    ]


def test_the_choice_of_a_draft_weighs_the_head(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    save_byte_tokenizer(tmp_path / "target")
    head, named = eagle_toy().save(tmp_path / "head"), tmp_path / "models.toml"
    named.write_text(f"[heads.mine]\ntarget = '{tmp_path / 'target'}'\nrepo = '{head}'\n")
    request = Request(model=str(tmp_path / "target"), draft="auto", models_file=named)
    card = described_site(ram_bytes=int(32e9), vram_bytes=int(6e9), ssd_bytes_per_s=2e9)
    found = {one.draft: one.speed for one in weighed(request, card)}
    assert found["mine"] is not None
