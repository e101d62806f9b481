"""Train heads for the demo target on a CPU: an MTP layer, and EAGLE-3, JetSpec and DFlash heads.

All learn the target's distribution, on its own continuations and, every fifth step, on real text,
as the demo's draft model did (``train_demo_pair.py``). The MTP layer learns one token ahead, from
the row that the target's head reads (DeepSeek-V3, arXiv:2412.19437, section 2.2); the EAGLE-3 head
learns from rows of three layers, and on its own rows as it will draft (training-time test,
arXiv:2503.01840); the JetSpec head learns all tokens of a block at once, from the same rows of the
target (arXiv:2606.18394), and the DFlash head does so in blocks whose rows all see each other
(arXiv:2602.06036). Each is written as soon as it is trained, as its makers publish them: OUT/mtp is
the target with a layer behind its last, the others are heads' folders. ``specexec bench OUT/mtp``
with ``--draft mtp``, or the demo target with ``--draft OUT/eagle``, then counts the tokens that
they bring a pass.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from demo_model import MLP, Llama, RMSNorm, Shape, rope_tables, rotate
from demo_optim import fit
from demo_tokens import ROW, Rows, build_rows, row_batch
from named_options import named
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from train_demo_pair import MALLOC, TARGET, generate

DEMO = Path("specexec_cli/demo")
FEATURES = (2, TARGET.layers // 2, TARGET.layers - 3)  # as EAGLE's own code has them
OWN_STEPS = 3  # that an EAGLE-3 head is trained on its own rows
BLOCK = 8  # rows of a JetSpec or DFlash head's block, a token and the masks behind it
STRIDE = 4  # tokens from one block that is trained on to the next
DECAY = 4  # places behind which a block's losses count by 1 / e of its first one's
MASK = TARGET.vocab - 1  # the token that stands for them


class Layer(nn.Module):
    """A decoder layer whose queries, keys and values may be of rows that are joined.

    Args:
        reads: numbers in a row that attention reads.
    """

    def __init__(self, s: Shape, reads: int) -> None:
        super().__init__()
        self.s = s
        sizes = {"q_proj": s.heads, "k_proj": s.kv_heads, "v_proj": s.kv_heads}
        linears = {n: nn.Linear(reads, c * s.head_dim, bias=False) for n, c in sizes.items()}
        linears["o_proj"] = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.self_attn = nn.ModuleDict(linears)
        self.mlp = MLP(s)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(s.hidden), RMSNorm(s.hidden)

    def run(self, x: Tensor, residual: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Map x [batch, time, reads] and its residual to rows [batch, time, hidden].

        ``past`` has the keys and values of earlier steps over the same text and takes this one's.
        In step n a row stands n tokens behind the rows that are known: it attends to the first
        step's rows up to there, and of each later step to the one row on its own path.
        """
        s, (b, t, _) = self.s, x.shape
        cos, sin = rope_tables(t + len(past))
        at = slice(len(past), len(past) + t)
        heads = {n: self.self_attn[n](x).view(b, t, -1, s.head_dim).transpose(1, 2)
                 for n in ("q_proj", "k_proj", "v_proj")}  # fmt: skip
        q = rotate(heads["q_proj"], cos[at], sin[at])
        past.append((rotate(heads["k_proj"], cos[at], sin[at]), heads["v_proj"]))
        steps = len(past) - 1
        rows, columns = torch.arange(t)[:, None], torch.arange(t)[None]
        seen = [columns <= rows] + [columns == rows] * steps
        k, v = (torch.cat(each, 2) for each in zip(*past, strict=True))
        group = s.heads // s.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.cat(seen, 1))
        residual = residual + self.self_attn["o_proj"](out.transpose(1, 2).reshape(b, t, -1))
        return residual + self.mlp(self.post_attention_layernorm(residual))  # type: ignore[no-any-return]


class Mtp(nn.Module):
    """An MTP layer, its weights named as in GLM-4.5's checkpoints."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.enorm, self.hnorm = RMSNorm(s.hidden), RMSNorm(s.hidden)
        self.eh_proj = nn.Linear(2 * s.hidden, s.hidden, bias=False)
        self.block = Layer(s, s.hidden)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(s.hidden)})

    def losses(self, seen: Seen) -> list[Tensor]:
        """The loss of the one step that it is trained for."""
        embedded = seen.embedded[:, 1:]
        both = torch.cat((self.enorm(embedded), self.hnorm(seen.last[:, :-1])), -1)
        x = self.eh_proj(both)
        made = self.shared_head["norm"](self.block.run(self.block.input_layernorm(x), x, []))
        return [seen.loss(made @ seen.table.T, 1)]

    def tensors(self) -> dict[str, Tensor]:
        """Its weights under their names in a checkpoint."""
        names = ((name.replace("block.", ""), each) for name, each in self.state_dict().items())
        return {f"model.layers.{TARGET.layers}.{name}": each for name, each in names}


class Eagle(nn.Module):
    """An EAGLE-3 head, its weights named as in EAGLE's own files; embeddings are the target's."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.fc = nn.Linear(len(FEATURES) * s.hidden, s.hidden, bias=False)
        self.midlayer = Layer(s, 2 * s.hidden)
        self.midlayer.hidden_norm = RMSNorm(s.hidden)
        self.norm = RMSNorm(s.hidden)
        self.lm_head = nn.Linear(s.hidden, s.vocab, bias=False)

    def losses(self, seen: Seen) -> list[Tensor]:
        """The loss behind the target's rows, and behind its own, so many steps on."""
        rows, past, found = self.fc(seen.features[:, :-1]), [], []
        for step in range(1, OWN_STEPS + 2):
            embedded = self.midlayer.input_layernorm(seen.embedded[:, step : step + rows.shape[1]])
            both = torch.cat((embedded, self.midlayer.hidden_norm(rows)), -1)
            made = self.midlayer.run(both, rows, past)
            found.append(seen.loss(self.lm_head(self.norm(made)), step))
            rows, past = made[:, :-1], [(k[:, :, :-1], v[:, :, :-1]) for k, v in past]
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Its weights under their names in a checkpoint."""
        vocab = self.lm_head.weight.shape[0]
        same = {"d2t": torch.zeros(vocab, dtype=torch.long), "t2d": torch.ones(vocab).bool()}
        return {**self.state_dict(), **same}


class BlockLayer(Layer):
    """A layer of a JetSpec or DFlash head: a Qwen3's that attends to committed tokens too."""

    def __init__(self, s: Shape) -> None:
        super().__init__(s, s.hidden)
        self.self_attn["q_norm"], self.self_attn["k_norm"] = (
            RMSNorm(s.head_dim),
            RMSNorm(s.head_dim),
        )

    def beside(self, x: Tensor, places: Tensor, rows: Tensor, seen: Tensor) -> Tensor:
        """Map rows x [batch, count, hidden] of blocks, which stand at ``places`` [count].

        ``rows`` [batch, time, hidden] are committed tokens'; ``seen`` [count, time + count] says
        which of those and of the blocks' rows each row attends to.
        """
        s, (b, n, _), t = self.s, x.shape, rows.shape[1]
        cos, sin = (torch.cat((each, each[places])) for each in rope_tables(t))
        both = torch.cat((rows, self.input_layernorm(x)), 1)
        heads = {p: self.self_attn[p](both).view(b, t + n, -1, s.head_dim).transpose(1, 2)
                 for p in ("q_proj", "k_proj", "v_proj")}  # fmt: skip
        q = rotate(self.self_attn["q_norm"](heads["q_proj"]), cos, sin)[:, :, t:]
        k = rotate(self.self_attn["k_norm"](heads["k_proj"]), cos, sin)
        group = s.heads // s.kv_heads
        k, v = k.repeat_interleave(group, 1), heads["v_proj"].repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.self_attn["o_proj"](out.transpose(1, 2).reshape(b, n, -1))
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Jetspec(nn.Module):
    """A JetSpec head of two layers, its weights named as in its makers' files."""

    causal = True  # a block's rows see those before them

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.fc = nn.Linear(len(FEATURES) * s.hidden, s.hidden, bias=False)
        self.layers = nn.ModuleList([BlockLayer(s) for _ in range(2)])
        self.hidden_norm, self.norm = RMSNorm(s.hidden), RMSNorm(s.hidden)

    def losses(self, seen: Seen) -> list[Tensor]:
        """The loss of all masks in blocks that begin every few tokens of the text.

        The first masks count most, as what is drafted behind a wrong token is lost.
        """
        rows = self.hidden_norm(self.fc(seen.features))
        committed, inside = torch.arange(rows.shape[1]), torch.arange(BLOCK)
        starts = committed[: len(committed) - BLOCK + 1 : STRIDE]
        first, offset = (x.flatten() for x in torch.meshgrid(starts, inside, indexing="ij"))
        places = first + offset
        own = first[:, None] == first
        if self.causal:
            own &= places <= places[:, None]
        x = seen.table[MASK].expand(len(rows), len(places), -1).clone()
        x[:, ::BLOCK] = seen.embedded[:, starts]
        sees = torch.cat((committed < first[:, None], own), 1)
        for layer in self.layers:
            x = layer.beside(x, places, rows, sees)
        masks = offset > 0  # each predicts the token at its place
        logits = self.norm(x)[:, masks] @ seen.table.T
        return [seen.loss(logits, places[masks] - 1, torch.exp((1 - offset[masks]) / DECAY))]

    def tensors(self) -> dict[str, Tensor]:
        """Its weights under their names in a checkpoint."""
        return dict(self.state_dict())


class Dflash(Jetspec):
    """A DFlash head of two layers: a JetSpec head in whose blocks rows see each other."""

    causal = False


HEADS: dict[str, Any] = {"mtp": Mtp, "eagle": Eagle, "jetspec": Jetspec, "dflash": Dflash}


class Seen:
    """What the target makes of ids [batch, time]."""

    def __init__(self, target: Llama, ids: Tensor) -> None:
        with torch.no_grad():
            rows = target.layer_rows(ids)
            self.table = target.model.embed_tokens.weight
            self.embedded = rows[0]
            self.features = torch.cat([rows[n] for n in FEATURES], -1)
            self.last = target.model.norm(rows[-1])
            self.probs = F.linear(self.last, self.table).softmax(-1)

    def loss(self, logits: Tensor, at: int | Tensor, weights: Tensor | None = None) -> Tensor:
        """The cross-entropy of logits [batch, rows, vocab] against the target's: those behind the
        tokens from ``at`` on, or at these places. Rows count alike, or by ``weights`` [rows].
        """
        places = torch.arange(logits.shape[1]) + at if isinstance(at, int) else at
        losses = -(self.probs[:, places] * logits.log_softmax(-1)).sum(-1).mean(0)
        return losses.mean() if weights is None else (losses * weights).sum() / weights.sum()


def mean_loss(head: Any, target: Llama, ids: Tensor) -> Tensor:
    """The mean of a head's losses on ids [batch, time]."""
    losses: list[Tensor] = head.losses(Seen(target, ids))
    return torch.stack(losses).mean()


def train(head: Any, args: argparse.Namespace, target: Llama, rows: Rows, texts: Tensor) -> None:
    """Train a head on the target's texts [texts, time] and, every fifth step, on real rows."""
    size = args.rows * ROW // texts.shape[1]

    def losses_at(step: int) -> list[Callable[[], Tensor]]:
        if step % 5 == 4:
            ids = row_batch(rows, step, args.rows, 4)
        else:
            epoch, at = divmod(step * size, len(texts) // size * size)
            order = np.random.default_rng(77 + epoch).permutation(len(texts))
            ids = texts[torch.from_numpy(order[at : at + size])].long()
        return [partial(mean_loss, head, target, part) for part in ids.chunk(args.threads)]

    fit(head, type(head).__name__.lower(), args.steps, args.lr, losses_at, args.work_dir)


def export(heads: dict[str, Any], out: Path) -> None:
    """Write heads in bfloat16, and the target beside the MTP layer."""
    said = json.loads((DEMO / "target" / "config.json").read_text())
    block = {
        **said, "architectures": ["DFlashDraftModel"], "model_type": "qwen3",
        "num_hidden_layers": 2, "block_size": BLOCK,
    }  # fmt: skip
    inside = {"target_layer_ids": [n - 1 for n in FEATURES], "mask_token_id": MASK}
    configs = {
        "mtp": {**said, "num_nextn_predict_layers": 1},
        "eagle": {
            **said, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1,
            "tie_word_embeddings": False, "draft_vocab_size": said["vocab_size"],
        },
        "jetspec": {**block, "dflash_config": {**inside, "causal_head": True}},
        "dflash": {**block, "dflash_config": inside},
    }  # fmt: skip
    for name, head in heads.items():
        stored = {n: t if t.dtype in (torch.long, torch.bool) else t.bfloat16().contiguous()
                  for n, t in head.tensors().items()}  # fmt: skip
        if name == "mtp":
            shutil.copytree(DEMO / "target", out / name, dirs_exist_ok=True)
            stored |= load_file(DEMO / "target" / "model.safetensors")
        (out / name).mkdir(parents=True, exist_ok=True)
        save_file(stored, out / name / "model.safetensors", metadata={"format": "pt"})
        (out / name / "config.json").write_text(json.dumps(configs[name], indent=2) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path(".demo_heads"), help="folder for the heads' own")
    add("--work-dir", type=Path, default=Path(".demo_heads"), help="checkpoints; reused to resume")
    add("--heads", default=",".join(HEADS), help="which to train, in this order")
    add("--steps", type=int, default=300, help="optimizer steps of each head")
    add("--gen-batches", type=int, default=4, help="batches of target continuations")
    add("--gen-size", type=int, default=256, help="continuations per batch")
    add("--gen-width", type=int, default=256, help="tokens per continuation, prefix included")
    add("--rows", type=int, default=4, help="training rows of 1024 tokens per step")
    add("--lr", type=float, default=4e-3, help="peak learning rate")
    add("--threads", type=int, default=2, help="CPU threads")
    args = parser.parse_args()
    args.heads = named("--heads", args.heads, HEADS)
    return args


def main() -> None:
    if any(os.environ.get(k) != v for k, v in MALLOC.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC})
    args = parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(4)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    tok = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    rows = build_rows(args.work_dir / "rows.npy", tok, 0.4, epochs=1)
    target = Llama(TARGET)
    target.load_state_dict(load_file(DEMO / "target" / "model.safetensors"))
    paths = generate(args, target, rows, args.work_dir)
    texts = torch.cat([torch.load(path, weights_only=True)[0] for path in paths])
    for name in args.heads:
        head = HEADS[name](TARGET)
        if name == "eagle":
            head.lm_head.weight.data.copy_(target.model.embed_tokens.weight)
        train(head, args, target, rows, texts)
        export({name: head}, args.out)


if __name__ == "__main__":
    main()
