"""Training loop of the demo pair: Muon, gradients from two threads, checkpoints, progress."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn


def progress() -> Progress:
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                    TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
                    console=Console(stderr=True))  # fmt: skip


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024): momentum made orthogonal by five Newton-Schulz steps.

    Matrices of one shape go through the iteration as one batch in fp32. The step is scaled by
    0.2 sqrt(max(rows, cols)) (Liu et al. 2025), so AdamW-like learning rates fit.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, decay: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape, []).append(p)
            for same in by_shape.values():
                self._step_shape(same, group)

    def _step_shape(self, same: list[nn.Parameter], group: dict[str, Any]) -> None:
        grads = []
        for p in same:
            assert p.grad is not None
            buf = self.state[p].setdefault("momentum", torch.zeros_like(p))
            buf.lerp_(p.grad, 1 - group["momentum"])
            grads.append(p.grad.lerp(buf, group["momentum"]))
        scale = 0.2 * max(same[0].shape) ** 0.5 * group["lr"]
        for p, update in zip(same, newton_schulz(torch.stack(grads)), strict=True):
            p.mul_(1 - group["lr"] * group["decay"]).sub_(update, alpha=scale)


def newton_schulz(g: Tensor) -> Tensor:
    """Return g [count, rows, cols] with every matrix moved near its orthogonal factor."""
    flip = g.shape[1] > g.shape[2]
    x = g.mT if flip else g
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    out: Tensor = x.mT if flip else x
    return out


def optimizers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the hidden matrices and AdamW for embeddings, norms and routers."""
    named = list(model.named_parameters())
    apart = [p.ndim != 2 or "embed" in n or n.endswith("moe.gate.weight") for n, p in named]
    hidden = [p for (_, p), alone in zip(named, apart, strict=True) if not alone]
    rest = [p for (_, p), alone in zip(named, apart, strict=True) if alone]
    adam = torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(hidden[0::2], lr=2 * lr), Muon(hidden[1::2], lr=2 * lr), adam]


def rate(step: int, steps: int) -> float:
    """Return the learning rate factor: 20 warm-up steps, flat to 30 %, linear to zero."""
    return min(1.0, (step + 1) / 20, (steps - step) / (0.7 * steps))


def backward(
    params: list[torch.nn.Parameter], losses: list[Callable[[], Tensor]], pool: ThreadPoolExecutor
) -> float:
    """Set the mean gradient of the losses, each on a thread of its own; return their mean.

    Two one-threaded halves meet once per step, where two-threaded operations would meet after
    every operation and wait for whatever else the machine runs.
    """

    def one(loss_of: Callable[[], Tensor]) -> tuple[float, tuple[Tensor, ...]]:
        loss = loss_of()
        return loss.item(), torch.autograd.grad(loss, params)

    done = list(pool.map(one, losses))
    for i, p in enumerate(params):
        p.grad = sum(grads[i] for _, grads in done) / len(done)  # type: ignore[assignment]
    return sum(loss for loss, _ in done) / len(done)


def fit(
    model: nn.Module,
    name: str,
    steps: int,
    lr: float,
    losses_at: Callable[[int], list[Callable[[], Tensor]]],
    work: Path,
) -> None:
    """Run ``steps`` optimizer steps; resume from ``work/name.pt``.

    ``losses_at(step)`` gives one loss function per thread, each over its share of the batch.
    """
    opts = optimizers(model, lr)
    saved, start = work / f"{name}.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        start = state["step"]
        for opt, part in zip(opts, state["opts"], strict=True):
            opt.load_state_dict(part)
    mean = 0.0
    with progress() as bar, ThreadPoolExecutor() as pool:
        task = bar.add_task(name, total=steps, completed=start, note="")
        for step in range(start, steps):
            for opt in opts:
                opt.param_groups[0]["lr"] = opt.defaults["lr"] * rate(step, steps)
            loss = backward(list(model.parameters()), losses_at(step), pool)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            list(pool.map(lambda opt: opt.step(), opts))
            mean = loss if step == start else 0.95 * mean + 0.05 * loss
            bar.update(task, advance=1, note=f"loss {mean:.3f}")
            if (step + 1) % 25 == 0 or step + 1 == steps:
                print(f"{name} step {step + 1}/{steps} loss {mean:.3f}", file=sys.stderr)
                state = {"model": model.state_dict(), "step": step + 1,
                         "opts": [opt.state_dict() for opt in opts]}  # fmt: skip
                torch.save(state, saved.with_suffix(".tmp"))
                saved.with_suffix(".tmp").replace(saved)
