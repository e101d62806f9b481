"""`specexec measure`: measures a pair's latencies and acceptance rate for `specexec simulate`."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specexec_cli.cli import option_groups, options
from specexec_cli.cli.options import option
from specexec_cli.config import SamplingConfig
from specexec_cli.errors import ConfigError
from specexec_cli.lab.commands.bench_models import PROMPTS, Data, measured_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specexec_cli.lab.bench.datasets import Dataset
    from specexec_cli.lab.bench.measure import ModelTimes
    from specexec_cli.lab.bench.runner import BenchPrompt
    from specexec_cli.planning.request import Request


@option_groups.grouped
def measure(
    *,
    asked: option_groups.Measured,
    yes: options.Yes = False,
    dataset: Annotated[str, option(PROMPTS, "A name or a file, as in bench.")] = "demo",
    data: Data = Path("data"),
    prompts: Annotated[int, option(PROMPTS, "How many, drawn at random by --seed.")] = 50,
    timed_tokens: Annotated[int, typer.Option(help="Tokens of each text that are timed.")] = 20,
    match_tokens: Annotated[
        int, typer.Option(help="Tokens of each text that are compared, and its length.")
    ] = 256,
    sampling: Annotated[SamplingConfig, option_groups.Shown("temperature seed")],
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object, which `simulate dsi --measured` takes.")
    ] = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure latencies and acceptance rate of a pair, as DSI does.

    Time to first token, time per token, and matching tokens of both models. Texts are greedy unless
    asked, whatever the model's makers suggest.

    Each model decodes alone, the target first. Acceptance is 1 - 1 / (1 + n), n being the tokens up
    to the first at which the texts of target and draft model differ: as in the paper on DSI, whose
    simulations begin with these numbers.
    """
    from specexec_cli.lab.bench.datasets import load_dataset
    from specexec_cli.lab.bench.environment import environment
    from specexec_cli.lab.bench.measure import acceptance_rate, mean_matches

    if prompts < 1:
        raise ConfigError(f"--prompts must be 1 or more, not {prompts}")
    if not 2 <= timed_tokens <= match_tokens:
        raise ConfigError(
            f"--timed-tokens must be between 2 and --match-tokens ({match_tokens}), "
            f"not {timed_tokens}"
        )
    one = load_dataset(dataset, data_folder=data, count=prompts, seed=sampling.seed)
    lengths = timed_tokens, match_tokens
    target, draft, settings, names = _both(asked, yes, one, sampling, lengths, quiet)
    matches = mean_matches(target, draft)
    if not as_json:
        print(_told(one.name, target, draft, names, matches))
        return
    told = {"prompts": len(target.texts), "timed_tokens": timed_tokens,
            "match_tokens": match_tokens, "temperature": sampling.temperature,
            "seed": sampling.seed}  # fmt: skip
    print(json.dumps({"schema": 1, "target": _times(names[0], target),
                      "draft": _times(names[1], draft),
                      "acceptance": {"mean_matches": matches, "rate": acceptance_rate(matches)},
                      "dataset": one.name, **told, "settings": settings,
                      "environment": environment()}))  # fmt: skip


def _told(
    dataset: str, target: ModelTimes, draft: ModelTimes, names: tuple[str, str], matches: float
) -> str:
    """Text: a table of both models' times, and below it their agreement."""
    from specexec_cli.lab.bench.measure import acceptance_rate
    from specexec_cli.lab.bench.tables import aligned

    rows = [
        [name, f"{times.ttft_s * 1e3:.2f}", f"{times.tpot_s * 1e3:.2f}"]
        for name, times in zip(names, (target, draft), strict=True)
    ]
    agreement = (
        f"acceptance rate {acceptance_rate(matches):.3f}: {matches:.2f} tokens match on average; "
        f"{len(target.texts)} prompts of {dataset}"
    )
    return "\n".join([*aligned(["model", "TTFT ms", "TPOT ms"], rows), "", agreement])


def _times(name: str, times: ModelTimes) -> dict[str, Any]:
    return {"name": name, "ttft_ms": times.ttft_s * 1e3, "tpot_ms": times.tpot_s * 1e3}


def _both(
    asked: Request,
    yes: bool,
    dataset: Dataset,
    sampling: SamplingConfig,
    lengths: tuple[int, int],
    quiet: bool,
) -> tuple[ModelTimes, ModelTimes, dict[str, str], tuple[str, str]]:
    """Times the target, then the draft model; also returns the target's settings and both names."""
    from specexec_cli.cli.fetching import fetch_first
    from specexec_cli.cli.opening import opened
    from specexec_cli.cli.render import CountBar
    from specexec_cli.lab.bench.measure import measure_model
    from specexec_cli.lab.bench.runner import encode_prompts
    from specexec_cli.planning.chosen_models import choose_pair, registry_of

    request = measured_request(asked, [dataset], lengths[1])
    pair = choose_pair(registry_of(request), request)
    if pair.draft is None or pair.of_target:
        raise ConfigError("measure compares a target with a draft model of its own: give `draft`")
    fetch_first(request, yes=yes, quiet=quiet)
    names = pair.target.name, pair.draft.name
    alone = replace(request, draft=None, method="autoregressive")
    found: list[ModelTimes] = []
    encoded: Sequence[BenchPrompt] = ()
    settings: dict[str, str] = {}
    with CountBar("texts", 2 * len(dataset.prompts), shown=not quiet) as bar:
        for name in names:
            with opened(replace(alone, model=name), quiet=quiet) as session:
                if not encoded:
                    encoded, _ = encode_prompts(session, dataset, lengths[1])
                    settings = dict(session.settings)
                done = partial(bar.advance, name)
                found.append(measure_model(session, encoded, sampling, *lengths, done))
    return found[0], found[1], settings, names
