"""DISCO (arXiv:2405.04304): latencies with its classifier, and how well that predicts.

Latencies are counted on texts of the target, with draft steps that cost what table 1 of DSI
(arXiv:2405.14105) prints for the paper's pairs. They depend only on the two models, not on the
machine. Every claim is judged on texts that nothing was learned or tuned on; the small form takes
turns, so that each of its texts is kept apart once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from specexec_cli.errors import ConfigError
from specexec_cli.lab.bench.metrics import paired_difference
from specexec_cli.lab.bench.paper import DISCO_ROWS
from specexec_cli.lab.papers.disco import SETS_NOTE, Parts, sets
from specexec_cli.lab.papers.registry import Claim, Finding, Table, recipe

if TYPE_CHECKING:
    from specexec_cli.lab.papers.lab import Difference, Lab
    from specexec_cli.lab.training import Evaluation, Labels, Trial

# a draft step's time as a share of a target pass: the column "drafter latency" of table 1 of DSI,
# for the pairs that DISCO names, Starcoder-15B and Vicuna-13B
_COSTS = {"mbpp": 0.329, "humaneval": 0.323, "cnn-dailymail": 0.065, "alpaca": 0.074}
_SMALL_COSTS = (_COSTS["cnn-dailymail"], _COSTS["mbpp"])  # one of each pair
_TRAINED_TO: Mapping[Labels, str] = {"conformity": "1 - TV", "accepted": "accepted or rejected"}
_TRAINED_ON = {"humaneval": "mbpp"}  # dataset -> the other dataset it is trained on (section 4)
_FEWEST = 5  # texts, for which no fifth is empty


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

    texts_of = lab.once(sets)
    samples = {row.dataset: row.samples for row in DISCO_ROWS}
    found = {}
    for name, parts in texts_of.items():
        own = _TRAINED_ON.get(name, name)
        whole = own in samples and all(
            len(part) >= (count or 0)
            for part, count in zip(texts_of[own], samples[own], strict=True)
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


def _directions(found: Evaluation) -> dict[str, Difference]:
    """The paper's directions, each with the latency saved; that over the static length is last."""
    return {
        "the oracle is below DISCO": _saved(found, "oracle", "disco"),
        "DISCO is below plain decoding": _saved(found, "disco", "plain"),
        "DISCO is below the dynamic heuristic": _saved(found, "disco", "heuristic"),
        "DISCO is below the best static length": _saved(found, "disco", "static"),
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
        directions = _directions(found)
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
               SETS_NOTE],
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
               "is of the validation set", SETS_NOTE],
    )  # fmt: skip
