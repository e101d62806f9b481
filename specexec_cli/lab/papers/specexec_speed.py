"""SpecExec (arXiv:2406.02532): speeds that follow from tokens per pass and a pass's time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specexec_cli.config import TreeConfig
from specexec_cli.lab.papers.registry import Claim, Finding, Table, recipe
from specexec_cli.lab.papers.specexec_rates import AVERAGES, PAPER, SPECINFER, measured

if TYPE_CHECKING:
    from specexec_cli.lab.papers.lab import Lab, Rate

# Pass times of Llama 2 70B in 16 bits, streamed over PCIe 4.0 x16 to an A100, and of the 7B draft
# model there: bytes over bytes per second, and 2 operations per weight and row at half of the GPU's
# 312 TFLOP/s.
_TARGET_BYTES, _LINK, _MEMORY, _DEVICE = 140e9, 25e9, 2e12, 80e9
_ROW_S, _DRAFT_S = 2 * 70e9 / 156e12, 0.02


@recipe(
    "specexec-figure-7",
    printed="figures 1 and 7 (right): an offloaded pass takes hundreds of tokens in the time of "
    "one; the fastest budget is 128-512 for SpecInfer and 1024-2048 for SpecExec",
)
def figure_7(lab: Lab) -> Finding:
    """Tokens per pass as measured here, divided by pass times from that machine's rates."""
    from specexec_cli.lab.papers.draw import curves
    from specexec_cli.lab.simulate.offload import Scenario

    machine = Scenario(
        target_bytes=_TARGET_BYTES, link_bytes_per_s=_LINK, memory_bytes_per_s=_MEMORY,
        device_bytes=_DEVICE, devices=1, draft_s=_DRAFT_S, acceptance=0.8, row_s=_ROW_S,
    )  # fmt: skip
    sizes = [2**power for power in range(14)]
    passes = [machine.streamed_pass_s(rows) for rows in sizes]
    (trees,) = measured(lab, ["mt-bench"], (0.6,)).values()
    lines: dict[str, Any] = {}
    rows, best = [], {}
    for label in (PAPER, SPECINFER):
        speeds: dict[int, tuple[float, TreeConfig, Rate]] = {}  # of each budget the fastest shape
        for (each, shape), one in trees.items():
            seconds = machine.streamed_pass_s(shape.budget + 1) + shape.max_depth * _DRAFT_S
            known = speeds.get(shape.budget)
            if each == label and (known is None or one.micro / seconds > known[0]):
                speeds[shape.budget] = one.micro / seconds, shape, one
        lines[label] = (
            sorted(speeds), [speeds[budget][0] for budget in sorted(speeds)],
            [speeds[n][0] * speeds[n][2].error / speeds[n][2].micro for n in sorted(speeds)],
        )  # fmt: skip
        best[label] = max(speeds, key=lambda budget: speeds[budget][0])
        rows += [
            [label, str(budget), str(shape.max_depth), str(one), f"{speed:.3f}"]
            for budget, (speed, shape, one) in sorted(speeds.items())
        ]
    return Finding(
        tables=[
            Table("Seconds of a pass, reckoned", ["rows", "s"],
                  [[str(n), f"{s:.2f}"] for n, s in zip(sizes, passes, strict=True)]),
            Table("Tokens per second that follow from the micro rates",
                  ["method", "budget", "depth", "tok/pass", "tok/s"], rows),
        ],
        claims=[
            Claim(f"SpecExec's fastest budget is no smaller than SpecInfer's ({best[PAPER]} and "
                  f"{best[SPECINFER]})", best[PAPER] >= best[SPECINFER]),
        ],
        notes=["pass times follow from rates of an A100 with PCIe 4.0 and are not measured: that "
               "hundreds of rows take the time of one is their premise and no finding", AVERAGES],
        figures={
            "passes": lambda: curves("A streamed pass of a 70B target", "rows", "seconds",
                                     {"max(link, arithmetic)": (sizes, passes, ())},
                                     doubling=True),
            "speed": lambda: curves("Tokens per second that follow", "budget", "tok/s", lines,
                                    doubling=True),
        },
    )  # fmt: skip
