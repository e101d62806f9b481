"""Train the embedded demo pair on a CPU: a small Llama target and the draft distilled from it.

Stages, each kept in ``--work-dir`` and picked up again when the command is repeated:

1. corpus and byte-level BPE tokenizer (``demo_corpus.py``),
2. target: next-token training, Muon for matrices and AdamW for the rest, rate falling to zero,
3. generation: the target continues training prefixes (greedy, and sampled then greedy), which
   is sequence-level distillation data (Kim & Rush 2016) on the target's own distribution,
4. draft: cross-entropy against the target's top-k distribution (Hinton et al. 2015) on that
   text, sharpened towards the target's greedy token, mixed with some real text,
5. export of two Hugging Face folders in bfloat16 and of the held-out prompts.

All schedules count steps, never seconds, and all seeds are fixed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from demo_corpus import (
    Message,
    chat_documents,
    code_documents,
    collect_gists,
    held_out_prompts,
    is_held_out,
    stdlib_files,
)
from demo_model import Cache, Llama, Muon, Shape
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

SPECIALS = ["<|bos|>", "<|eos|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]
BOS, EOS, END = 0, 1, 2
TARGET = Shape(hidden=256, layers=8, heads=8, kv_heads=4, inner=896)
DRAFT = Shape(hidden=192, layers=3, heads=6, kv_heads=3, inner=480)
ROW = 1024  # tokens per training row
TOP = 16  # teacher probabilities kept per position
SPLIT = r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+|\d{1,3}| ?[^\sA-Za-z\d]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] | trim"
    " + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# glibc returns big buffers to the kernel after every operation by default; keeping them made
# training 1.5 times faster.
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "30000000000",
          "MALLOC_TOP_PAD_": "500000000"}  # fmt: skip


def progress() -> Progress:
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                    TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
                    console=Console(stderr=True))  # fmt: skip


# ---------------------------------------------------------------- tokenizer and token stream


def chat_text(messages: list[Message]) -> str:
    """Return a conversation as text, as the chat template renders it, without the bos."""
    return "".join(f"<|{m['role']}|>{m['content'].strip()}<|end|>" for m in messages)


def build_tokenizer(path: Path, vocab: int) -> Tokenizer:
    """Load the byte-level BPE from ``path``, or train it on code and answers and save it."""
    if path.exists():
        return Tokenizer.from_file(str(path))
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
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


def build_rows(path: Path, tok: Tokenizer, chat_share: float, epochs: int) -> np.ndarray:
    """Return shuffled token rows, uint16 [rows, ROW + 1], for ``epochs`` passes over the code."""
    if path.exists():
        return np.load(path)
    files = {n: t for n, t in stdlib_files().items() if not is_held_out(n)}
    gists = collect_gists()
    parts = []
    for epoch in range(epochs):
        rng = random.Random(1000 + epoch)
        code = [e.ids + [EOS] for e in tok.encode_batch(list(code_documents(files, rng)))]
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


def held_out_rows(tok: Tokenizer) -> Tensor:
    """Return rows [n, 513] of held-out source, for the held-out loss."""
    texts = [t for n, t in stdlib_files().items() if is_held_out(n)]
    flat = [t for text in texts for t in [*tok.encode(text).ids, EOS]]
    return torch.tensor(flat[: len(flat) // 513 * 513]).view(-1, 513)[::2]


# ------------------------------------------------------------------------------- training


def optimizers(model: Llama, lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the hidden matrices and AdamW for embeddings and norms."""
    named = list(model.named_parameters())
    hidden = [p for n, p in named if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in named if p.ndim != 2 or "embed" in n]
    adam = torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(hidden, lr=2 * lr), adam]


def rate(step: int, steps: int) -> float:
    """Return the learning rate factor: 20 warm-up steps, flat to 30 %, linear to zero."""
    return min(1.0, (step + 1) / 20, (steps - step) / (0.7 * steps))


def fit(
    model: Llama,
    name: str,
    steps: int,
    lr: float,
    loss_at: Callable[[int], Tensor],
    work: Path,
) -> None:
    """Run ``steps`` optimizer steps of ``loss_at(step)``; resume from ``work/name.pt``."""
    opts = optimizers(model, lr)
    saved, start = work / f"{name}.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        start = state["step"]
        for opt, part in zip(opts, state["opts"], strict=True):
            opt.load_state_dict(part)
    mean = 0.0
    with progress() as bar:
        task = bar.add_task(name, total=steps, completed=start, note="")
        for step in range(start, steps):
            for opt in opts:
                opt.param_groups[0]["lr"] = opt.defaults["lr"] * rate(step, steps)
            loss = loss_at(step)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for opt in opts:
                opt.step()
                opt.zero_grad()
            mean = loss.item() if step == start else 0.95 * mean + 0.05 * loss.item()
            bar.update(task, advance=1, note=f"loss {mean:.3f}")
            if (step + 1) % 50 == 0 or step + 1 == steps:
                print(f"{name} step {step + 1}/{steps} loss {mean:.3f}", file=sys.stderr)
                state = {"model": model.state_dict(), "step": step + 1,
                         "opts": [opt.state_dict() for opt in opts]}  # fmt: skip
                torch.save(state, saved.with_suffix(".tmp"))
                saved.with_suffix(".tmp").replace(saved)


def next_token_loss(model: Any, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of ids [batch, time + 1]."""
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def row_batch(rows: np.ndarray, step: int, count: int, cut: int) -> Tensor:
    """Return rows [count * cut, ROW // cut + 1] of batch ``step``, each row cut in ``cut``."""
    at = np.arange(step * count, (step + 1) * count) % len(rows)
    ids = torch.from_numpy(rows[at].astype(np.int64))
    width = ROW // cut
    return torch.cat([ids[:, i * width : (i + 1) * width + 1] for i in range(cut)])


@torch.no_grad()
def held_out_loss(model: Llama, rows: Tensor) -> float:
    return float(np.mean([next_token_loss(model, part).item() for part in rows.split(8)]))


def train_target(args: argparse.Namespace, rows: np.ndarray, work: Path) -> Llama:
    """Train the target: rows of 512, then of 1024 in the last fifth."""
    model = Llama(TARGET, seed=1)
    run = torch.compile(model) if args.compile else model

    def loss_at(step: int) -> Tensor:
        cut = 2 if step < 0.8 * args.target_steps else 1
        return next_token_loss(run, row_batch(rows, step, args.rows, cut))

    fit(model, "target", args.target_steps, args.lr, loss_at, work)
    return model


# ----------------------------------------------------------------------------- generation


def bos_windows(rows: np.ndarray, width: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield random windows [width] of the rows that begin at a document's start."""
    while True:
        row = rows[rng.integers(len(rows))]
        starts = np.flatnonzero(row[: ROW + 1 - width] == BOS)
        if len(starts):
            at = rng.choice(starts)
            yield row[at : at + width]


@torch.no_grad()
def continue_batch(model: Llama, ids: Tensor, width: int, hot: int) -> tuple[Tensor, ...]:
    """Continue prefixes ids [batch, prefix] to ``width`` tokens.

    The first ``hot`` new tokens are sampled at temperature 0.8, the others are greedy. Returns
    ids [batch, width] and the top log-probabilities and their ids, both [batch, width, TOP].
    """
    caches = [Cache(len(ids), model.s, width) for _ in range(model.s.layers)]
    gen = torch.Generator().manual_seed(int(ids.sum()))
    out, tops, top_ids, start = [ids], [], [], 0
    while start < width:
        logp = F.log_softmax(model(out[-1], caches, start), -1)
        top, index = logp.topk(TOP, -1)
        tops.append(top.half())
        top_ids.append(index.short())
        start += out[-1].shape[1]
        token = index[:, -1, :1]
        if len(out) <= hot:
            token = torch.multinomial((logp[:, -1] / 0.8).exp(), 1, generator=gen)
        out.append(token)
    return torch.cat(out[:-1], 1), torch.cat(tops, 1), torch.cat(top_ids, 1)


def generate(args: argparse.Namespace, model: Llama, rows: np.ndarray, work: Path) -> list[Path]:
    """Write ``--gen-batches`` files of target continuations; return their paths."""
    paths = []
    with progress() as bar:
        task = bar.add_task("generate", total=args.gen_batches, note="")
        for batch in range(args.gen_batches):
            path = work / f"gen{batch:03d}.pt"
            paths.append(path)
            if not path.exists():
                rng = np.random.default_rng(5000 + batch)
                prefix = int(rng.choice([6, 12, 16, 20, 24, 32, 48, 64, 96, 128]))
                hot = (0, 24, 0, 400)[batch % 4]
                windows = bos_windows(rows, prefix, rng)
                ids = np.stack([next(windows) for _ in range(args.gen_size)]).astype(np.int64)
                data = continue_batch(model, torch.from_numpy(ids), args.gen_width, hot)
                torch.save((data[0].short(), *data[1:]), path)
            bar.update(task, advance=1)
    return paths


# ---------------------------------------------------------------------------------- draft


def distill_loss(model: Any, ids: Tensor, top: Tensor, index: Tensor, sharp: float) -> Tensor:
    """Return the cross-entropy of the draft against the target's sharpened top-k.

    ids [batch, time], top and index [batch, time, TOP]; ``sharp`` is the inverse temperature.
    """
    logp = F.log_softmax(model(ids), -1)
    probs = F.softmax(top.float() * sharp, -1)
    return -(probs * logp.gather(-1, index.long())).sum(-1).mean()


def train_draft(
    args: argparse.Namespace, rows: np.ndarray, paths: list[Path], work: Path
) -> Llama:
    """Train the draft on the target's own text and, every fifth step, on real text."""
    model = Llama(DRAFT, seed=2)
    run = torch.compile(model) if args.compile else model
    parts = [torch.load(p, weights_only=True) for p in paths]
    ids, top, index = (torch.cat([p[i] for p in parts]) for i in range(3))
    order = [np.random.default_rng(77 + e).permutation(len(ids)) for e in range(100)]
    size = args.rows * ROW // args.gen_width

    def loss_at(step: int) -> Tensor:
        if step % 5 == 4 and step < 0.8 * args.draft_steps:
            return next_token_loss(run, row_batch(rows, step, args.rows, 2))
        epoch, at = divmod(step * size % (len(ids) // size * size * 100), len(ids) // size * size)
        pick = torch.from_numpy(order[epoch][at : at + size].copy())
        sharp = 1.0 if step < 0.5 * args.draft_steps else 2.0
        return distill_loss(run, ids[pick].long(), top[pick], index[pick], sharp)

    fit(model, "draft", args.draft_steps, args.draft_lr, loss_at, work)
    return model


# --------------------------------------------------------------------------------- export


def export(model: Llama, tokenizer: Path, out: Path) -> None:
    """Write one Hugging Face folder in bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    names = [n for n, _ in model.named_parameters()]
    state = model.state_dict()
    tensors = {n: state[n].to(torch.bfloat16).contiguous() for n in names}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    eos = [END, EOS]
    token = {"bos_token": "<|bos|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    documents = {
        "config.json": model.s.hf_config(BOS, eos),
        "generation_config.json": {"bos_token_id": BOS, "eos_token_id": eos, "pad_token_id": 3,
                                   "do_sample": False},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", **token, "add_bos_token": True,
            "clean_up_tokenization_spaces": False, "model_max_length": 4096,
            "additional_special_tokens": SPECIALS[4:] + ["<|eos|>"],
            "chat_template": CHAT_TEMPLATE,
        },
    }  # fmt: skip
    for name, document in documents.items():
        (out / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    (out / "tokenizer.json").write_bytes(tokenizer.read_bytes())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path("specexec_cli/demo"), help="folder for target/ and draft/")
    add("--work-dir", type=Path, default=Path(".demo_work"), help="checkpoints; reused to resume")
    add("--target-steps", type=int, default=1150, help="optimizer steps of the target")
    add("--gen-batches", type=int, default=24, help="batches of target continuations")
    add("--gen-size", type=int, default=256, help="continuations per batch")
    add("--gen-width", type=int, default=256, help="tokens per continuation, prefix included")
    add("--draft-steps", type=int, default=2400, help="optimizer steps of the draft")
    add("--rows", type=int, default=4, help="training rows of 1024 tokens per step")
    add("--lr", type=float, default=3e-3, help="peak learning rate of the target")
    add("--draft-lr", type=float, default=4e-3, help="peak learning rate of the draft")
    add("--chat-share", type=float, default=0.4, help="share of chat tokens in training")
    add("--threads", type=int, default=2, help="CPU threads")
    add("--compile", action="store_true", help="use torch.compile (needs a C++ compiler)")
    return parser.parse_args()


def main() -> None:
    if any(os.environ.get(k) != v for k, v in MALLOC.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC})
    args = parse_args()
    torch.set_num_threads(args.threads)
    work: Path = args.work_dir
    work.mkdir(parents=True, exist_ok=True)
    tok = build_tokenizer(work / "tokenizer.json", TARGET.vocab)
    rows = build_rows(work / "rows.npy", tok, args.chat_share, epochs=4)
    held = held_out_rows(tok)
    prompts = held_out_prompts(lambda text: len(tok.encode(text).ids))
    text = json.dumps(prompts, indent=1, ensure_ascii=False) + "\n"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "heldout_prompts.json").write_text(text, encoding="utf-8")
    target = train_target(args, rows, work)
    export(target, work / "tokenizer.json", args.out / "target")
    print(f"target: held-out loss {held_out_loss(target, held):.3f}", file=sys.stderr)
    draft = train_draft(args, rows, generate(args, target, rows, work), work)
    export(draft, work / "tokenizer.json", args.out / "draft")
    print(f"draft: held-out loss {held_out_loss(draft, held):.3f}", file=sys.stderr)


if __name__ == "__main__":
    main()
