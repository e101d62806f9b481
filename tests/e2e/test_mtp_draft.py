"""`draft='mtp'`: the target's own layer that predicts further tokens drafts; no text changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import save_byte_tokenizer
from cli_runner import run_cli
from head_texts import joined, texts, together
from hosts_rig import TOKEN, WorkerProcess, free_port
from mtp_toys import BEFORE_NORM, BEHIND, QWEN, recite, save_mtp_toy, save_three_layers
from safetensors.torch import load_file, save_file

from specexec_cli.config import DtypeName, GenerationConfig, SamplingConfig
from specexec_cli.errors import ConfigError
from specexec_cli.offload.mtp import mtp_checkpoint
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.alternatives import weighed, with_best_draft
from specexec_cli.planning.chosen_models import choose_pair, registry_of
from specexec_cli.planning.expected_speed import tokens_per_pass
from specexec_cli.planning.machine import described_site
from specexec_cli.planning.memory import fixed_parts
from specexec_cli.planning.request import Request, TreeRequest
from specexec_cli.planning.resolve import resolve
from specexec_cli.planning.speed import MTP_LAYERS_TOKENS_PER_PASS
from specexec_cli.session import open_session


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _saved(folder: Path, model_type: str, by: str | None = None) -> Path:
    save_mtp_toy(model_type, folder, std=0.4, hidden_size=64)
    if by is not None:
        recite(folder, by)
    save_byte_tokenizer(folder)
    return folder


def _reciting(folder: Path, model_type: str) -> Path:
    """A target whose layers are right wherever they read the right rows."""
    if model_type not in BEFORE_NORM:
        return _saved(folder, model_type, "hidden rows")
    save_three_layers(model_type, folder, hidden_size=64)
    recite(folder, "hidden rows")
    save_byte_tokenizer(folder)
    return folder


def _whole(tokens: int) -> list[int]:
    """What passes commit where all drafts are right: one token behind the prompt, then five each,
    up to the text's end."""
    left = tokens - 1
    return [1, *[5] * (left // 5), *([left % 5] if left % 5 else [])]


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [*((each, "float32") for each in (*QWEN, *BEHIND)), ("qwen3_5_text", "bfloat16")],
)
def test_the_text_is_that_of_plain_decoding(
    tmp_path: Path, model_type: str, dtype: DtypeName
) -> None:
    folder = _saved(tmp_path / "target", model_type)
    sampling = SamplingConfig(temperature=0.8, seed=3)
    plain = texts(folder, sampling, method="autoregressive", dtype=dtype, offload="ssd")
    tree = TreeRequest(budget=24, depth=8, batch=4, policy="fixed")
    drafted = texts(folder, sampling, draft="mtp", tree=tree, dtype=dtype, offload="ssd")
    assert joined(drafted) == joined(plain)
    assert any(len(step) > 1 for text in drafted for step in text)


@pytest.mark.parametrize(
    ("model_type", "dtype"), [*((each, "float32") for each in BEFORE_NORM), ("step3p7", "bfloat16")]
)
def test_with_three_layers_the_text_is_that_of_plain_decoding(
    tmp_path: Path, model_type: str, dtype: DtypeName
) -> None:
    save_three_layers(model_type, tmp_path / "target")
    save_byte_tokenizer(tmp_path / "target")
    sampling = SamplingConfig(temperature=0.8, seed=3)
    plain = texts(tmp_path / "target", sampling, method="autoregressive", dtype=dtype)
    tree = TreeRequest(budget=24, depth=8, batch=4, policy="fixed")
    drafted = texts(tmp_path / "target", sampling, draft="mtp", tree=tree, dtype=dtype)
    assert joined(drafted) == joined(plain)


def test_three_layers_are_right_wherever_each_reads_the_row_that_it_was_made_for(
    tmp_path: Path,
) -> None:
    """Each of these goes by its hidden row alone, and is as far behind it as MiMo-V2's are."""
    save_three_layers("mimo_v2_flash", tmp_path / "target", hidden_size=64)
    recite(tmp_path / "target", "hidden rows")
    save_byte_tokenizer(tmp_path / "target")
    tree = TreeRequest(budget=5, depth=5, policy="fixed", past=False)
    drafted = texts(tmp_path / "target", SamplingConfig(), draft="mtp", tree=tree)
    behind_short = [len(step) for text in drafted for step in text[3:-1]]  # of a token or more
    assert behind_short == [6] * len(behind_short) != []


def test_layers_that_a_copy_lacks_are_told_in_a_line(tmp_path: Path) -> None:
    """The others draft."""
    save_three_layers("step3p7", tmp_path)
    save_byte_tokenizer(tmp_path)
    path, lines = tmp_path / "model.safetensors", list[str]()
    kept = {name: each for name, each in load_file(path).items() if ".layers.6." not in name}
    save_file(kept, path, metadata={"format": "pt"})
    said = "says 3 layers that predict further tokens (MTP), of which 2 draft: the files hold no"
    asked = Request(model=str(tmp_path), device="cpu", context_tokens=64, draft="mtp")
    with open_session(asked, notice=lines.append) as session:
        list(session.generate([5, 6, 7], generation=GenerationConfig(max_tokens=4)))
    assert sum(said in line for line in lines) == 1
    assert said in " ".join(run_cli("plan", tmp_path, "--draft", "mtp", "--offline").out.split())
    lines.clear()
    with open_session(replace(asked, method="autoregressive", draft=None), notice=lines.append):
        assert not any("MTP" in line for line in lines), "they are of no use there"


def test_beside_keys_in_8_bits_the_text_is_that_of_plain_decoding(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "target", "glm4_moe")
    sampling = SamplingConfig(temperature=0.8, seed=3)
    plain = texts(folder, sampling, method="autoregressive", kv="8bit")
    tree = TreeRequest(budget=24, depth=8, batch=4, policy="fixed")
    assert joined(texts(folder, sampling, draft="mtp", tree=tree, kv="8bit")) == joined(plain)


@pytest.mark.parametrize("model_type", ["glm4_moe", "mimo_v2_flash"])
def test_over_two_machines_the_layer_drafts_from_what_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    """It stays with the head, on the first; the other has layers of the target."""
    monkeypatch.setenv("SPECEXEC_TOKEN", TOKEN)
    folder = tmp_path / "target"
    _reciting(folder, model_type)
    alike = {"dtype": "float32", "tree": TreeRequest(budget=4, depth=4, policy="fixed", past=False)}
    alone = texts(folder, SamplingConfig(), draft="mtp", **alike)
    port, hosts = free_port(), tmp_path / "hosts.toml"
    hosts.write_text(
        f'listen = "127.0.0.1:{port}"\nwait_s = 60\n[[host]]\nname = "other"\nlayers = 2\n'
    )
    with WorkerProcess(str(folder), port, "other"):
        assert texts(folder, SamplingConfig(), draft="mtp", hosts=hosts, **alike) == alone
    assert any(len(step) == 5 for text in alone for step in text)


@pytest.mark.parametrize("by", ["tokens", "hidden rows"])
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "glm4_moe"])
def test_what_the_layer_knows_is_accepted_whole(tmp_path: Path, model_type: str, by: str) -> None:
    """From the right rows it is right as often as it adds to its own drafts."""
    folder = _saved(tmp_path / "target", model_type, by)
    plain = texts(folder, SamplingConfig(), method="autoregressive")
    tree = TreeRequest(budget=4, depth=4, policy="fixed", past=False)
    drafted = texts(folder, SamplingConfig(), draft="mtp", tree=tree)
    assert joined(drafted) == joined(plain)
    for text in drafted:
        assert [len(step) for step in text] == _whole(sum(map(len, text)))


def test_repetitions_join_the_trees_of_a_layer_that_knows_nothing(tmp_path: Path) -> None:
    """The text's own past is in the same tree, and is accepted where the layer is wrong."""
    save_mtp_toy("glm4_moe", tmp_path / "target", std=0.4, hidden_size=64)
    follows = recite(tmp_path / "target", "nothing")
    save_byte_tokenizer(tmp_path / "target")
    text = [max(range(64), key=lambda first: len(_round(follows, first)))]
    while len(text) < 24:
        text.append(follows[text[-1]])
    steps = []
    for past in (True, False):
        tree = TreeRequest(budget=8, depth=4, policy="fixed", past=past)
        asked = Request(
            model=str(tmp_path / "target"), device="cpu", context_tokens=64, draft="mtp", tree=tree
        )
        with open_session(asked) as session:
            made = session.generate([*text, *text[:3]], generation=GenerationConfig(max_tokens=16))
            steps.append([list(step.tokens) for step in made])
    with_past, alone = steps
    assert joined(steps)[0] == joined(steps)[1] == text[3:19]
    assert 2 * len(with_past) < len(alone)


def _round(follows: list[int], first: int) -> list[int]:
    """The tokens from one on, up to where it comes again."""
    found = [first]
    while (token := follows[found[-1]]) != first:
        found.append(token)
    return found


@pytest.mark.parametrize(
    ("model_type", "dtype"), [("qwen3_5_text", "float32"), ("mimo_v2_flash", "bfloat16")]
)
def test_several_texts_share_passes_and_each_has_rows_of_its_own(
    tmp_path: Path, model_type: str, dtype: DtypeName
) -> None:
    """Also where a text begins as another one does, whose rows are copied."""
    folder = _reciting(tmp_path / "target", model_type)
    prompts = [[*range(3, 47), last] for last in (47, 48, 49)]
    asked = {"prompts": prompts, "dtype": dtype}
    alone = texts(folder, SamplingConfig(), method="autoregressive", **asked)
    tree = TreeRequest(budget=12, depth=4, policy="fixed", past=False)
    found = together(folder, SamplingConfig(), draft="mtp", tree=tree, **asked)
    assert joined(found) == joined(alone)
    for text in found:
        assert [len(step) for step in text] == _whole(sum(map(len, text)))


def test_hidden_rows_are_kept_on_disk_with_the_others(tmp_path: Path) -> None:
    """A later session drafts from them at once; one without such a layer has rows of its own."""
    folder = _saved(tmp_path / "target", "glm4_moe", "hidden rows")
    tree = TreeRequest(budget=4, depth=4, policy="fixed", past=False)
    asked = Request(
        model=str(folder), device="cpu", context_tokens=256, draft="mtp", tree=tree, remember=True,
        dtype="float32",
    )  # fmt: skip
    prompt, ending, found = [*range(3, 50)] * 3, GenerationConfig(max_tokens=11), []
    for each in (asked, asked, replace(asked, draft="suffix"), asked):
        with open_session(each) as session:
            steps = [list(step.tokens) for step in session.generate(prompt, generation=ending)]
            found.append((joined([steps])[0], len(steps), session.stats.prompt_rows))
    assert [rows for *_, rows in found] == [141, 13, 141, 13]
    assert len({tuple(tokens) for tokens, *_ in found}) == 1
    # with the rows that the prompt's last pass needs at hand, the first tree may be drafted, too
    assert found[0][1] == 3


def test_the_choice_of_a_draft_weighs_the_layer(tmp_path: Path) -> None:
    folder, told = _saved(tmp_path / "target", "qwen3_5_text"), []
    request = Request(model=str(folder), draft="auto")
    site = described_site(ram_bytes=int(1e9), vram_bytes=0, ssd_bytes_per_s=2e9)
    assert "mtp" in [one.draft for one in weighed(request, site)]
    with_best_draft(request, site, told.append)
    assert "mtp" in told[0]
    with pytest.raises(ConfigError, match="`draft='mtp'` is not for `method='dsi'`"):
        choose_pair(registry_of(request), replace(request, draft="mtp", method="dsi"))


def test_a_plan_has_the_targets_tables_once_and_rows_of_few_nodes(tmp_path: Path) -> None:
    """So a card of 6 GB runs a 27B in 4 bits, whose tables and recurrent states fill most of it."""
    card = described_site(ram_bytes=int(32e9), vram_bytes=int(6e9), ssd_bytes_per_s=2e9)
    decision = resolve(Request(model="qwen3.8-27b-gptq", draft="mtp"), card)
    assert decision.draft is not None
    parts = dict(fixed_parts(decision.target.sizes, decision.draft.sizes, decision.work))
    assert parts["draft model"] == sum(decision.draft.sizes.layers)
    slots, hidden = decision.work.slots, decision.draft.sizes.hidden
    assert (
        parts["hidden rows"] == 2 * slots * hidden * 2
    )  # the target's and the layer's, in 16 bits
    assert all(
        row.stored_bytes == 0
        for row in decision.placement
        if row.model == "draft" and row.part != "layer"
    )
    with pytest.raises(ConfigError, match="the target has no layer that predicts further tokens"):
        resolve(Request(model="qwen3-32b", draft="mtp"), card)
    folder = _saved(tmp_path / "target", "qwen3_5_text")
    layer = resolve(Request(model=str(folder), draft="mtp"), card).draft
    assert layer is not None
    stored = mtp_checkpoint(read_checkpoint(folder))
    tables = ("embed_tokens.", "lm_head.", "model.norm.")
    own = sum(each.n_bytes for name, each in stored.items() if not any(t in name for t in tables))
    assert layer.sizes.layers == (own,)


def test_a_plan_has_the_rows_of_three_layers_and_expects_more_of_them(tmp_path: Path) -> None:
    save_three_layers("mimo_v2_flash", tmp_path)
    site = described_site(ram_bytes=int(1e9), vram_bytes=0, ssd_bytes_per_s=2e9)
    decision = resolve(Request(model=str(tmp_path), draft="mtp"), site)
    assert decision.draft is not None
    work, hidden = decision.work, decision.target.sizes.hidden
    parts = dict(fixed_parts(decision.target.sizes, decision.draft.sizes, work))
    rows = (1 + 3) * work.slots + 2 * work.pass_rows  # kept by the target and each layer; in a pass
    assert parts["hidden rows"] == rows * hidden * work.item_bytes
    assert tokens_per_pass(decision, None) == MTP_LAYERS_TOKENS_PER_PASS
