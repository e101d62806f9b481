"""DISCO (arXiv:2405.04304): the best length of drafts, by equation 1 and by an oracle.

disco_latency.py has the classifier that predicts it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from specexec_cli.lab.bench.paper import DISCO_ROWS
from specexec_cli.lab.papers.registry import Claim, Finding, Table, recipe

if TYPE_CHECKING:
    from specexec_cli.lab.papers.lab import Lab
    from specexec_cli.lab.training import Text

_FIGURE_2_COST = 0.05
_ACCEPTANCES = (0.6, 0.8, 0.9)  # figure 2 has three rates, which the paper does not name
_LENGTHS = range(1, 31)
_TOKENS, _SMALL_TOKENS = 128, 48
_SMALL_PROMPTS = 20
SETS_NOTE = (
    "the full form takes the paper's four datasets, in the parts of table 3; with fewer texts than "
    "that, and in the small form, five classifiers test each text once"
)

Parts = tuple[list["Text"], list["Text"], list["Text"]]  # for training, validation and tests


def sets(lab: Lab) -> dict[str, Parts]:
    """The texts of each dataset in three random parts, some of which may be empty."""
    from specexec_cli.lab.training import split

    tokens = lab.tokens(_TOKENS, _SMALL_TOKENS)
    if not lab.full:
        built_in = lab.dataset("demo", chat=False, small=_SMALL_PROMPTS)
        return {"demo": split(lab.texts(built_in, tokens), lab.seed)}
    parts = {}
    for row in DISCO_ROWS:
        train, validation, test = row.samples
        parts[row.dataset] = lab.parts(row.dataset, (train or 0, validation or 0, test))
    lab.session([part for three in parts.values() for part in three], tokens)
    found = {}
    for name, three in parts.items():
        first, second, third = (lab.texts(part, tokens) for part in three)
        found[name] = first, second, third
    return found


@recipe(
    "disco-figure-2",
    printed="equation 1: the improvement factor depends on acceptance and length, with a best "
    "length for each acceptance rate (c = 0.05)",
    models=False,
)
def figure_2(lab: Lab) -> Finding:
    """Plots the improvement factor over speculation lengths."""
    from specexec_cli.lab.bench.metrics import improvement_factor
    from specexec_cli.lab.papers.draw import curves

    lines = {}
    for rate in _ACCEPTANCES:
        factors = [improvement_factor(rate, length, _FIGURE_2_COST) for length in _LENGTHS]
        lines[f"acceptance {rate:g}"] = _LENGTHS, factors, ()
    best = [max(zip(y, x, strict=True)) for x, y, _ in lines.values()]
    rows = [[name, str(length), f"{factor:.2f}", f"{lines[name][1][0]:.2f}",
             f"{lines[name][1][-1]:.2f}"]
            for name, (factor, length) in zip(lines, best, strict=True)]  # fmt: skip
    lengths = [length for _, length in best]
    drawn = [_drawn_factor(rate, length, lab.seed)
             for rate, length in zip(_ACCEPTANCES, lengths, strict=True)]  # fmt: skip
    return Finding(
        tables=[Table("Improvement factor", ["", "best length", "there", "at 1", "at 30"], rows)],
        claims=[
            Claim("iterations drawn at random come to the equation's factors within 2 % "
                  f"({', '.join(f'{factor:.2f}' for factor in drawn)})",
                  all(abs(found / factor - 1) < 0.02
                      for found, (factor, _) in zip(drawn, best, strict=True))),
            Claim(f"the best length rises with the acceptance rate ({lengths})",
                  lengths == sorted(set(lengths))),
            Claim("the best length is neither the shortest nor the longest",
                  all(_LENGTHS[0] < length < _LENGTHS[-1] for length in lengths)),
        ],
        figures={"": lambda: curves("Improvement factor, c = 0.05", "speculation length",
                                    "over plain decoding", lines)},
    )  # fmt: skip


def _drawn_factor(acceptance: float, length: int, seed: int) -> float:
    """The improvement factor of simulated iterations with drafts that are accepted at random."""
    import numpy as np

    accepted = np.random.default_rng(seed).random((20_000, length)) < acceptance
    kept = np.minimum.accumulate(accepted, axis=1).sum(axis=1)
    return float((kept + 1).mean()) / (length * _FIGURE_2_COST + 1)


@recipe(
    "disco-figure-3",
    printed="one MBPP text: static 5 takes 38 target and 192 draft passes, the oracle 27 and 129; "
    "its lengths vary much",
)
def figure_3(lab: Lab) -> Finding:
    """The iterations of the longest text, with the oracle and with five draft tokens."""
    from specexec_cli.lab.papers.draw import bars
    from specexec_cli.lab.training import iterations, oracle_lengths

    texts = [text for part in next(iter(lab.once(sets).values())) for text in part]
    texts.sort(key=lambda text: -len(text.accepted))
    found = {
        "oracle": [oracle_lengths(text).tolist() for text in texts],
        "static 5": [[drafted for drafted, _ in iterations(text, lambda at: 5)] for text in texts],
    }
    counts = {
        name: (sum(map(len, lengths)), sum(map(sum, lengths))) for name, lengths in found.items()
    }
    rows = [
        [name, str(len(lengths[0])), str(sum(lengths[0])), *map(str, counts[name])]
        for name, lengths in found.items()
    ]
    groups = {
        name: (range(1, len(lengths[0]) + 1), lengths[0], ()) for name, lengths in found.items()
    }
    (passes, drafts), (static_passes, static_drafts) = counts["oracle"], counts["static 5"]
    header = ["", "one text's target passes", "draft passes", "all texts' target passes",
              "draft passes"]  # fmt: skip
    return Finding(
        tables=[Table(f"One text of {len(texts[0].accepted)} tokens, and all {len(texts)}",
                      header, rows)],
        claims=[
            Claim(f"the oracle takes fewer target passes ({passes} against {static_passes})",
                  passes < static_passes),
            Claim(f"the oracle takes fewer draft passes ({drafts} against {static_drafts})",
                  drafts < static_drafts),
        ],
        figures={"": lambda: bars("Speculation lengths of one text", "iteration", "draft tokens",
                                  groups)},
    )  # fmt: skip


@recipe(
    "disco-table-2",
    printed="oracle lengths, mean (deviation): MBPP 18.0 (46.2), HumanEval 14.7 (42.6), CNN-DM "
    "3.2 (4.0), Alpaca 2.4 (2.1); figures 4 to 6: high variance, whatever the iteration",
)
def table_2(lab: Lab) -> Finding:
    """Oracle lengths: mean, deviation, histogram, and means by the iteration's normalized index."""
    import numpy as np

    from specexec_cli.lab.papers.draw import bars
    from specexec_cli.lab.training import by_normalized_index, oracle_lengths

    rows, claims = [], []
    figures: dict[str, Callable[[], Any]] = {}
    for name, parts in lab.once(sets).items():
        texts = [text for part in parts for text in part]
        lengths = [oracle_lengths(text) for text in texts]
        every = np.concatenate(lengths)
        mean, deviation = float(every.mean()), float(every.std())
        index = np.concatenate([np.linspace(0, 1, len(one)) for one in lengths])
        told = float(np.corrcoef(index, every)[0, 1])
        rows.append([name, str(len(texts)), f"{mean:.1f} ({deviation:.1f})", f"{told:+.2f}"])
        claims += [
            Claim(f"lengths vary much: their deviation is most of their mean ({name}: "
                  f"{deviation:.1f} of {mean:.1f})", deviation > 0.5 * mean),
            Claim(f"the iteration's index has low predictive power ({name}: correlation "
                  f"{told:+.2f})", abs(told) < 0.5),
        ]  # fmt: skip
        sizes = range(int(every.max()) + 1)
        shares = [float((every == size).mean()) for size in sizes]
        buckets, means = by_normalized_index(lengths, 0.05)

        def histogram(name: str = name, x: Sequence[int] = sizes,
                      y: Sequence[float] = shares) -> object:  # fmt: skip
            return bars(f"Figure 5: {name}", "oracle length", "share", {name: (x, y, ())})

        def by_index(name: str = name, x: Sequence[float] = buckets,
                     y: Sequence[float] = means) -> object:  # fmt: skip
            return bars(f"Figures 4 and 6: {name}", "normalized index of the iteration",
                        "mean oracle length", {name: (x, y, ())})  # fmt: skip

        figures |= {f"{name}-histogram": histogram, f"{name}-index": by_index}
    header = ["prompts", "texts", "oracle length", "correlation with the index"]
    return Finding(
        tables=[Table("Oracle lengths", header, rows)], claims=claims, figures=figures,
        notes=["figure 6 has buckets of 0.0001; those drawn here are of 0.05", SETS_NOTE],
    )  # fmt: skip
