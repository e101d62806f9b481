"""Which models a word and the options beside it mean, and what TAB offers."""

from __future__ import annotations

from pathlib import Path

import pytest
from computer import Computer

from specexec_cli.catalog.registry import load_registry, user_models_file
from specexec_cli.cli import complete
from specexec_cli.errors import ConfigError, UnknownModelError
from specexec_cli.planning.chosen_models import best_draft, choose_pair, entries_of
from specexec_cli.planning.request import Request


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, computer: Computer) -> Path:
    return tmp_path


def test_dsi_takes_the_best_draft_of_a_model_s_tokenizer(
    own_places: Path, computer: Computer
) -> None:
    registry = load_registry()
    assert registry.pair_for_target("qwen2.5-7b-instruct") is None
    found = choose_pair(registry, Request(model="qwen2.5-7b-instruct", method="dsi"))
    assert found.draft is not None
    assert found.draft.tokenizer == "qwen2.5"
    assert (found.draft.params or 0) * 8 <= 7_615_616_512
    # one that is here comes before one that is not
    snapshot = computer.hub / "models--Qwen--Qwen2.5-1.5B-Instruct" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").touch()
    assert best_draft(registry, "qwen2.5-7b-instruct").name == "qwen2.5-1.5b-instruct"


def test_dsi_needs_a_draft_for_a_model_of_which_nothing_is_known() -> None:
    with pytest.raises(UnknownModelError, match=r"is known for 'org/name', .* give `draft`"):
        best_draft(load_registry(), "org/name")


def test_a_model_without_a_pair_has_its_draft_weighed(own_places: Path) -> None:
    registry = load_registry()
    for model in ("qwen2.5-7b-instruct", "org/name", "./nowhere.gguf"):
        if model.startswith("."):
            model = str(own_places / model)
            Path(model).write_bytes(b"GGUF")
        found = choose_pair(registry, Request(model=model))
        assert (found.draft, found.weighs, found.name) == (None, True, model)
    given = choose_pair(registry, Request(model="org/name", draft="suffix"))
    assert not given.weighs


def test_a_pair_s_draft_is_taken_if_it_is_as_near_as_the_target(computer: Computer) -> None:
    def store(repo: str) -> None:
        folder = computer.hub / f"models--{repo.replace('/', '--')}" / "snapshots" / "main"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").touch()

    registry, target = load_registry(), "meta-llama/Llama-2-70b-chat-hf"
    pair = choose_pair(registry, Request(model="llama2-70b-chat"))
    assert choose_pair(registry, Request(model=target)) == pair, "neither is here"
    store(target)
    assert choose_pair(registry, Request(model=target)).weighs, "the target alone is here"
    assert choose_pair(registry, Request(model="llama2-70b-chat")) == pair, "the pair was named"
    weighed = choose_pair(registry, Request(model="llama2-70b-chat", draft="auto"))
    assert weighed.weighs, "it was asked for"
    store("meta-llama/Llama-2-7b-chat-hf")
    assert choose_pair(registry, Request(model=target)) == pair, "both are here"


def test_values_are_completed(own_places: Path) -> None:
    assert "demo" in complete.pair_names("de")
    assert complete.model_names("demo-d") == ["demo-draft"]
    assert {"demo", "demo-draft"} <= set(complete.names("demo"))
    assert complete.among("ssd", "ram")("s") == ["ssd"]
    (own_places / "weights").mkdir()
    (own_places / "file").touch()
    assert complete.model_names(f"{own_places}/w") == [f"{own_places}/weights/"]
    assert complete.model_names(f"{own_places}/") == [f"{own_places}/weights/"]
    assert complete.model_names("/nowhere/at/all") == []
    user_models_file().parent.mkdir(parents=True)
    user_models_file().write_text("[")
    assert complete.pair_names("demo") == complete.model_names("demo") == []


def test_another_revision_is_another_checkpoint(own_places: Path) -> None:
    """It may be quantized another way: nothing is planned with what is known of the usual one."""
    registry = load_registry()
    usual = choose_pair(registry, Request(model="qwen2.5-7b-instruct"))
    asked = Request(model="qwen2.5-7b-instruct", revision="gptq-4bit")
    found = choose_pair(registry, asked)
    assert found.target.at("gptq-4bit") == found.target
    assert (found.target.repo, found.target.revision) == (usual.target.repo, "gptq-4bit")
    assert usual.target.shape
    assert not found.target.shape
    assert found.target.size_bytes is None
    assert found.draft == usual.draft
    assert entries_of(asked) == [found.target]
    with pytest.raises(ConfigError, match="'demo-target' is a local folder"):
        choose_pair(registry, Request(model="demo", revision="v1"))
