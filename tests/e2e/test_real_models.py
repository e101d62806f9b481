"""Two models that people trained, as GGUF and as safetensors: transformers' own tokens and texts.

`scripts/test -m real` runs these tests; scripts/real_models.py, which brings the models, is their
source. Where neither the models are here nor the package index answers, they are skipped.
"""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from cli_runner import run_cli
from conftest import SHARED
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.errors import NotFetchedError
from specexec_cli.models.tokenizer import load_tokenizer
from specexec_cli.planning.request import Request, TreeRequest
from specexec_cli.session import TextSession, open_session

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import make_rig
from real_models import MODELS, default_folder, gguf_path, safetensors_folder
from rig_tensors import read_config, shape_of

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.real,
    # transformers' own, where it reads a GGUF file
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]
FORMS = [
    pytest.param(model, form, id=f"{model}-{form}")
    for model in MODELS
    for form in ("gguf", "safetensors")
]
PROMPT = "Write a short story about a lighthouse keeper who finds a letter in the sand."
TOKENS = 200


def brought(model: str, form: str) -> Path:
    """The model in that form; skips the test where it cannot be downloaded."""
    try:
        bring = gguf_path if form == "gguf" else safetensors_folder
        return bring(model, default_folder())
    except NotFetchedError as error:
        pytest.skip(f"the package index does not answer: {error}")


@lru_cache
def tokenizer(model: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(brought(model, "safetensors"))


@torch.no_grad()
def choices(model: str, tokens: list[int]) -> list[int]:
    """The most likely token behind each of these, by transformers' own forward in float32."""
    own = AutoModelForCausalLM.from_pretrained(brought(model, "safetensors"), dtype=torch.float32)
    found: list[int] = own(torch.tensor([tokens])).logits[0].argmax(-1).tolist()
    return found


def lines(count: int) -> list[str]:
    """Lines of real prompts where the shared folder has them, and of this repository else."""
    found: list[str] = []
    prompts = SHARED / "data" / "prompts"
    for name in ("oasst", "wikitext", "c4"):
        if (path := prompts / f"{name}_prompts.json").is_file():
            texts = [text for _, text in json.loads(path.read_text("utf-8"))]
            found += [line for text in texts for line in text.splitlines() if line.strip()][:count]
    for path in sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("specexec_cli/*/*.py")]):
        found += [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    return found[:: max(1, len(found) // count)][:count]


def opened(path: Path, **options: object) -> TextSession:
    session = open_session(Request(model=str(path), **options))
    session.eos_ids = ()
    return session


def text(session: TextSession, prompt: list[int], count: int, temperature: float) -> list[int]:
    steps = session.generate(
        prompt, sampling=SamplingConfig(temperature=temperature, seed=5),
        generation=GenerationConfig(max_tokens=count),
    )  # fmt: skip
    return [token for step in steps for token in step.tokens]


@pytest.mark.parametrize(("model", "form"), FORMS)
def test_the_tokens_of_a_thousand_lines_are_transformers_own(model: str, form: str) -> None:
    found, theirs = load_tokenizer(brought(model, form)), tokenizer(model)
    tried = lines(1000)
    assert len(tried) == 1000
    differing = [line for line in tried if found.encode(line) != theirs.encode(line)]
    assert not differing


@pytest.mark.parametrize(("model", "form"), FORMS)
def test_the_greedy_text_is_transformers_own(model: str, form: str) -> None:
    """200 tokens by a session that is given nothing but the model.

    Where each is transformers' choice behind the ones before it, so is the whole text.
    """
    with opened(brought(model, form), draft="auto") as session:
        prompt = session.encode(PROMPT)
        written = text(session, prompt, TOKENS, 0.0)
    assert prompt == tokenizer(model).encode(PROMPT)
    assert len(written) == TOKENS
    assert choices(model, prompt + written)[len(prompt) - 1 : -1] == written


@pytest.mark.parametrize(("model", "form"), FORMS)
def test_a_question_is_answered_with_transformers_own_tokens(model: str, form: str) -> None:
    """`generate` and nothing but the model: its template where it has one, its makers' sampling."""
    theirs, question = tokenizer(model), "What is the capital of France?"
    own = AutoModelForCausalLM.from_pretrained(brought(model, "safetensors"), dtype=torch.float32)
    if theirs.chat_template:
        prompt = theirs.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True,
            return_tensors="pt",
        )["input_ids"]  # fmt: skip
    else:
        prompt = torch.tensor([theirs.encode(question)])
    wanted = own.generate(prompt, max_new_tokens=24)[0, prompt.shape[1] :].tolist()
    ran = run_cli("generate", question, "-m", brought(model, form), "--json", "--max-tokens", 24)
    found = json.loads(ran.out)
    assert found["tokens"] == wanted
    assert found["config"]["raw"] == (theirs.chat_template is None)
    assert "Paris" in found["text"] or not theirs.chat_template


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("draft", ["self", "self-3", "suffix"])
def test_drafts_on_trees_write_the_plain_text(draft: str, dtype: str) -> None:
    path, count = brought("smollm2", "safetensors"), 48
    prompt = tokenizer("smollm2").encode(PROMPT)
    tree = TreeRequest(budget=32, depth=16, policy="fixed")
    with (
        opened(path, draft=draft, dtype=dtype, tree=tree) as drafted,
        opened(path, method="autoregressive", dtype=dtype) as plain,
    ):
        if draft == "suffix":  # a question that is asked twice has a past that drafts its answer
            prompt += text(plain, prompt, count, 0.0) + prompt
        for temperature in (0.0, 0.7):
            found = text(drafted, prompt, count, temperature)
            assert drafted.stats.generation_rate > (1.0 if draft == "suffix" else 2.0)
            assert found == text(plain, prompt, count, temperature)


@pytest.mark.parametrize("bits", [16, 4])
def test_a_rig_four_times_as_wide_writes_the_small_models_text(tmp_path: Path, bits: int) -> None:
    """In float32; that of 4 bits writes what its quantized source writes."""
    source = brought("smollm2", "safetensors")
    shape = shape_of(read_config(source))
    rig = make_rig.write_rig(source, shape.widened(4), tmp_path / "wide", bits=bits)
    same = make_rig.write_rig(source, shape.widened(1), tmp_path / "small", bits=bits)
    prompt = tokenizer("smollm2").encode(PROMPT)
    written = []
    for folder in (same, rig):
        with opened(folder, method="autoregressive", dtype="float32") as session:
            written.append(text(session, prompt, 48, 0.0))
    assert written[0] == written[1]
