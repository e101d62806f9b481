"""Collects labels for --policy disco: a draft model's predictions along texts of the target."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from specexec_cli.config import GenerationConfig, SamplingConfig, TreeConfig
from specexec_cli.drafting.scoring import TOP, DraftScorer, signals
from specexec_cli.errors import ConfigError
from specexec_cli.guarded import parse_json
from specexec_cli.lab.bench.runner import BenchPrompt
from specexec_cli.lab.training import Costs, Text
from specexec_cli.sampling import Sampler

if TYPE_CHECKING:
    from torch import Tensor

    from specexec_cli.drafting.search import Floats
    from specexec_cli.session import TextSession

_DIGITS = 6  # decimals kept of signals, so that a text read from the file equals the collected one


class LabelsFile:
    """The file of labels, one line per text. Texts in it are not collected again.

    A line that a crash has cut off is dropped.

    Raises:
        ConfigError: a line of the file is not a label.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._texts: dict[str, Text] = {}
        if path.exists():
            whole = path.read_bytes().rpartition(b"\n")[0]
            os.truncate(path, len(whole) + 1 if whole else 0)
            for number, line in enumerate(whole.decode("utf-8", "replace").splitlines(), 1):
                try:
                    record = parse_json(line)
                    text = Text(np.array(record["signals"], dtype=np.float64).reshape(-1, TOP + 1),
                                np.array(record["accepted"], dtype=bool),
                                np.array(record["conformity"], dtype=np.float64))  # fmt: skip
                    self._texts[record["key"]] = text
                except (ValueError, KeyError, TypeError) as error:
                    raise ConfigError(
                        f"{path}, line {number}: not a label; delete the file to collect all again"
                    ) from error

    def __contains__(self, key: str) -> bool:
        return key in self._texts

    def __getitem__(self, key: str) -> Text:
        return self._texts[key]

    def add(self, key: str, text: Text) -> None:
        """Writes a text at once, so that an interrupt only loses the text under way."""
        record = {"key": key, "signals": text.signals.tolist(),
                  "accepted": text.accepted.tolist(),
                  "conformity": text.conformity.tolist()}  # fmt: skip
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self._texts[key] = text


def collect(
    session: TextSession,
    prompts: Sequence[BenchPrompt],
    sampling: SamplingConfig,
    max_tokens: int,
    labels: LabelsFile,
) -> Iterator[Text]:
    """Collects one text for each prompt, or takes it from the file if it is there."""
    for prompt in prompts:
        settings: list[Any] = [prompt.tokens, repr(sampling), max_tokens]
        key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
        if key not in labels:
            labels.add(key, _text(session, prompt, sampling, max_tokens))
        yield labels[key]


def _text(
    session: TextSession, prompt: BenchPrompt, sampling: SamplingConfig, max_tokens: int
) -> Text:
    generation = GenerationConfig(max_tokens=max_tokens)
    list(session.generate(prompt.tokens, sampling=sampling, generation=generation))
    tokens, first = session.context, len(prompt.tokens)
    target_logits, logits = session.score(tokens, first)
    logits = logits[:, : session.vocab_size]
    scorer = DraftScorer(Sampler(sampling), "noise")
    utilities = scorer.utilities(logits, range(first, len(tokens)), prompt.tokens)
    accepted = utilities.argmax(-1).cpu().numpy() == np.array(tokens[first:])
    conformity = np.round(conformities(target_logits, logits), _DIGITS)
    return Text(np.round(signals(utilities), _DIGITS), accepted, conformity)


def conformities(target_logits: Tensor, draft_logits: Tensor) -> Floats:
    """1 - TV of two models' distributions over the vocabulary, row by row.

    TV is half the sum of |draft - target| (DISCO, arXiv:2405.04304, section 4), so 1 - TV is the
    sum over tokens of the smaller probability. Tokens that the draft model lacks have draft
    probability 0.

    Args:
        target_logits, draft_logits: (rows, vocab); the draft model's vocabulary may be smaller.
    Returns:
        (rows,) between 0 and 1.
    """
    target, draft = target_logits.float().softmax(-1), draft_logits.float().softmax(-1)
    shared = target[:, : draft.shape[-1]].minimum(draft).sum(-1)
    return np.asarray(shared.clamp(max=1.0).double().cpu().numpy())


def measure_costs(session: TextSession, prompt: BenchPrompt, tokens: int = 24) -> Costs:
    """Measures the seconds of a target pass and of a draft step, with chains of four tokens."""
    tree = TreeConfig(budget=4, max_depth=4, batch=1)
    steps = list(
        session.generate(
            prompt.tokens, tree=tree, method="chain-coupled",
            generation=GenerationConfig(max_tokens=tokens),
        )
    )  # fmt: skip
    drafted = [step for step in steps[1:] if step.tree_nodes]  # the first pass runs the prompt
    if not drafted:
        raise ConfigError("the text of the first prompt is too short to measure costs on: name "
                          "them with `target_ms` and `draft_ms`")  # fmt: skip
    return Costs(
        target_s=median(step.verify_s for step in drafted),
        draft_s=median(step.draft_s / step.tree_nodes for step in drafted),
    )
