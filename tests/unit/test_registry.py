"""models.toml: files merge entry by entry, and mistakes are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from computer import Computer

from specexec_cli.catalog import models_file
from specexec_cli.catalog.registry import Registry, load_registry, user_models_file
from specexec_cli.errors import ConfigError, UnknownModelError


@pytest.fixture(autouse=True)
def user_file(computer: Computer) -> Path:
    """The user's models.toml, absent unless a test writes it; never the real one."""
    user_models_file().parent.mkdir(parents=True)
    return user_models_file()


@pytest.fixture
def shipped() -> Registry:
    return load_registry()


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write_file(text: str) -> Path:
        path = tmp_path / "extra.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


# --- Merging ---


def test_a_file_overrides_whole_entries_and_leaves_the_rest(
    write: Callable[[str], Path], shipped: Registry
) -> None:
    path = write('[models.llama2-7b]\nrepo = "me/mine"\n[models.new]\nrepo = "me/new"\n')
    merged = load_registry(path)
    assert merged.models["llama2-7b"].repo == "me/mine"
    assert merged.models["llama2-7b"].params is None  # the shipped entry is gone as a whole
    assert merged.models["new"].repo == "me/new"
    assert merged.models["llama2-70b"] == shipped.models["llama2-70b"]


def test_models_file_wins_over_the_users_file_which_wins_over_the_shipped(
    write: Callable[[str], Path], user_file: Path
) -> None:
    user_file.write_text(
        '[models.demo-target]\nrepo = "user/target"\n[models.demo-draft]\nrepo = "user/draft"\n'
    )
    merged = load_registry(write('[models.demo-target]\nrepo = "file/target"\n'))
    assert merged.models["demo-target"].repo == "file/target"
    assert merged.models["demo-draft"].repo == "user/draft"


def test_a_users_pair_may_use_shipped_models_and_comes_first(
    write: Callable[[str], Path], shipped: Registry
) -> None:
    path = write('[pairs.mine]\ntarget = "llama2-70b-chat"\ndraft = "tinyllama-1.1b-chat"\n')
    merged = load_registry(path)
    assert merged.pair_for_target("llama2-70b-chat") == merged.pairs["mine"]
    own = shipped.pair_for_target("llama2-70b-chat")
    assert own is not None
    assert own.draft == "llama2-7b-chat"


def test_a_pair_may_draft_from_the_texts_own_past(write: Callable[[str], Path]) -> None:
    merged = load_registry(write("[pairs.p]\ntarget = 'qwen3-4b'\ndraft = 'suffix'\n"))
    assert merged.draft_of(merged.pairs["p"]) is None
    assert "suffix" not in merged.drafts_for("qwen3-4b")
    with pytest.raises(ConfigError, match="target 'suffix' is not a model"):
        load_registry(write("[pairs.p]\ntarget = 'suffix'\ndraft = 'qwen3-4b'\n"))


def test_relative_folders_are_relative_to_the_file(
    write: Callable[[str], Path], tmp_path: Path
) -> None:
    path = write(
        '[models.mine]\nrepo = "./weights"\n[pairs.p]\ntarget = "mine"\ndraft = "../draft"\n'
    )
    merged = load_registry(path)
    assert merged.models["mine"].folder == tmp_path.resolve() / "weights"
    assert merged.pairs["p"].draft == str(tmp_path.resolve().parent / "draft")


# --- Mistakes in a file: file, entry, key, what was expected ---


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[models.a]\nrepo = \n", ["extra.toml", "not valid TOML", "line 2"]),
        ("a = " + "[" * 3000, ["extra.toml", "not valid TOML", "nested"]),
        ("a = " + "1" * 3900, ["extra.toml", "not valid TOML", "40 digits"]),
        (f"[models.a]\n{'x' * 3900} = 1", ["extra.toml: [models.a]", "unknown key", "Known keys"]),
        ("[model.a]\n", ["unknown key 'model'", "Did you mean 'models'?"]),
        ("models = 3\n", ["'models' must hold entries", "[models.NAME]"]),
        ("[models]\na = 3\n", ["[models.a]", "must be a table", "3"]),
        ("[models.a]\ndtype = 'float16'\n", ["extra.toml: [models.a]", "lacks the key 'repo'"]),
        ("[models.a]\nrepo = ''\n", ["[models.a] repo", "text that is not empty"]),
        ("[models.a]\nrepo = 7\n", ["[models.a] repo", "text in quotes", "7"]),
        (
            "[models.a]\nrepo = 'b/c'\ncontxt = 1\n",
            ["[models.a]", "'contxt'", "Did you mean 'context'?"],
        ),
        ("[models.a]\nrepo = 'b/c'\nzzzzz = 1\n", ["'zzzzz'", "Known keys: repo, revision"]),
        (
            "[models.a]\nrepo = 'b/c'\ncontext = 'big'\n",
            ["context", "a whole number from 1 up", "'big'"],
        ),
        ("[models.a]\nrepo = 'b/c'\ncontext = true\n", ["context", "whole number", "True"]),
        ("[models.a]\nrepo = 'b/c'\nparams = 0\n", ["params", "whole number from 1 up"]),
        ("[models.a]\nrepo = 'b/c'\nchat = 1\n", ["chat", "true or false"]),
        ("[models.a]\nrepo = 'b/c'\ndtype = 'fp16'\n", ["dtype", "float32, bfloat16, float16"]),
        ("[models.a]\nrepo = 'b/c'\nbits = 5\n", ["bits", "one of 2, 3, 4, 8"]),
        (
            "[models.a]\nrepo = 'b/c'\nquantization = 'gptq'\n",
            ["needs quantization, bits and group_size together"],
        ),
        (
            "[models.a]\nrepo = 'b/c'\nbits = 4\ngroup_size = 128\n",
            ["needs quantization, bits and group_size together"],
        ),
        ("[models.a]\nrepo = 'b/c'\ngroup_size = 0\n", ["group_size", "from -1 up, not 0"]),
        ("[models.a]\nrepo = 'b/c'\nshape = 3\n", ["shape must be a table"]),
        (
            "[models.a]\nrepo = 'b/c'\nshape = { hiden_size = 3 }\n",
            ["[models.a] shape:", "Did you mean 'hidden_size'?"],
        ),
        (
            "[models.a]\nrepo = 'b/c'\nshape = { hidden_size = -3 }\n",
            ["shape: hidden_size must be a whole number above 0"],
        ),
        ("[pairs.p]\ntarget = 'demo-target'\n", ["[pairs.p]", "lacks the key 'draft'"]),
        (
            "[pairs.p]\ntarget = 'demo-targt'\ndraft = 'demo-draft'\n",
            ["[pairs.p] target 'demo-targt'", "Did you mean 'demo-target'?"],
        ),
        (
            "[pairs.p]\ntarget = 'demo-target'\ndraft = 'demo-draft'\nbudget = 4\ndepth = 8\n",
            ["[pairs.p]", "depth", "cannot exceed", "budget"],
        ),
        (
            "[pairs.p]\ntarget = 'demo-target'\ndraft = 'demo-draft'\nbatch = 1.5\n",
            ["[pairs.p] batch", "whole number", "1.5"],
        ),
        ("[heads.h]\ntarget = 'demo-target'\n", ["[heads.h]", "lacks the key 'repo'"]),
        (
            "[heads.h]\ntarget = 'demo-targt'\nrepo = 'b/c'\n",
            ["[heads.h] target 'demo-targt'", "Did you mean 'demo-target'?"],
        ),
        (
            "[heads.h]\ntarget = 'demo-target'\nrepo = 'b/c'\nparams = '1B'\n",
            ["[heads.h] params", "a whole number from 1 up"],
        ),
        *(
            (
                f"[pairs.p]\ntarget = 'demo-target'\ndraft = 'demo-draft'\ntasks = {wrong}\n",
                ["[pairs.p] tasks", "a list of chat, code, text"],
            )
            for wrong in ("'chat'", "['prose']", "[['chat']]")
        ),
    ],
)
def test_mistakes_are_named(write: Callable[[str], Path], text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_registry(write(text))
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*gone\.toml: No such file"):
        load_registry(tmp_path / "gone.toml")
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        load_registry(tmp_path)
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"# caf\xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.toml is not UTF-8 text \(byte 5\)"):
        load_registry(latin)


# --- References ---


def test_names_that_are_not_there(shipped: Registry) -> None:
    with pytest.raises(UnknownModelError, match=r"'llama2-7b-caht'.*Did you mean 'llama2-7b-chat'"):
        shipped.resolve("llama2-7b-caht")
    with pytest.raises(UnknownModelError, match=r"Did you mean 'llama3\.3-70b-instruct'"):
        shipped.resolve("llama3.3:70b")
    with pytest.raises(UnknownModelError, match=r"no model 'dmeo'.*Did you mean 'demo'"):
        shipped.resolve("dmeo")
    with pytest.raises(UnknownModelError, match="`specexec models list` shows what is known"):
        shipped.resolve("zzzzzzzz")


def test_a_pair_s_name_stands_for_its_target(shipped: Registry) -> None:
    assert shipped.resolve("demo") == shipped.models["demo-target"]
    assert shipped.pair_for_target("demo-gptq") == shipped.pairs["demo-gptq"]
    assert shipped.drafts_for("demo") == ["demo-draft"]


def test_a_folder_is_a_reference_if_it_holds_a_checkpoint(
    shipped: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "some" / "model"
    folder.mkdir(parents=True)
    with pytest.raises(UnknownModelError, match=r"has no config\.json"):
        shipped.resolve(str(folder))
    (folder / "config.json").write_text("{}")
    assert shipped.resolve(str(folder)).folder == folder.resolve()
    monkeypatch.chdir(tmp_path)
    assert shipped.resolve("some/model").folder == folder.resolve()  # before any hub id
    assert shipped.resolve("./some/model").folder == folder.resolve()
    with pytest.raises(UnknownModelError, match=r"no file or folder '\./gone'"):
        shipped.resolve("./gone")
    for gone in ("gone.gguf", "some/gone.gguf"):
        with pytest.raises(UnknownModelError, match=f"no file or folder '{gone}': check the path"):
            shipped.resolve(gone)
    assert shipped.resolve("org/gone.gguf").repo == "org/gone.gguf"  # on the hub
    assert shipped.resolve("some/hub:gone.gguf").repo == "some/hub"


def test_hub_ids(shipped: Registry) -> None:
    unknown = shipped.resolve("some/thing@refs/pr/3")
    assert (unknown.repo, unknown.revision, unknown.folder) == ("some/thing", "refs/pr/3", None)
    assert unknown.params is None
    # the repository of an entry brings the entry's facts
    assert shipped.resolve("Qwen/Qwen3-32B") == shipped.models["qwen3-32b"]
    # but another branch may hold something else
    branch = shipped.resolve("TheBloke/Llama-2-70B-Chat-GPTQ@gptq-3bit--1g-actorder_True")
    assert branch.revision == "gptq-3bit--1g-actorder_True"
    assert branch.bits is None
    assert branch.tokenizer == "llama-2"


def test_pair_for_target_knows_the_model_by_any_of_its_names(
    shipped: Registry, tmp_path: Path, write: Callable[[str], Path]
) -> None:
    pair = shipped.pairs["llama3-70b-instruct"]
    assert shipped.pair_for_target("llama3-70b-instruct") == pair
    assert shipped.pair_for_target("meta-llama/Meta-Llama-3-70B-Instruct") == pair
    assert shipped.pair_for_target("meta-llama/Meta-Llama-3-70B-Instruct@abc") is None
    assert shipped.pair_for_target("lmsys/vicuna-7b-v1.3") == shipped.pairs["vicuna-7b"]
    assert shipped.pair_for_target("qwen3-0.6b") is None
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    merged = load_registry(
        write(
            '[pairs.gone]\ntarget = "/no/such/folder"\ndraft = "qwen3-4b"\n'
            '[pairs.mine]\ntarget = "./mine"\ndraft = "qwen3-4b"\n'
        )
    )
    assert merged.pair_for_target(str(folder)) == merged.pairs["mine"]


def test_a_file_of_a_repository_has_pairs_of_its_own(
    shipped: Registry, write: Callable[[str], Path]
) -> None:
    pair = shipped.pairs["llama3-70b-instruct"]
    target, draft = shipped.resolve(pair.target), shipped.resolve(pair.draft)
    assert shipped.pair_of(target, draft) == pair
    assert shipped.pair_of(replace(target, file="a-Q2_K.gguf"), draft) is None
    merged = load_registry(
        write(
            '[models.small]\nrepo = "o/m"\nfile = "m-Q2_K.gguf"\n'
            '[pairs.small]\ntarget = "small"\ndraft = "o/d@v1:d.gguf"\n'
            '[pairs.large]\ntarget = "o/m:m-Q8_0.gguf"\ndraft = "o/d@v1:d.gguf"\n'
        )
    )
    draft = merged.resolve("o/d@v1:d.gguf")
    for reference, name in (
        ("small", "small"), ("o/m", "small"), ("o/m:m-Q2_K.gguf", "small"),
        ("o/m:m-Q8_0.gguf", "large"),
    ):  # fmt: skip
        assert merged.pair_for_target(reference) == merged.pairs[name]
        assert merged.pair_of(merged.resolve(reference), draft) == merged.pairs[name]
    assert merged.pair_for_target("o/m:m-Q4_0.gguf") is None
    assert merged.pair_of(merged.resolve("o/m:m-Q4_0.gguf"), draft) is None


def test_a_head_is_known_by_its_name_and_by_its_target(
    shipped: Registry, write: Callable[[str], Path]
) -> None:
    head = shipped.resolve("gemma4-31b-it-assistant")
    assert head.repo == "google/gemma-4-31B-it-assistant"
    for target in ("gemma4-31b-it", "google/gemma-4-31B-it"):
        assert [one.name for one in shipped.heads_for(target)] == [head.name]
    assert shipped.heads_for("demo-target") == []
    own = load_registry(write("[heads.mine]\ntarget = 'gemma4-31b-it'\nrepo = './head'\n"))
    assert [one.name for one in own.heads_for("gemma4-31b-it")] == [head.name, "mine"]
    assert own.resolve("mine").folder is not None


def test_drafts_for_lists_smaller_models_of_the_same_tokenizer(shipped: Registry) -> None:
    assert shipped.drafts_for("qwen3-32b") == [
        "qwen3-0.6b",
        "qwen3-0.6b-gptq",
        "qwen3-1.7b",
        "qwen3-4b",
        "qwen3-8b",
        "qwen3-8b-awq",
        "qwen3-14b",
        "qwen3-14b-awq",
        "qwen3-30b-a3b",
        "qwen3-30b-a3b-gptq",
        "qwen3-coder-30b-a3b-instruct",
    ]
    assert shipped.drafts_for("llama3-70b-instruct") == ["llama3-8b-instruct"]  # not those of 3.1
    assert shipped.drafts_for("qwen3-0.6b") == []
    assert shipped.drafts_for("some/thing") == []


def large_file(folder: Path, budget: int) -> Path:
    """A file of pairs that is large enough to be kept as JSON."""
    path = folder / "models.toml"
    pair = f'[pairs.p{{}}]\ntarget = "demo-target"\ndraft = "suffix"\nbudget = {budget}\n'
    path.write_text("".join(pair.format(number) for number in range(1000)))
    return path


@pytest.mark.parametrize("harm", [None, "", "[]", "{"])
def test_a_large_file_is_read_as_it_is_now(
    harm: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is kept of it, and whatever happens to that."""
    monkeypatch.setattr(models_file, "user_cache_path", lambda *_, **__: tmp_path / "cache")
    path = large_file(tmp_path, 100)
    assert load_registry(path).pairs["p7"].budget == 100
    (kept,) = (tmp_path / "cache" / "models").iterdir()
    models_file._parsed.cache_clear()
    if harm is not None:
        kept.write_text(harm)
    assert load_registry(path).pairs["p7"].budget == 100
    large_file(tmp_path, 200)
    assert load_registry(path).pairs["p7"].budget == 200
    (other,) = (tmp_path / "cache" / "models").iterdir()
    assert other != kept, "what it said before is not kept"
