"""`draft` may be the folder of a Gemma 4's assistant; no text changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from assistant_toys import CONVERTED, save_assistant, save_converted, save_gemma
from checkpoints import save_byte_tokenizer
from gguf_toys import converted
from head_texts import joined, texts, together
from safetensors.torch import load_file, save_file

from specexec_cli.config import SamplingConfig
from specexec_cli.errors import ConfigError
from specexec_cli.planning.alternatives import weighed, with_best_draft
from specexec_cli.planning.machine import Host, Machine, described_site
from specexec_cli.planning.memory import fixed_parts
from specexec_cli.planning.request import Request, TreeRequest
from specexec_cli.planning.resolve import resolve


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _saved(tmp_path: Path, shared: int = 0, hidden: int = 32) -> tuple[str, str]:
    """The folders of a target and of its assistant."""
    target = save_gemma(tmp_path / "target", shared, hidden)
    save_byte_tokenizer(tmp_path / "target")
    save_assistant(tmp_path / "head", target)
    return str(tmp_path / "target"), str(tmp_path / "head")


def _recite(tmp_path: Path) -> None:
    """Changes both models so that each token is followed by one certain other, and has the
    assistant predict the token after the next from the target's row alone.

    Layers add nothing to a row. A token's embedding is one number; the target's head leads from it
    to the token that follows, and the assistant's to the one behind that.
    """
    follows = torch.randperm(64, generator=torch.Generator().manual_seed(5))
    one = torch.eye(64)
    for name in ("target", "head"):
        path = tmp_path / name / "model.safetensors"
        stored = load_file(path)
        for part, tensor in stored.items():
            if "feedforward_layernorm" in part or "attention_layernorm" in part:
                tensor.zero_()
            elif part.endswith(("norm.weight", "layer_scalar")):
                tensor.fill_(1.0)
        if name == "target":
            stored["model.embed_tokens.weight"] = one
            stored["lm_head.weight"] = torch.zeros(64, 64)
            stored["lm_head.weight"][follows] = 10.0 * one
            config = json.loads((tmp_path / name / "config.json").read_text())
            (tmp_path / name / "config.json").write_text(
                json.dumps(config | {"tie_word_embeddings": False})
            )
        else:
            # 64 tokens in rows of 16 numbers: each has a direction of its own
            away = torch.randn(64, 16, generator=torch.Generator().manual_seed(6))
            away = away / away.norm(dim=1, keepdim=True)
            stored["pre_projection.weight"] = torch.cat([torch.zeros(16, 64), away.T], dim=1)
            stored["model.embed_tokens.weight"][follows[follows]] = 10.0 * away
        save_file(stored, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("dtype", "activations"),
    [("float32", "full"), ("bfloat16", "full"), ("bfloat16", "8bit")],
)
@pytest.mark.parametrize("shared", [0, 3])
def test_the_text_is_that_of_plain_decoding(
    tmp_path: Path, shared: int, dtype: str, activations: str
) -> None:
    """One text after another, and several that share passes."""
    folder, head = _saved(tmp_path, shared)
    sampling = SamplingConfig(temperature=0.8, seed=3)
    alike = {"dtype": dtype, "activations": activations, "offload": "ssd"}
    plain = texts(folder, sampling, method="autoregressive", **alike)
    tree = TreeRequest(budget=24, depth=8, batch=4, policy="fixed")
    drafted = texts(folder, sampling, draft=head, tree=tree, **alike)
    at_once = together(folder, sampling, draft=head, tree=tree, **alike)
    assert joined(at_once) == joined(drafted) == joined(plain)


def test_an_assistant_in_a_gguf_file_changes_no_text(tmp_path: Path) -> None:
    save_converted(tmp_path / "head")
    save_byte_tokenizer(tmp_path / "target")
    head, folder = str(converted(CONVERTED, tmp_path)), str(tmp_path / "target")
    sampling = SamplingConfig(temperature=0.8, seed=3)
    plain = texts(folder, sampling, method="autoregressive")
    tree = TreeRequest(budget=24, depth=8, batch=4, policy="fixed", past=False)
    assert joined(texts(folder, sampling, draft=head, tree=tree)) == joined(plain)
    with pytest.raises(ConfigError, match="is an assistant, which drafts for another model"):
        resolve(Request(model=head, draft="suffix"), described_site(ram_bytes=int(1e9)))


def test_beside_keys_in_8_bits_it_drafts_from_what_they_mean(tmp_path: Path) -> None:
    """And the text is that of plain decoding with keys kept so."""
    folder, head = _saved(tmp_path)
    sampling = SamplingConfig(temperature=0.8, seed=3)
    plain = texts(folder, sampling, method="autoregressive", kv="8bit")
    tree = TreeRequest(budget=24, depth=8, batch=4, policy="fixed", past=False)
    drafted = texts(folder, sampling, draft=head, tree=tree, kv="8bit")
    assert joined(drafted) == joined(plain)
    assert any(len(step) > 1 for text in drafted for step in text)


def test_what_the_assistant_knows_is_accepted_in_every_pass(tmp_path: Path) -> None:
    """From the right row it knows one token more: a row too early or late, and it knows none."""
    folder, head = _saved(tmp_path, hidden=64)
    _recite(tmp_path)
    plain = texts(folder, SamplingConfig(), method="autoregressive")
    tree = TreeRequest(budget=1, depth=1, policy="fixed", past=False)
    drafted = texts(folder, SamplingConfig(), draft=head, tree=tree)
    assert joined(drafted) == joined(plain)
    for text in drafted:
        assert {len(step) for step in text[1:-1]} == {2}


def test_the_policy_that_times_passes_takes_an_assistant_too(tmp_path: Path) -> None:
    folder, head = _saved(tmp_path)
    plain = texts(folder, SamplingConfig(), method="autoregressive")
    assert joined(texts(folder, SamplingConfig(), draft=head)) == joined(plain)


def test_a_plan_counts_the_assistant_and_no_keys_of_it(tmp_path: Path) -> None:
    folder, head = _saved(tmp_path)
    card = described_site(ram_bytes=int(32e9), vram_bytes=int(6e9), ssd_bytes_per_s=2e9)
    asked = Request(model=folder, draft=head, dtype="bfloat16")
    decision = resolve(asked, card)
    assert decision.draft is not None
    stored = load_file(tmp_path / "head" / "model.safetensors")
    sizes, work = decision.draft.sizes, decision.work
    assert sizes.total == sum(each.nbytes for each in stored.values())
    assert sizes.head == stored["model.embed_tokens.weight"].nbytes
    assert sizes.kv_elements == 0
    parts = dict(fixed_parts(decision.target.sizes, sizes, work))
    assert parts["hidden rows"] == 32 * (work.slots + work.verify_rows) * 2
    (tmp_path / "head" / "model.safetensors").unlink()  # as on the hub, of which a plan is asked
    absent = resolve(asked, card).draft
    assert absent is not None
    assert absent.head == decision.draft.head
    # its keys' weights are counted, which the file has not
    assert sizes.total < 2 * absent.sizes.total < 4 * sizes.total


def test_the_choice_of_a_draft_weighs_a_head_that_models_toml_names(tmp_path: Path) -> None:
    folder, head = _saved(tmp_path)
    named = tmp_path / "models.toml"
    named.write_text(f"[heads.mine]\ntarget = '{folder}'\nrepo = '{head}'\n")
    request, told = Request(model=folder, draft="auto", models_file=named), list[str]()
    site = described_site(ram_bytes=int(1e9), vram_bytes=0, ssd_bytes_per_s=2e9)
    found = {one.draft: one for one in weighed(request, site)}
    assert found["mine"].speed is not None
    with_best_draft(request, site, told.append)
    assert len(told) == 1, "what is here is not proposed"
    assert "mine" in told[0]


def test_what_an_assistant_cannot_read_is_told_in_one_line(tmp_path: Path) -> None:
    folder, head = _saved(tmp_path)
    card = described_site(ram_bytes=int(32e9), vram_bytes=int(6e9), ssd_bytes_per_s=2e9)
    asked = Request(model=folder, draft=head)
    with pytest.raises(ConfigError, match="is an assistant, which drafts for another model"):
        resolve(Request(model=head, draft="suffix"), card)
    with pytest.raises(ConfigError, match="reads rows of its target"):
        resolve(replace(asked, method="dsi"), card)
    more = Machine(ram_bytes=int(8e9))
    attic = Host(name="attic", machine=more, link_bytes_per_s=117e6, delay_s=3e-4)
    with pytest.raises(ConfigError, match="'s layers, which `hosts` has elsewhere"):
        resolve(asked, replace(card, hosts=(attic,)))
