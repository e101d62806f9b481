"""The demo pair's tokenizer and token rows, made from the corpus of ``demo_corpus.py``."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demo_corpus import (
    Message,
    chat_documents,
    code_documents,
    collect_gists,
    is_held_out,
    stdlib_files,
)
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

Rows = np.ndarray[Any, np.dtype[np.uint16]]

SPECIALS = ["<|bos|>", "<|eos|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]
BOS, EOS, END, PAD = range(4)
ROW = 1024  # tokens per training row
SPLIT = (
    r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+|\d{1,3}| ?[^\sA-Za-z\d]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def chat_text(messages: list[Message]) -> str:
    """Return a conversation as text, as the chat template renders it, without the bos."""
    return "".join(f"<|{m['role']}|>{m['content'].strip()}<|end|>" for m in messages)


def build_tokenizer(path: Path, vocab: int) -> Tokenizer:
    """Load the byte-level BPE from ``path``, or train it on code and answers and save it."""
    if path.exists():
        return Tokenizer.from_file(str(path))
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=SPECIALS, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    code = [t for name, t in stdlib_files().items() if not is_held_out(name)]
    answers = [g.answer for g in collect_gists()]
    tok.train_from_iterator(code + 2 * answers, trainer)
    tok.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A <|bos|> $B", special_tokens=[("<|bos|>", BOS)]
    )
    tok.save(str(path))
    return tok


def build_rows(path: Path, tok: Tokenizer, chat_share: float, epochs: int) -> Rows:
    """Return shuffled token rows, uint16 [rows, ROW + 1], for ``epochs`` passes over the code."""
    if path.exists():
        loaded: Rows = np.load(path)
        return loaded
    files = {n: t for n, t in stdlib_files().items() if not is_held_out(n)}
    gists = collect_gists()
    parts = []
    for epoch in range(epochs):
        rng = random.Random(1000 + epoch)
        code = [[*encode_cut(tok, text, rng), EOS] for text in code_documents(files, rng)]
        need = sum(map(len, code)) * chat_share / (1 - chat_share)
        chats = [chat_text(c) for c in chat_documents(gists, int(need / 60), rng)]
        docs = code + [e.ids for e in tok.encode_batch(chats)]
        rng.shuffle(docs)
        flat = np.fromiter((t for d in docs for t in d), dtype=np.uint16)
        rows = flat[: len(flat) // (ROW + 1) * (ROW + 1)].reshape(-1, ROW + 1)
        parts.append(rows[np.random.default_rng(epoch).permutation(len(rows))])
    out = np.concatenate(parts)
    np.save(path, out)
    return out


def encode_cut(tok: Tokenizer, text: str, rng: random.Random) -> list[int]:
    """Encode code in pieces cut at random places, some 400 characters apart, each on its own.

    A user's prompt may end anywhere, as ``def `` does behind its space, and then the next token
    begins where the tokenizer by itself would never have cut. Half of the cuts fall behind a
    space, and every tenth text that begins with ``def `` is cut there.
    """
    cuts = {4} if text.startswith("def ") and rng.random() < 0.1 else set()
    for _ in range(int(len(text) / 400 + rng.random())):
        at = rng.randrange(1, len(text))
        if rng.random() < 0.5:
            at = text.find(" ", at) + 1
        cuts.add(at)
    bounds = sorted({0, *cuts, len(text)})
    parts = tok.encode_batch([text[a:b] for a, b in itertools.pairwise(bounds)])
    return [BOS, *(t for part in parts for t in part.ids[1:])]


def held_out_rows(tok: Tokenizer) -> Tensor:
    """Return rows [n, 513] of held-out source, for the held-out loss."""
    texts = [t for n, t in stdlib_files().items() if is_held_out(n)]
    flat = [t for text in texts for t in [*tok.encode(text).ids, EOS]]
    return torch.tensor(flat[: len(flat) // 513 * 513]).view(-1, 513)[::2]


def row_batch(rows: Rows, step: int, count: int, cut: int) -> Tensor:
    """Return rows [count * cut, ROW // cut + 1] of batch ``step``, each row cut in ``cut``."""
    at = np.arange(step * count, (step + 1) * count) % len(rows)
    ids = torch.from_numpy(rows[at].astype(np.int64))
    width = ROW // cut
    return torch.cat([ids[:, i * width : (i + 1) * width + 1] for i in range(cut)])
