"""SentencePiece-only checkpoints, as Llama-2 and Mistral ship them, load and generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from checkpoints import byte_llama, save_checkpoint, save_sentencepiece_tokenizer

from specexec_cli.config import GenerationConfig, TreeConfig
from specexec_cli.models.tokenizer import load_tokenizer
from specexec_cli.session import Session


def _added(content: str) -> dict[str, Any]:
    return {
        "__type": "AddedToken", "content": content, "lstrip": False, "normalized": True,
        "rstrip": False, "single_word": False,
    }  # fmt: skip


# the tokenizer_config.json of meta-llama/Llama-2-7b-hf and of mistralai/Mistral-7B-v0.1
LLAMA2 = {
    "add_bos_token": True, "add_eos_token": False, "bos_token": _added("<s>"),
    "clean_up_tokenization_spaces": False, "eos_token": _added("</s>"), "legacy": False,
    "model_max_length": 10**30, "pad_token": None, "padding_side": "right",
    "sp_model_kwargs": {}, "tokenizer_class": "LlamaTokenizer", "unk_token": _added("<unk>"),
}  # fmt: skip
MISTRAL = {
    "add_bos_token": True, "add_eos_token": False, "additional_special_tokens": [],
    "bos_token": "<s>", "clean_up_tokenization_spaces": False, "eos_token": "</s>",
    "legacy": True, "model_max_length": 10**30, "pad_token": None, "sp_model_kwargs": {},
    "spaces_between_special_tokens": False, "tokenizer_class": "LlamaTokenizer",
    "unk_token": "<unk>", "use_default_system_prompt": False,
}  # fmt: skip


@pytest.mark.parametrize("config", [LLAMA2, MISTRAL, None], ids=["llama2", "mistral", "alone"])
def test_text_becomes_the_tokens_that_sentencepiece_gives(
    config: dict[str, Any] | None, tmp_path: Path
) -> None:
    save_sentencepiece_tokenizer(tmp_path, config)
    words = load_tokenizer(tmp_path)
    plain = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in ("def f(x):\n    return x", "hello  world", "naïve 你好 🙂", "x\n\n\ty ", "12 345"):
        tokens = words.encode(text)
        assert tokens == [1, *plain.encode(text)], "<s>, a leading space, and bytes for the rest"
        assert words.decode(tokens, skip_special_tokens=True) == text
    assert (words.bos_token_id, words.eos_token_id) == (1, 2)


@pytest.mark.parametrize("config", [LLAMA2, None], ids=["llama2", "alone"])
def test_such_a_pair_generates(config: dict[str, Any] | None, tmp_path: Path) -> None:
    settings = byte_llama(vocab_size=600)
    own = save_checkpoint(tmp_path / "target", settings, std=0.1)
    save_checkpoint(tmp_path / "draft", settings, noise_of=own, noise=0.01)
    for name in ("target", "draft"):
        save_sentencepiece_tokenizer(tmp_path / name, config)
    prompt = "def f(x):"
    with Session.open(
        model=str(tmp_path / "target"), draft=str(tmp_path / "draft"), dtype="float32"
    ) as session:
        steps = list(
            session.generate(
                prompt,
                tree=TreeConfig(budget=16, max_depth=6, batch=4),
                generation=GenerationConfig(max_tokens=24),
            )
        )
        tokens = [token for step in steps for token in step.tokens]
        words = session.tokenizer
        start = words.encode(prompt)
    expected = own.generate(
        torch.tensor([start]), max_new_tokens=24, do_sample=False, eos_token_id=2, pad_token_id=0
    )[0].tolist()
    assert [*start, *tokens] == expected
    text = "".join(step.text for step in steps)
    whole = words.decode([*start, *tokens], skip_special_tokens=True)
    assert prompt + text == whole, "spaces in front of words survive the streaming"
