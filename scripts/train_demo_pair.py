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
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from demo_corpus import held_out_prompts
from demo_model import Cache, Llama, Shape
from demo_optim import fit, progress
from demo_tokens import (
    BOS,
    END,
    EOS,
    PAD,
    ROW,
    SPECIALS,
    Rows,
    build_rows,
    build_tokenizer,
    held_out_rows,
    row_batch,
)
from safetensors.torch import save_file
from torch import Tensor

TARGET = Shape(hidden=256, layers=8, heads=8, kv_heads=4, inner=896)
DRAFT = Shape(hidden=192, layers=3, heads=6, kv_heads=3, inner=480)
TOP = 16  # teacher probabilities kept per position
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] | trim"
    " + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# glibc returns big buffers to the kernel after every operation by default; keeping them made
# training 1.5 times faster. One OpenMP thread: the script's own threads share the work.
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "30000000000",
          "MALLOC_TOP_PAD_": "500000000", "MALLOC_ARENA_MAX": "1",
          "OMP_NUM_THREADS": "1"}  # fmt: skip


# --------------------------------------------------------------------------------- target


def next_token_loss(model: Any, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of ids [batch, time + 1]."""
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: Llama, rows: Tensor) -> float:
    return float(np.mean([next_token_loss(model, part).item() for part in torch.split(rows, 8)]))


def train_target(args: argparse.Namespace, rows: Rows, work: Path) -> Llama:
    """Train the target: rows of 256 in the first half, of 1024 in the last sixth, else of 512."""
    model = Llama(TARGET, seed=1)
    loss_of = torch.compile(next_token_loss) if args.compile else next_token_loss

    def losses_at(step: int) -> list[Callable[[], Tensor]]:
        done = step / args.target_steps
        cut = 4 if done < 0.5 else 2 if done < 5 / 6 else 1
        batch = row_batch(rows, step, args.rows, cut)
        return [partial(loss_of, model, part) for part in batch.chunk(args.threads)]

    fit(model, "target", args.target_steps, args.lr, losses_at, work)
    return model


# ----------------------------------------------------------------------------- generation


def bos_windows(rows: Rows, width: int, rng: np.random.Generator) -> Iterator[Rows]:
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


def generate(args: argparse.Namespace, model: Llama, rows: Rows, work: Path) -> list[Path]:
    """Write ``--gen-batches`` files of target continuations; return their paths."""
    paths = []
    with progress() as bar, ThreadPoolExecutor() as pool:
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
                halves = torch.from_numpy(ids).chunk(args.threads)
                go = partial(continue_batch, model, width=args.gen_width, hot=hot)
                done = pool.map(go, halves)
                data = [torch.cat(part) for part in zip(*done, strict=True)]
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


@torch.no_grad()
def new_draft(target: Llama) -> Llama:
    """Return a fresh draft whose embeddings are the target's leading principal directions."""
    draft = Llama(DRAFT, seed=2)
    table = target.state_dict()["model.embed_tokens.weight"]
    axes = torch.linalg.eigh(table.mT @ table).eigenvectors[:, -DRAFT.hidden :]
    draft.load_state_dict({"model.embed_tokens.weight": table @ axes}, strict=False)
    return draft


def train_draft(
    args: argparse.Namespace, model: Llama, rows: Rows, paths: list[Path], work: Path
) -> Llama:
    """Train the draft on the target's own text and, every fifth step, on real text."""
    real_loss = torch.compile(next_token_loss) if args.compile else next_token_loss
    kd_loss = torch.compile(distill_loss) if args.compile else distill_loss
    parts = [torch.load(p, weights_only=True) for p in paths]
    ids, top, index = (torch.cat([p[i] for p in parts]) for i in range(3))
    order = [np.random.default_rng(77 + e).permutation(len(ids)) for e in range(100)]
    size = args.rows * ROW // args.gen_width

    def losses_at(step: int) -> list[Callable[[], Tensor]]:
        if step % 5 == 4 and step < 0.8 * args.draft_steps:
            batch = row_batch(rows, step, args.rows, 2)
            return [partial(real_loss, model, part) for part in batch.chunk(args.threads)]
        epoch, at = divmod(step * size % (len(ids) // size * size * 100), len(ids) // size * size)
        pick = torch.from_numpy(order[epoch][at : at + size].copy())
        sharp = 1.0 if step < 0.5 * args.draft_steps else 2.0
        return [
            partial(kd_loss, model, ids[at].long(), top[at], index[at], sharp)
            for at in pick.chunk(args.threads)
        ]

    fit(model, "draft", args.draft_steps, args.draft_lr, losses_at, work)
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
        "generation_config.json": {"bos_token_id": BOS, "eos_token_id": eos, "pad_token_id": PAD,
                                   "do_sample": False},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", **token, "add_bos_token": True,
            "clean_up_tokenization_spaces": False, "model_max_length": 4096,
            "additional_special_tokens": [*SPECIALS[4:], "<|eos|>"],
            "chat_template": CHAT_TEMPLATE,
        },
    }  # fmt: skip
    for name, document in documents.items():
        (out / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    (out / "tokenizer.json").write_bytes(tokenizer.read_bytes())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("specexec_cli/demo"), help="folder for target/ and draft/")
    add("--work-dir", type=Path, default=Path(".demo_work"), help="checkpoints; reused to resume")
    add("--target-steps", type=int, default=1900, help="optimizer steps of the target")
    add("--gen-batches", type=int, default=18, help="batches of target continuations")
    add("--gen-size", type=int, default=256, help="continuations per batch")
    add("--gen-width", type=int, default=256, help="tokens per continuation, prefix included")
    add("--draft-steps", type=int, default=1000, help="optimizer steps of the draft")
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
    torch.set_num_threads(1)
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
    paths = generate(args, target, rows, work)
    draft = train_draft(args, new_draft(target), rows, paths, work)
    export(draft, work / "tokenizer.json", args.out / "draft")
    print(f"draft: held-out loss {held_out_loss(draft, held):.3f}", file=sys.stderr)


if __name__ == "__main__":
    main()
