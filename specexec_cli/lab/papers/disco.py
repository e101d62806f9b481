"""DISCO (arXiv:2405.04304): the best length of drafts, and a classifier that predicts it.

Latencies are counted on texts of the target, with draft steps that cost what table 1 of DSI
(arXiv:2405.14105) prints for the paper's pairs. They depend only on the two models, not on the
machine. Every claim is judged on texts that nothing was learned or tuned on; the small form takes
turns, so that each of its texts is kept apart once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from specexec_cli.errors import ConfigError
from specexec_cli.lab.bench.metrics import paired_difference
from specexec_cli.lab.bench.paper import DISCO_ROWS
from specexec_cli.lab.papers.registry import Claim, Finding, Table, recipe

if TYPE_CHECKING:
    from specexec_cli.lab.papers.lab import Difference, Lab
    from specexec_cli.lab.training import Evaluation, Labels, Text, Trial

# a draft step's time as a share of a target pass: the column "drafter latency" of table 1 of DSI,
# for the pairs that DISCO names, Starcoder-15B and Vicuna-13B
_COSTS = {"mbpp": 0.329, "humaneval": 0.323, "cnn-dailymail": 0.065, "alpaca": 0.074}
_SMALL_COSTS = (_COSTS["cnn-dailymail"], _COSTS["mbpp"])  # one of each pair
_TRAINED_TO: Mapping[Labels, str] = {"conformity": "1 - TV", "accepted": "accepted or rejected"}
_FIGURE_2_COST = 0.05
_ACCEPTANCES = (0.6, 0.8, 0.9)  # figure 2 has three rates, which the paper does not name
_LENGTHS = range(1, 31)
_TOKENS, _SMALL_TOKENS = 128, 48
_SMALL_PROMPTS = 20
_TRAINED_ON = {"humaneval": "mbpp"}  # dataset -> the other dataset it is trained on (section 4)
_SETS_NOTE = (
    "the full form takes the paper's four datasets, in the parts of table 3; with fewer texts than "
    "that, and in the small form, five classifiers test each text once"
)
_FEWEST = 5  # texts, for which no fifth is empty

Parts = tuple[list["Text"], list["Text"], list["Text"]]  # for training, validation and tests


def _sets(lab: Lab) -> dict[str, Parts]:
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
            Claim("and is neither the shortest nor the longest",
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

    texts = [text for part in next(iter(lab.once(_sets).values())) for text in part]
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
            Claim(f"and fewer draft passes ({drafts} against {static_drafts})",
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
    for name, parts in lab.once(_sets).items():
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
        notes=["figure 6 has buckets of 0.0001; those drawn here are of 0.05", _SETS_NOTE],
    )  # fmt: skip


class Study(NamedTuple):
    """A classifier for one dataset, draft cost and kind of labels."""

    name: str
    cost: float
    labels: Labels

    def __str__(self) -> str:
        return f"{self.name}, draft cost {self.cost:.3f}, trained on {_TRAINED_TO[self.labels]}"


def _divided(lab: Lab) -> dict[str, list[Parts]]:
    """The divisions of each dataset into parts for training, validation and tests.

    There is one, the paper's, where a dataset has as many texts as that takes. Otherwise there are
    five, which test each text once.
    """
    from specexec_cli.lab.training import folds

    sets = lab.once(_sets)
    samples = {row.dataset: row.samples for row in DISCO_ROWS} if lab.full else {}
    found = {}
    for name, parts in sets.items():
        own = _TRAINED_ON.get(name, name)
        whole = own in samples and all(
            len(part) >= (count or 0) for part, count in zip(sets[own], samples[own], strict=True)
        )
        texts = [text for part in parts for text in part]
        if own == name and len(texts) < _FEWEST:
            raise ConfigError(
                f"{len(texts)} prompts of {name} are too few to train, to tune and to test on: "
                f"{_FEWEST} are needed"
            )
        found[name] = [parts] if whole else folds(texts, lab.seed)
    return found


def _evaluated(lab: Lab) -> dict[Study, Evaluation]:
    """Trains and tunes classifiers, and evaluates them on texts that were kept apart.

    Raises:
        ConfigError: there are too few prompts for three parts.
    """
    from specexec_cli.lab import training

    divided = _divided(lab)
    found = {}
    for labels in _TRAINED_TO:
        trained = {
            name: [training.train(*training.examples(train, labels)) for train, _, _ in parts]
            for name, parts in divided.items()
            if name not in _TRAINED_ON
        }
        for name, parts in divided.items():
            own = _TRAINED_ON.get(name, name)
            for cost in (_COSTS[name],) if lab.full else _SMALL_COSTS:
                costs = training.Costs(target_s=1.0, draft_s=cost)
                trials: list[Trial] = []
                for tensors, learned_on, (_, _, test) in zip(
                    trained[own], divided[own], parts, strict=True
                ):
                    validation = learned_on[1]
                    trials.append(
                        training.Trial(
                            training.tune(tensors, validation, costs),
                            training.best_static(validation, costs),
                            test,
                        )
                    )
                study = Study(name, costs.draft_s, labels)
                found[study] = training.evaluate_trials(trials, costs)
    return found


def _saved(found: Evaluation, policy: str, than: str) -> Difference:
    """The share of a policy's latency that another saves, and its standard error.

    The error is that of the difference over texts as pairs, divided by the latency. The error of
    that latency is left out, because it is negligible if the gain is small.
    """
    from specexec_cli.lab.papers.lab import Difference

    more, error = paired_difference(found.by_text[than], found.by_text[policy])
    seconds = sum(each for each, _ in found.by_text[than])
    latency = seconds / sum(tokens for _, tokens in found.by_text[than])
    return Difference(more / latency, error / latency)


def _percent(saved: Difference) -> str:
    return f"{saved.more:+.1%} ±{saved.error:.1%}"


def _directions(study: Study, found: Evaluation) -> dict[str, Difference]:
    """The paper's directions, each with the latency saved; DISCO's last."""
    plain = [(found.plain_s * tokens, tokens) for _, tokens in found.by_text["disco"]]
    beside = replace(found, by_text={**found.by_text, "plain": plain})
    return {
        "the oracle is below DISCO": _saved(beside, "oracle", "disco"),
        "DISCO is below plain decoding": _saved(beside, "disco", "plain"),
        "DISCO is below the dynamic heuristic": _saved(beside, "disco", "heuristic"),
        "DISCO is below the best static length": _saved(beside, "disco", "static"),
    }


def _claimed(study: Study) -> bool:
    """Whether the small form claims directions of a study, besides listing them.

    Of its directions, that DISCO is below the best static length is never claimed: so few texts do
    not show a gain of a few per cent.
    """
    return study.cost == _SMALL_COSTS[-1]


def _told_apart(found: Evaluation) -> Difference:
    """How much more acceptance the classifier expects of accepted tokens than of others."""
    from specexec_cli.lab.papers.lab import Difference

    return Difference(*paired_difference(*found.expected))


def _knows(study: Study, found: Evaluation) -> Claim:
    """A claim that fails where features or labels say nothing of acceptance."""
    apart = _told_apart(found)
    return Claim(f"the classifier expects more acceptance of tokens that are accepted, on texts "
                 f"kept apart ({study}: {apart})", apart.shown)  # fmt: skip


@recipe(
    "disco-table-1",
    printed="latency: oracle below DISCO below the best static length below plain decoding; DISCO "
    "saves 10.3 % over the static length and 31.4 % over the dynamic heuristic (table 5)",
)
def table_1(lab: Lab) -> Finding:
    """Latencies of all policies, in target passes per token, on texts kept apart."""
    rows, claims, notes = [], [], []
    for study, found in lab.once(_evaluated).items():
        directions = _directions(study, found)
        *_, over_heuristic, over_static = directions.values()
        lengths = ", ".join(map(str, sorted({*found.static_lengths})))
        rows.append(
            [study.name, f"{study.cost:.3f}", _TRAINED_TO[study.labels],
             f"{found.heuristic_s:.3f}", f"{found.static_5_s:.3f}",
             f"{found.static_s:.3f} ({lengths})", f"{found.disco_s:.3f}", f"{found.oracle_s:.3f}",
             _percent(over_static), _percent(over_heuristic), str(len(found.by_text["disco"]))]
        )  # fmt: skip
        claims.append(_knows(study, found))
        for text, saved in directions.items():
            said = f"{text} ({study}: {_percent(saved)})"
            if lab.full or (_claimed(study) and saved is not over_static):
                claims.append(Claim(said, saved.shown))
            elif not saved.shown:
                notes.append(f"not shown: {said}")
    header = ["prompts", "draft cost", "trained on", "dynHeur", "static 5", "static best", "DISCO",
              "oracle", "DISCO saves over static", "over dynHeur", "texts"]  # fmt: skip
    return Finding(
        tables=[Table("Time per token on texts kept apart, in target passes", header, rows)],
        claims=claims,
        notes=[*notes, "a draft step costs what table 1 of DSI prints for the paper's pairs: 0.323 "
               "and 0.329 with Starcoder, 0.065 and 0.074 with Vicuna-13B",
               "a direction is claimed where it is more than two of its standard errors",
               _SETS_NOTE],
    )  # fmt: skip


@recipe(
    "disco-table-4",
    printed="F1 of the classifier: static .85 .76 .68, DISCO .95 .88 .77",
)
def table_4(lab: Lab) -> Finding:
    """F1 on texts kept apart, beside the F1 of accepting every token; tokens count once."""
    rows, claims = [], []
    for study, found in lab.once(_evaluated).items():
        rows.append([study.name, f"{study.cost:.3f}", _TRAINED_TO[study.labels],
                     f"{found.static_f1:.2f}", f"{found.disco_f1:.2f}", f"{found.always_f1:.2f}",
                     str(_told_apart(found))])  # fmt: skip
        claims.append(_knows(study, found))
        if lab.full or _claimed(study):
            claims.append(
                Claim(f"DISCO's F1 is above the static length's ({study}: {found.disco_f1:.2f} "
                      f"against {found.static_f1:.2f})", found.disco_f1 > found.static_f1)
            )  # fmt: skip
    header = ["prompts", "draft cost", "trained on", "static", "DISCO", "always yes",
              "expected of accepted tokens, above the others"]  # fmt: skip
    return Finding(
        tables=[Table("F1 on texts kept apart", header, rows)], claims=claims,
        notes=["the paper does not print what saying yes to every token scores", "the paper's F1 "
               "is of the validation set", _SETS_NOTE],
    )  # fmt: skip
