"""A model's makers decide how it samples, field by field, where the user says nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from checkpoints import architecture, edit_json, save_pair
from cli_runner import run_cli

from specexec_cli.chat.settings import ChatSettings
from specexec_cli.config import SamplingChoice, SamplingConfig
from specexec_cli.errors import CheckpointError, ConfigError
from specexec_cli.gguf.container import read_gguf
from specexec_cli.models.makers_sampling import FILE, MakersSampling, makers_sampling
from specexec_cli.offload.checkpoint import Checkpoint
from specexec_cli.offload.gguf_checkpoint import GgufCheckpoint
from specexec_cli.sampling import Sampler

# what generation_config.json says -> what is drawn
FILES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"do_sample": True}, {"temperature": 1.0, "top_k": 50}),
    ({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05},
     {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05}),
    ({"do_sample": True, "temperature": 0.7, "top_p": None, "repetition_penalty": 1.05},
     {"temperature": 0.7, "top_k": 50, "repetition_penalty": 1.05}),
    ({"do_sample": True, "temperature": 1.5, "top_k": 0}, {"temperature": 1.5}),
    ({"do_sample": False, "repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    ({"temperature": 0.6, "top_p": 0.9}, {"top_p": 0.9}),
]  # fmt: skip


def of_folder(folder: Path, said: object) -> MakersSampling:
    (folder / FILE).write_text(json.dumps(said))
    return makers_sampling(Checkpoint(folder, {}))


def of_gguf(path: Path, **said: float) -> MakersSampling:
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in said.items():
        getattr(writer, f"add_sampling_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    unused: Any = None
    return makers_sampling(GgufCheckpoint(path, {}, read_gguf(path), {}, unused, {}))


def drawn(makers: MakersSampling, **choice: Any) -> SamplingConfig:
    return makers.with_choice(SamplingChoice(**choice))


@pytest.mark.parametrize(("said", "wanted"), FILES)
def test_a_folder_samples_as_its_makers_do(
    tmp_path: Path, said: dict[str, Any], wanted: dict[str, Any]
) -> None:
    assert drawn(of_folder(tmp_path, said)) == SamplingConfig(**wanted)


@pytest.mark.parametrize("said", [said for said, _ in FILES])
def test_the_filters_are_those_of_transformers_generate(
    tmp_path: Path, said: dict[str, Any]
) -> None:
    """transformers reads the same file, and fills in its own defaults."""
    found = drawn(of_folder(tmp_path, said))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(architecture("llama"))
    model.generation_config = transformers.GenerationConfig.from_pretrained(tmp_path)
    config, _ = model._prepare_generation_config(None)
    processors = model._get_logits_processor(
        generation_config=config, input_ids_seq_length=2, device="cpu",
        logits_processor=transformers.LogitsProcessorList(),
    )  # fmt: skip
    logits = torch.randn(1, 120, generator=torch.Generator().manual_seed(3)) * 4
    wanted = processors(torch.tensor([[1, 2]]), logits.clone())
    assert torch.equal(Sampler(found).filtered(logits, (1, 2)), wanted)
    assert bool(config.do_sample) == (found.temperature > 0)


def test_a_gguf_file_samples_by_llama_cpps_keys(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    assert drawn(of_gguf(path)) == SamplingConfig()
    assert drawn(of_gguf(path, penalty_repeat=1.5)) == SamplingConfig(repetition_penalty=1.5)
    all_of_them = of_gguf(path, temp=0.5, top_k=7, top_p=0.75, min_p=0.25, penalty_repeat=1.5)
    assert drawn(all_of_them) == SamplingConfig(
        temperature=0.5, top_k=7, top_p=0.75, min_p=0.25, repetition_penalty=1.5
    )
    gemma = of_gguf(path, top_k=64, top_p=0.5)  # as its generation_config.json, without do_sample
    assert drawn(gemma) == SamplingConfig(temperature=1.0, top_k=64, top_p=0.5)
    others = of_gguf(path, temp=0.5, xtc_probability=0.5, mirostat=0, penalty_last_n=64)
    assert others.not_applied == ("xtc_probability", "penalty_last_n")


def ollamas(folder: Path, parameters: str) -> Path:
    """A model of ollama's with a file of parameters; its weights name no sampling but top_k."""
    layers = [
        {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:ab"},
        {"mediaType": "application/vnd.ollama.image.params", "digest": "sha256:cd"},
    ]
    manifest = folder / "manifests/registry.ollama.ai/library/tiny/latest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": layers}))
    (folder / "blobs").mkdir()
    (folder / "blobs/sha256-cd").write_text(parameters)
    return folder / "blobs/sha256-ab"


def test_ollamas_parameters_come_before_the_files_own(tmp_path: Path) -> None:
    said = {"temperature": 0.25, "repeat_penalty": 1.5, "stop": ["<|im_end|>"], "num_ctx": 4096}
    makers = of_gguf(ollamas(tmp_path, json.dumps(said)), top_k=7, temp=1.0)
    assert drawn(makers) == SamplingConfig(temperature=0.25, top_k=7, repetition_penalty=1.5)
    assert makers.not_applied == ()


def test_ollamas_damaged_parameters_are_one_line(tmp_path: Path) -> None:
    blob = ollamas(tmp_path, "[]")
    with pytest.raises(CheckpointError, match="sha256-cd is not a JSON object: it is a list"):
        of_gguf(blob)


def test_a_users_setting_wins_field_by_field(tmp_path: Path) -> None:
    makers = of_folder(tmp_path, {"do_sample": True, "temperature": 0.6, "top_p": 0.5, "top_k": 9})
    assert drawn(makers, top_p=1.0, seed=4) == SamplingConfig(temperature=0.6, top_k=9, seed=4)
    assert drawn(makers, greedy=True) == SamplingConfig(top_p=0.5, top_k=9)
    assert drawn(makers, temperature=0.0) == SamplingConfig(top_p=0.5, top_k=9)
    with pytest.raises(ConfigError, match="`greedy` is temperature 0"):
        SamplingChoice(greedy=True, temperature=0.5)


@pytest.mark.parametrize("value", ["0.9", [], True, 7, -1, 1e999, float("nan"), 10**39])
@pytest.mark.parametrize("name", ["top_p", "min_p", "temperature"])
def test_a_wrong_value_is_one_line_that_an_option_mends(
    tmp_path: Path, name: str, value: object
) -> None:
    if (name, value) == ("temperature", 7):
        value = 107
    makers = of_folder(tmp_path, {"do_sample": True, name: value})
    with pytest.raises(CheckpointError, match=f"{FILE}: .*give `{name}` yourself") as told:
        drawn(makers)
    assert "\n" not in str(told.value)
    assert getattr(drawn(makers, **{name: 0.5}), name) == 0.5


@pytest.mark.parametrize(
    ("said", "wanted"),
    [({"temperature": 1e-6}, {"top_k": 50}), ({"temperature": 0}, {"top_k": 50}),
     ({"top_k": -1}, {"temperature": 1.0}), ({"top_k": 9.0}, {"temperature": 1.0, "top_k": 9})],
)  # fmt: skip
def test_other_spellings_of_no_filter(
    tmp_path: Path, said: dict[str, Any], wanted: dict[str, Any]
) -> None:
    makers = of_folder(tmp_path, {"do_sample": True, **said})
    assert drawn(makers) == SamplingConfig(**wanted)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose makers draw at 0.9, and ask for what is not here."""
    folder, _ = save_pair(tmp_path_factory.mktemp("pair"))
    (folder / FILE).write_text("{}")
    edit_json(folder / FILE, eos_token_id=2, do_sample=True, temperature=0.9, top_p=0.95,
              typical_p=0.5)  # fmt: skip
    return folder


def config_of(target: Path, *options: object) -> dict[str, Any]:
    ran = run_cli("generate", "abc", "-m", target, "--json", "--max-tokens", 12, *options)
    assert ran.code == 0, ran.err
    found: dict[str, Any] = json.loads(ran.out)
    return {**found["config"], "tokens": found["tokens"], "err": ran.err}


def test_generate_draws_as_the_makers_do_and_drafts_change_nothing(target: Path) -> None:
    drafted = config_of(target, "--draft", target.parent / "draft", "--seed", 3)
    plain = config_of(target, "--method", "autoregressive", "--seed", 3)
    asked = config_of(target, "--method", "autoregressive", "--seed", 3, "--temperature", 0.9,
                      "--top-p", 0.95, "--top-k", 50)  # fmt: skip
    greedy = config_of(target, "--method", "autoregressive", "--greedy", "-q")
    wanted = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.0}
    assert all(drafted[name] == value for name, value in wanted.items())
    assert drafted["tokens"] == plain["tokens"] == asked["tokens"] != greedy["tokens"]
    assert (greedy["temperature"], greedy["err"]) == (0.0, "")
    assert f"notice: {target / FILE}: not applied here: typical_p\n" in plain["err"]


def test_a_file_of_prompts_draws_likewise(target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "abc", "seed": 3}, {"prompt": "abc", "temperature": 0.5, "seed": 3}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = ("generate", "-m", target, "-f", prompts, "--jsonl", "--max-tokens", 12,
           "--method", "autoregressive")  # fmt: skip
    plain = config_of(target, "--method", "autoregressive", "--seed", 3)
    cooler = config_of(target, "--method", "autoregressive", "--seed", 3, "--temperature", 0.5)
    greedy = config_of(target, "--method", "autoregressive", "--greedy")
    ran = run_cli(*job)
    assert "not applied here: typical_p" in ran.err
    assert [json.loads(line)["tokens"] for line in ran.out.splitlines()] == [
        plain["tokens"], cooler["tokens"],
    ]  # fmt: skip
    ran = run_cli(*job, "--greedy", "-q")  # a line's own temperature replaces it
    assert [json.loads(line)["tokens"] for line in ran.out.splitlines()] == [
        greedy["tokens"], cooler["tokens"],
    ]  # fmt: skip


def test_chat_begins_with_the_makers_sampling(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[ChatSettings] = []
    monkeypatch.setattr(
        "specexec_cli.cli.chat.converse",
        lambda session, settings, **more: begun.append(settings) or 0,
    )
    run_cli("chat", target, "--method", "autoregressive", "--top-k", 5, "-q")
    run_cli("chat", target, "--method", "autoregressive", "--greedy", "-q")
    drawn = SamplingConfig(temperature=0.9, top_p=0.95, top_k=5)
    assert [each.sampling for each in begun] == [
        drawn, SamplingConfig(top_p=0.95, top_k=50),
    ]  # fmt: skip


def test_serve_answers_as_the_makers_sample(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(
        "specexec_cli.cli.serve._run",
        lambda models, *more: bool(begun.append(models.service.defaults)),
    )  # fmt: skip
    run_cli("serve", target, "--method", "autoregressive", "--port", 0, "--min-p", 0.5, "-q")
    assert [each.sampling for each in begun] == [
        SamplingConfig(temperature=0.9, top_p=0.95, top_k=50, min_p=0.5)
    ]


def test_bench_stays_greedy() -> None:
    """Its figures must stay comparable, whatever the makers suggest."""
    for command in (("bench",), ("measure",), ("train-policy",)):
        assert "greedy unless asked" in " ".join(run_cli(*command, "--help").out.split())
