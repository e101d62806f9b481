"""Writes llama.cpp's tokens of hard texts under each of its pre-tokenizers, for the tests.

Run `pip install xllamacpp` first, which is llama.cpp as a wheel. The vocabulary is learned from the
texts themselves without any split, so that merges cross every border that a pre-tokenizer may set.
It is written with a random model of one layer, once under each pre-tokenizer's name.
"""

from __future__ import annotations

import json
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from specexec_cli.gguf.pre_tokenizers import PATTERNS

GOLDENS = Path(__file__).parent.parent / "tests" / "goldens" / "pre_tokenizers.json"
UNREACHED = ("Hello", "Ġworld", "Ġtest", "pass", "ing")  # tokens, though no merges make them
HIDDEN, VOCABULARY, LONGEST = 32, 1500, 16
TEXTS = (
    "Hello world, it's 12345 o'clock; we'll see 'S and 'LL.",
    "def f(x):\n    return x**2  # 10% of 1,000,000\n\n\n\t\tpass\r\n",
    "   three spaces, then    four\t\ttabs \n \n  end  ",
    "HTTPServer camelCase snake_case iPhone XMLHttpRequest ÀÉÎõü Straße ǅungla",
    "3.14159 2e-10 0xFF 1 12 123 1234 12345 123456 1234567 ٣٤٥٦ ½ ² Ⅷ",
    "你好，世界！这是一个测试。123年。中文English混排",
    "こんにちは世界。カタカナとひらがな、漢字１２３。ｶﾀｶﾅ",
    "안녕하세요 세계! 한국어 텍스트 12개 ㄱㄴㄷ",
    "Привет, мир! Это тест номер 42. ЁЖИК",
    "مرحبا بالعالم، هذا اختبار ١٢٣. کیا حال ہے؟۔",
    "नमस्ते दुनिया। यह एक परीक्षा है १२३",
    "สวัสดีชาวโลก ทดสอบ ๑๒๓ ພາສາລາວ ភាសាខ្មែរ မြန်မာ",
    "🙂🙃👍🏽 👨‍👩‍👧 🇩🇪 ok🚀go",
    "e\u0301 a\u0308 o\u0302\u0323 combining n\u0303o",
    "a\u00a0b\u2003c\u200bd\u3000e\u0085f\u2028g",
    "!!! ??? ... --- ,,, '''quoted''' \"double\" `code` <tag> {a: [b]} a/b\\c $x^2$ ~|~",
    "http://example.org/path?q=1&r=two#frag user@mail.example",
    "it's It's IT'S don't DON'T they've we'd I'm you're ’tis it’s türkiye'nin",
    "\n\n\nleading newlines\n\n  \n\ttrailing   ",
    "x\r\ny\rz\n\r\n  \r\n",
    "“Quotes” ‘single’ — dash … ellipsis ！？：；",
    "ΑΒΓ αβγ ℤℝℂ 𝐀𝐁𝐂 ﬁ ﬂ Ａｂｃ",
    "0 00 000 0000 00000 000000 0000000 a1b22c333d4444",
    "ㄅㄆㄇ ㄚㄛ 𠀀𠀁 豈 ⼀",
    " a  b   c    d     e      f       g        h",
    "if (a<=b && c!=d || e==f) { return ~x; } // done;;",
)


def learned() -> tuple[list[str], list[str]]:
    """The tokens and merges that are learned from the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, show_progress=False, max_token_length=LONGEST, min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(sorted(TEXTS), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [*model["vocab"], *(word for word in UNREACHED if word not in model["vocab"])]
    return [*tokens, "<s>"], [" ".join(pair) for pair in model["merges"]]


def pieces() -> dict[str, Any]:
    """A SentencePiece vocabulary of the texts: metadata of a file as of Llama 2."""
    import sentencepiece

    with tempfile.TemporaryDirectory() as folder:
        text, prefix = Path(folder, "text"), Path(folder, "pieces")
        text.write_text("\n".join(line for each in TEXTS for line in each.splitlines()), "utf-8")
        sentencepiece.SentencePieceTrainer.train(
            input=str(text), model_prefix=str(prefix), model_type="bpe", vocab_size=1000,
            byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
            character_coverage=0.98, hard_vocab_limit=False, num_threads=1, minloglevel=2,
        )  # fmt: skip
        found = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    ids = range(found.get_piece_size())
    kinds = [_KINDS.get(n) or (gguf.TokenType.BYTE if found.is_byte(n) else 1) for n in ids]
    return {
        "ggml.model": "llama", "ggml.tokens": [found.id_to_piece(n) for n in ids],
        "ggml.scores": [found.get_score(n) for n in ids], "ggml.token_type": list(map(int, kinds)),
    }  # fmt: skip


_KINDS = {0: gguf.TokenType.UNKNOWN, 1: gguf.TokenType.CONTROL, 2: gguf.TokenType.CONTROL}


def merged() -> dict[str, Any]:
    """The same as merges: metadata of a file as of Gemma 4."""
    special, kinds = ["<unk>", "<s>", "</s>"], list(_KINDS.values())
    bytes_of = [f"<0x{n:02X}>" for n in range(256)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=1000, show_progress=False, max_token_length=LONGEST, limit_alphabet=250
    )
    tokenizer.train_from_iterator([text.replace(" ", "\u2581") for text in TEXTS], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    words = [word for word in model["vocab"] if word not in special]
    kinds += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * len(words)
    return {
        "ggml.model": "gemma4", "ggml.tokens": [*special, *bytes_of, *words],
        "ggml.token_type": list(map(int, kinds)),
        "ggml.merges": [" ".join(pair) for pair in model["merges"]],
    }  # fmt: skip


def bytes_as(name: str, tokens: list[str], merges: list[str]) -> dict[str, Any]:
    """A vocabulary of bytes under the pre-tokenizer `name`, as metadata of a file."""
    kinds = [int(gguf.TokenType.NORMAL)] * (len(tokens) - 1)
    return {
        "ggml.model": "gpt2", "ggml.pre": name, "ggml.tokens": tokens, "ggml.merges": merges,
        "ggml.token_type": [*kinds, int(gguf.TokenType.CONTROL)],
    }  # fmt: skip


def write(path: Path, words: Mapping[str, Any]) -> None:
    """Writes a model of one layer with a vocabulary, whose last control token ends texts."""
    tokens, kinds = words["ggml.tokens"], words["ggml.token_type"]
    last = max(n for n, kind in enumerate(kinds) if kind == gguf.TokenType.CONTROL)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in words.items():
        add = writer.add_string if isinstance(value, str) else writer.add_array
        add(f"tokenizer.{key}", value)
    writer.add_bos_token_id(last)
    writer.add_eos_token_id(last)
    writer.add_add_bos_token(False)
    square = np.zeros((HIDDEN, HIDDEN), np.float32)
    table = np.zeros((len(tokens), HIDDEN), np.float32)
    writer.add_tensor("token_embd.weight", table)
    writer.add_tensor("output.weight", table)
    for norm in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{norm}.weight", np.ones(HIDDEN, np.float32))
    for linear in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{linear}.weight", square)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokens_by_llama_cpp(words: Mapping[str, Any]) -> list[list[int]]:
    """The ids of each text, from llama.cpp's own server."""
    import xllamacpp

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write(path, words)
        return _asked(path, xllamacpp)


def _asked(path: Path, xllamacpp: Any) -> list[list[int]]:
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.port, params.warmup = 256, 0, False
    server = xllamacpp.Server(params)
    found = []
    for text in TEXTS:
        body = json.dumps({"content": text, "add_special": False}).encode()
        request = urllib.request.Request(
            f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            found.append(json.load(answer)["tokens"])
    return found


def main() -> None:
    tokens, merges = learned()
    groups: dict[str, dict[str, list[str] | list[list[int]]]] = {}
    for name in PATTERNS:
        ids = tokens_by_llama_cpp(bytes_as(name, tokens, merges))
        group = groups.setdefault(json.dumps(ids), {"names": [], "ids": ids})
        group["names"].append(name)  # type: ignore[arg-type]
        print(f"{name}: {sum(map(len, ids))} tokens", file=sys.stderr)
    others = [{**words, "ids": tokens_by_llama_cpp(words)} for words in (pieces(), merged())]
    content = {
        "made_by": f"xllamacpp {version('xllamacpp')}", "tokens": tokens, "merges": merges,
        "texts": TEXTS, "groups": list(groups.values()), "models": others,
    }  # fmt: skip
    GOLDENS.parent.mkdir(exist_ok=True)
    GOLDENS.write_text(json.dumps(content, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
