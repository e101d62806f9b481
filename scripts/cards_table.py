"""Writes README's table of cards: what `specexec models recommend` says for each, here and now.

    python scripts/cards_table.py            writes it anew
    python scripts/cards_table.py --check    fails where the table says something else

Cards are taken by their datasheets, so that the table is the same on every machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from specexec_cli.planning.alternatives import Fit, fits, recommended
from specexec_cli.planning.machine import ASSUMED, described_site
from specexec_cli.planning.machine_rates import card_named
from specexec_cli.planning.speed import figure

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- cards -->\n", "<!-- end of cards -->\n"
CARDS = ("RTX 4060", "RTX 3060", "RTX 4060 Ti", "RTX 4090")
RAM_GB = (32, 64)
HEADER = (
    "| GPU, RAM | chat | tok/s | llama.cpp | code | tok/s | llama.cpp | GB to fetch |\n"
    "|---|---|---:|---:|---|---:|---:|---:|\n"
)


def rows() -> Iterator[str]:
    """The best pair for chat and for code by card and RAM, and a faster one with the most RAM."""
    for name in CARDS:
        card = card_named(name)
        assert card is not None, name
        for ram_gb in RAM_GB:
            site = described_site(
                ram_bytes=ram_gb * 10**9, ssd_bytes_per_s=ASSUMED["ssd"],
                memory_bytes_per_s=ASSUMED["CPU memory"], card=card,
            )  # fmt: skip
            able = fits(replace(site, flops={}, layers={}), None)  # of no CPU, so not of this one
            found = [recommended(able, task) for task in ("chat", "code")]
            where = f"{name} ({card.memory_gb} GB), {ram_gb} GB"
            yield _row(where, [pairs[0] for pairs in found])
        faster = [max(pairs, key=_speed) for pairs in found]
        if any(fit is not pairs[0] for fit, pairs in zip(faster, found, strict=True)):
            yield _row(f"{where}, faster", faster)


def _speed(fit: Fit) -> float:
    assert fit.verdict.speed is not None, "only what fits is recommended"
    return fit.verdict.speed.typical


def _row(where: str, pairs: list[Fit]) -> str:
    cells, fetched = [where], {}
    for fit in pairs:
        verdict, speed = fit.verdict, fit.verdict.speed
        assert speed is not None, "only what fits is recommended"
        assert verdict.llama_cpp_tokens_per_s is not None, "it is no demo"
        cells += [f"`{fit.pair.name}`", f"{figure(speed.low)} to {figure(speed.high)}",
                  figure(verdict.llama_cpp_tokens_per_s)]  # fmt: skip
        fetched[f"{(verdict.fetch_bytes or 0) / 1e9:.1f}"] = None
    return f"| {' | '.join([*cells, ', '.join(fetched)])} |\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if it is old")
    args = parser.parse_args(argv)
    text = README.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, behind = rest.partition(END)
    new = "".join([before, BEGIN, HEADER, *rows(), END, behind])
    if args.check:
        if new != text:
            print("README's table of cards is old: python scripts/cards_table.py", file=sys.stderr)
        return int(new != text)
    README.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
