"""`specexec train-policy`: trains the classifier of --policy disco for a pair."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specexec_cli.cli import option_groups, options
from specexec_cli.cli.options import option
from specexec_cli.config import ADVANCED, SamplingConfig
from specexec_cli.errors import INTERRUPTED_EXIT_CODE, ConfigError
from specexec_cli.lab.bench.parts import PARTS, Counts
from specexec_cli.lab.commands.bench_models import PROMPTS, Data

if TYPE_CHECKING:
    from specexec_cli.drafting.classifier import Classifier
    from specexec_cli.lab.bench.datasets import Dataset
    from specexec_cli.lab.bench.runner import BenchPrompt
    from specexec_cli.lab.training import Costs, Evaluation, Text
    from specexec_cli.session import TextSession

_FEWEST = 5  # fewest texts of a dataset: three for training, one for tuning, one for tests


TargetMs = Annotated[float | None, typer.Option(help="Time of a target pass. Default: measured.")]
DraftMs = Annotated[float | None, typer.Option(help="Time of a draft step. Default: measured.")]


@option_groups.grouped
def train_policy(
    *,
    asked: option_groups.Measured,
    yes: options.Yes = False,
    dataset: Annotated[
        str, option(PROMPTS, "To train on: names or files as in bench, a comma list.")
    ] = "demo",
    transfer: Annotated[str, option(PROMPTS, "To test on without training, likewise.")] = "",
    data: Data = Path("data"),
    prompts: Annotated[int, option(PROMPTS, "Random prompts per dataset.")] = 40,
    splits: Annotated[
        str,
        option(
            ADVANCED,
            "Prompts to train, tune and test on, as 500,80,80 in the paper. Default: "
            "three fifths, one and one of --prompts.",
        ),
    ] = "",
    max_tokens: option_groups.MaxTokens = 128,
    sampling: Annotated[SamplingConfig, option_groups.Shown("temperature seed")],
    target_ms: TargetMs = None,
    draft_ms: DraftMs = None,
    output: Annotated[str, typer.Option("--output", "-o", help="table, md or json.")] = "table",
    quiet: options.Quiet = False,
) -> None:
    """Train the classifier of --policy disco for a pair, and report it beside fixed lengths.

    Texts are greedy unless asked, whatever the model's makers suggest. They are kept as they are
    written: stopped by Ctrl-C, the same command goes on.
    """
    from specexec_cli.lab.commands.bench_models import open_models

    options.one_of(output, "--output", ("table", "md", "json"))
    _check(prompts, target_ms, draft_ms)
    sets = _sets(
        dataset, transfer, data, _counts(splits, prompts), sampling.seed, at_most=not splits
    )
    trained = [name for name, parts in sets.items() if parts["train"].prompts]
    with open_models(
        asked, [part for parts in sets.values() for part in parts.values()], max_tokens, yes, quiet
    ) as session:
        encoded = _encoded(session, sets, max_tokens)
        try:
            texts = _collect(session, encoded, sampling, max_tokens, quiet)
            costs = _costs(session, encoded[trained[0]]["train"][0], target_ms, draft_ms)
            classifier, evaluations = _train(texts, costs, quiet)
        except KeyboardInterrupt:
            print("" if quiet else "stopped; the same command goes on\n", end="", file=sys.stderr)
            raise typer.Exit(INTERRUPTED_EXIT_CODE) from None
        _save(session, classifier, trained, sampling.temperature, costs, evaluations)
        print(_report(session.pair_folder, classifier, trained, costs, evaluations, output))


def _check(prompts: int, target_ms: float | None, draft_ms: float | None) -> None:
    if prompts < _FEWEST:
        raise ConfigError(f"--prompts must be {_FEWEST} or more, not {prompts}")
    for flag, value in (("--target-ms", target_ms), ("--draft-ms", draft_ms)):
        if value is not None and not 0.0 < value < 1e9:
            raise ConfigError(f"{flag} must be above 0, not {value:g}")


def _encoded(
    session: TextSession, sets: dict[str, dict[str, Dataset]], max_tokens: int
) -> dict[str, dict[str, list[BenchPrompt]]]:
    """The prompts of each part of each dataset as tokens."""
    from specexec_cli.lab.bench.runner import encode_prompts

    return {
        name: {
            part: encode_prompts(session, one, max_tokens)[0] if one.prompts else []
            for part, one in parts.items()
        }
        for name, parts in sets.items()
    }


def _save(
    session: TextSession,
    classifier: Classifier,
    trained: list[str],
    temperature: float,
    costs: Costs,
    evaluations: dict[str, Evaluation],
) -> None:
    """Saves the classifier, and a note of its training data, in the pair's folder."""
    pair = session.pair
    assert pair.draft is not None
    classifier.save(
        session.pair_folder,
        {"target": pair.target.repo, "draft": pair.draft.repo, "datasets": trained,
         "temperature": temperature, "costs": asdict(costs),
         "f1": {name: found.disco_f1 for name, found in evaluations.items()}},
    )  # fmt: skip


def _counts(splits: str, prompts: int) -> Counts:
    """The numbers of prompts for training, validation and tests."""
    from specexec_cli.lab.commands.bench_grid import numbers

    if not splits:
        fifth = prompts // 5
        return prompts - 2 * fifth, fifth, fifth
    found = numbers(splits, "--splits", int)
    if len(found) != 3 or min(found) < 1:
        raise ConfigError(f"--splits takes three numbers of 1 or more, as 500,80,80, not {splits}")
    return found[0], found[1], found[2]


def _sets(
    dataset: str, transfer: str, data: Path, counts: Counts, seed: int, *, at_most: bool
) -> dict[str, dict[str, Dataset]]:
    """The parts of each dataset for training, and the test part of each dataset for transfer.

    Raises:
        ConfigError: a dataset has too few prompts.
    """
    from specexec_cli.lab.bench.parts import load_parts
    from specexec_cli.lab.commands.bench_grid import words

    named = words(dataset, "--dataset")
    others = words(transfer, "--transfer") if transfer else []
    sets: dict[str, dict[str, Dataset]] = {}
    for name in (*named, *others):
        wanted = counts if name in named else (0, 0, counts[2] if not at_most else sum(counts))
        parts = load_parts(name, data_folder=data, counts=wanted, seed=seed, at_most=at_most)
        found = sum(len(part.prompts) for part in parts.values())
        if not all(parts[part].prompts for part, count in zip(PARTS, wanted, strict=True) if count):
            raise ConfigError(f"dataset {name} has {found} prompts, and {_FEWEST} are needed")
        sets[parts["test"].name] = parts
    return sets


def _collect(
    session: TextSession,
    encoded: dict[str, dict[str, list[BenchPrompt]]],
    sampling: SamplingConfig,
    max_tokens: int,
    quiet: bool,
) -> dict[str, dict[str, list[Text]]]:
    """Collects the texts of each part of each dataset."""
    from specexec_cli.cli.render import CountBar
    from specexec_cli.lab.bench.policy_labels import LabelsFile, collect

    labels = LabelsFile(session.pair_folder / "labels.jsonl")
    found: dict[str, dict[str, list[Text]]] = {}
    total = sum(len(prompts) for parts in encoded.values() for prompts in parts.values())
    with CountBar("texts", total, shown=not quiet) as bar:
        for name, parts in encoded.items():
            found[name] = {part: [] for part in parts}
            for part, prompts in parts.items():
                for text in collect(session, prompts, sampling, max_tokens, labels):
                    found[name][part].append(text)
                    bar.advance(name)
    return found


def _costs(
    session: TextSession, prompt: BenchPrompt, target_ms: float | None, draft_ms: float | None
) -> Costs:
    from specexec_cli.lab.bench.policy_labels import measure_costs
    from specexec_cli.lab.training import Costs

    if target_ms is not None and draft_ms is not None:
        return Costs(target_ms / 1e3, draft_ms / 1e3)
    measured = measure_costs(session, prompt)
    return Costs(
        measured.target_s if target_ms is None else target_ms / 1e3,
        measured.draft_s if draft_ms is None else draft_ms / 1e3,
    )


def _train(
    texts: dict[str, dict[str, list[Text]]], costs: Costs, quiet: bool
) -> tuple[Classifier, dict[str, Evaluation]]:
    """Trains, tunes and tests a classifier on the training, validation and test parts."""
    from specexec_cli.cli.render import CountBar
    from specexec_cli.lab import training

    train, validation = (
        [text for parts in texts.values() for text in parts[part]] for part in PARTS[:2]
    )
    features, labels = training.examples(train)
    with CountBar("training", training.STEPS, shown=not quiet) as bar:
        tensors = training.train(features, labels, lambda: bar.advance(""))
    classifier = training.tune(tensors, validation, costs)
    static = training.best_static(validation, costs)
    return classifier, {
        name: training.evaluate(classifier, static, parts["test"], costs)
        for name, parts in texts.items()
    }


def _report(
    folder: Path,
    classifier: Classifier,
    trained: list[str],
    costs: Costs,
    evaluations: dict[str, Evaluation],
    output: str,
) -> str:
    from specexec_cli.lab.bench.tables import aligned, markdown

    if output == "json":
        return json.dumps(
            {"schema": 1, "folder": str(folder), "threshold": classifier.threshold,
             "max_length": classifier.max_length, "costs": asdict(costs), "trained_on": trained,
             "evaluations": {name: asdict(found) for name, found in evaluations.items()}}
        )  # fmt: skip
    header = ["data", "trained", "plain ms", "heuristic ms", "static 5 ms", "static", "ms",
              "disco ms", "gain", "oracle ms",
              "F1 static", "F1 disco", "F1 always", "oracle length"]  # fmt: skip
    rows = [
        [name, "yes" if name in trained else "no", f"{found.plain_s * 1e3:.1f}",
         f"{found.heuristic_s * 1e3:.2f}", f"{found.static_5_s * 1e3:.2f}",
         ", ".join(map(str, found.static_lengths)), f"{found.static_s * 1e3:.2f}",
         f"{found.disco_s * 1e3:.2f}",
         f"{found.gain:+.1%}", f"{found.oracle_s * 1e3:.2f}",
         f"{found.static_f1:.3f}", f"{found.disco_f1:.3f}", f"{found.always_f1:.3f}",
         f"{found.oracle_length:.1f} ({found.oracle_deviation:.1f})"]
        for name, found in evaluations.items()
    ]  # fmt: skip
    lines = markdown(header, rows) if output == "md" else aligned(header, rows)
    notes = [
        f"ms: per token, counted on texts that were kept apart, at {costs.target_s * 1e3:.2f} ms a "
        f"target pass and {costs.draft_s * 1e3:.2f} ms a draft step; static: the best fixed length",
        "F1: of whether a drafted token is accepted, each token once; always: of saying yes to all",
        "oracle: drafts up to the first wrong token; its length: accepted tokens of an iteration, "
        "mean (deviation); gain: latency saved, a share of the static length's",
        f"drafting ends below {classifier.threshold:.2f}, or after {classifier.max_length} tokens; "
        f"kept in {folder}",
    ]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)])
