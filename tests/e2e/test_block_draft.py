"""`draft` may be the folder of a DFlash or JetSpec head; no text changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from block_toys import FEATURES, ROWS, block_toy
from checkpoints import save_byte_tokenizer
from eagle_toys import save_target
from head_texts import joined, texts, together
from safetensors.torch import load_file, save_file

from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.errors import ConfigError
from specexec_cli.planning.alternatives import weighed
from specexec_cli.planning.machine import described_site
from specexec_cli.planning.memory import fixed_parts
from specexec_cli.planning.request import Request, TreeRequest
from specexec_cli.planning.resolve import resolve
from specexec_cli.session import open_session


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _saved(folder: Path, causal: bool = False, hidden: int = 32) -> tuple[str, str]:
    """The folders of a target and of a head for it."""
    save_target(folder / "target", hidden=hidden)
    save_byte_tokenizer(folder / "target")
    return str(folder / "target"), str(block_toy(causal, hidden).save(folder / "head"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_text_is_that_of_plain_decoding(tmp_path: Path, causal: bool, dtype: str) -> None:
    """One text after another, and several that share passes."""
    folder, head = _saved(tmp_path, causal)
    sampling = SamplingConfig(temperature=0.8, seed=3)
    alike = {"dtype": dtype, "offload": "ssd"}
    plain = texts(folder, sampling, method="autoregressive", **alike)
    tree = TreeRequest(budget=24, depth=8, batch=4, policy="fixed")
    drafted = texts(folder, sampling, draft=head, tree=tree, **alike)
    at_once = together(folder, sampling, draft=head, tree=tree, **alike)
    assert joined(at_once) == joined(drafted) == joined(plain)
    assert any(len(step) > 1 for text in drafted for step in text)


def test_beside_keys_in_8_bits_the_text_is_that_of_plain_decoding(tmp_path: Path) -> None:
    folder, head = _saved(tmp_path)
    sampling = SamplingConfig(temperature=0.8, seed=3)
    plain = texts(folder, sampling, method="autoregressive", kv="8bit")
    tree = TreeRequest(budget=24, depth=8, batch=4, policy="fixed")
    assert joined(texts(folder, sampling, draft=head, tree=tree, kv="8bit")) == joined(plain)


def test_the_policy_that_times_passes_takes_such_a_head_too(tmp_path: Path) -> None:
    folder, head = _saved(tmp_path)
    plain = texts(folder, SamplingConfig(), method="autoregressive")
    assert joined(texts(folder, SamplingConfig(), draft=head)) == joined(plain)


def test_what_the_head_knows_is_accepted_whole(tmp_path: Path) -> None:
    """Of both models layers add nothing, and any token is followed by one and the same."""
    folder, head = _saved(tmp_path, hidden=64)
    for place in (folder, head):
        path = Path(place) / "model.safetensors"
        stored = load_file(path)
        for name, tensor in stored.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
            elif name.endswith("norm.weight"):
                tensor.fill_(1.0)
        if place == folder:
            stored["model.embed_tokens.weight"] = torch.eye(64)
            stored["lm_head.weight"] = torch.zeros(64, 64)
            stored["lm_head.weight"][20] = 10.0
        save_file(stored, path, metadata={"format": "pt"})
    tree = TreeRequest(budget=16, depth=8, policy="fixed", past=False)
    for text in texts(folder, SamplingConfig(), draft=head, tree=tree):
        assert [len(step) for step in text] == [1, ROWS, ROWS, ROWS]


def test_rows_that_were_kept_on_disk_draft_the_same(tmp_path: Path) -> None:
    folder, head = _saved(tmp_path)
    tree = TreeRequest(budget=8, depth=4, policy="fixed", past=False)
    asked = Request(
        model=folder, device="cpu", context_tokens=256, draft=head, tree=tree, remember=True,
        dtype="float32",
    )  # fmt: skip
    prompt, ending, found = [*range(3, 50)] * 3, GenerationConfig(max_tokens=11), []
    for _ in range(2):
        with open_session(asked) as session:
            steps = [list(step.tokens) for step in session.generate(prompt, generation=ending)]
            found.append((joined([steps])[0], session.stats.prompt_rows))
    assert [rows for _, rows in found] == [141, 13]
    assert found[0][0] == found[1][0]


def test_a_plan_counts_one_pass_for_a_tree_and_weighs_it(tmp_path: Path) -> None:
    folder, head = _saved(tmp_path)
    card = described_site(ram_bytes=int(32e9), vram_bytes=int(6e9), ssd_bytes_per_s=2e9)
    asked = Request(model=folder, draft=head, dtype="bfloat16")
    decision = resolve(asked, card)
    assert decision.draft is not None
    stored = load_file(Path(head) / "model.safetensors")
    assert decision.draft.sizes.total == sum(each.nbytes for each in stored.values())
    assert decision.draft.head is not None
    assert decision.draft.head.features == FEATURES
    parts = dict(fixed_parts(decision.target.sizes, decision.draft.sizes, decision.work))
    assert parts["hidden rows"] > 3 * 32 * decision.work.slots * 2
    named = tmp_path / "models.toml"
    named.write_text(f"[heads.mine]\ntarget = '{folder}'\nrepo = '{head}'\n")
    seconds = set()
    for nodes in (16, 256):
        asked_for = Request(
            model=folder, draft="auto", models_file=named, tree=TreeRequest(budget=nodes)
        )
        speed = {one.draft: one.speed for one in weighed(asked_for, card)}["mine"]
        assert speed is not None
        seconds.add(speed.usual.draft_s)
    assert len(seconds) == 1, "a larger tree takes no more passes of the head"
    with pytest.raises(ConfigError, match="is a DFlash or JetSpec head, which drafts for another"):
        resolve(Request(model=head, draft="suffix"), card)
    with pytest.raises(ConfigError, match="reads rows of its target"):
        resolve(Request(model=folder, draft=head, method="dsi"), card)
