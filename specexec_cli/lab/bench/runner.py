"""Runs the cases of a bench, interleaved, and turns each generation into a row of results."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from specexec_cli.config import GenerationConfig
from specexec_cli.drafting.learned import Learned
from specexec_cli.drafting.policies import POLICIES
from specexec_cli.errors import ConfigError
from specexec_cli.lab.bench.cases import BASELINE, DISTRIBUTED, Case, is_chain
from specexec_cli.lab.bench.datasets import Dataset
from specexec_cli.lab.bench.environment import reset_peak_memory
from specexec_cli.lab.bench.metrics import TIMING, run_metrics
from specexec_cli.lab.bench.results import ResultsFile, Row, row_config, row_key
from specexec_cli.lab.bench.schema import SCHEMA

if TYPE_CHECKING:
    from specexec_cli.session import TextSession

WARMUP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A prompt, encoded as the target's tokens."""

    id: str
    tokens: tuple[int, ...]
    form: str  # "chat": in the model's own template; "raw": unchanged

    @property
    def sha256(self) -> str:
        """The digest by which the results file identifies the prompt."""
        return hashlib.sha256(json.dumps(self.tokens).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One generation to measure."""

    case: Case
    dataset: Dataset
    prompt: BenchPrompt
    repeat: int

    @property
    def seed(self) -> int:
        """The repeat's seed, which all cases share, so that their texts can be compared."""
        return self.case.sampling.seed + self.repeat


def encode_prompts(
    session: TextSession, dataset: Dataset, max_tokens: int
) -> tuple[list[BenchPrompt], list[str]]:
    """The dataset's prompts as tokens, and the ids of prompts too long for the context window.

    Raises:
        ConfigError: every prompt is too long.
    """
    templated = bool(getattr(session.tokenizer, "chat_template", None))
    prompts, skipped = [], []
    for prompt in dataset.prompts:
        if prompt.chat and templated:
            messages = [{"role": role, "content": text} for role, text in prompt.messages]
            encoded = BenchPrompt(prompt.id, tuple(session.encode_chat(messages)), "chat")
        else:
            encoded = BenchPrompt(prompt.id, tuple(session.encode(prompt.text)), "raw")
        if len(encoded.tokens) + max_tokens > session.context_length:
            skipped.append(prompt.id)
        else:
            prompts.append(encoded)
    if not prompts:
        raise ConfigError(
            f"every prompt of {dataset.name} is too long: with `max_tokens={max_tokens}` at most "
            f"{session.context_length - max_tokens} prompt tokens fit the context window"
        )
    return prompts, skipped


def interleaved(
    cases: Sequence[Case], sets: Sequence[tuple[Dataset, Sequence[BenchPrompt]]], repeats: int
) -> Iterator[Run]:
    """All runs, in an order that treats all cases alike if the machine's speed changes.

    At each prompt the cases take turns, and each prompt begins with the next case.
    """
    turn = 0
    for repeat in range(repeats):
        for dataset, prompts in sets:
            for prompt in prompts:
                for offset in range(len(cases)):
                    case = cases[(turn + offset) % len(cases)]
                    yield Run(case=case, dataset=dataset, prompt=prompt, repeat=repeat)
                turn += 1


class Bench:
    """Measures runs in one session and appends them to a results file.

    Args:
        distributed: the session of the method dsi, if dsi is measured too.
    """

    def __init__(
        self,
        session: TextSession,
        results: ResultsFile,
        env: dict[str, Any],
        link: dict[str, Any],
        distributed: TextSession | None = None,
    ) -> None:
        self._session = session
        self._distributed = distributed
        self._results = results
        self._env = env
        self._link = link
        # Each case learns only from its own runs, warm-up included.
        self._learned: dict[tuple[Any, ...], Learned] = {}
        self._texts: dict[tuple[str, Case, int], list[int]] = {}  # the baseline's texts

    def key(self, run: Run) -> str:
        """The run's key in the results file."""
        return row_key(
            {
                "config": row_config(self._session, run.dataset),
                "case": run.case.settings(),
                "seed": run.seed,
                "prompt": run.prompt.sha256,
                "environment": self._env,
            }
        )

    def warm_up(self, cases: Sequence[Case], prompt: BenchPrompt, rounds: int) -> None:
        """Generates a few tokens with every case; only what the drafters learn is kept."""
        for _ in range(rounds):
            for case in cases:
                short = replace(case, max_tokens=min(WARMUP_TOKENS, case.max_tokens))
                self._generate(short, prompt, case.sampling.seed)

    def measure(self, runs: Sequence[Run], done: Callable[[Row], None]) -> list[Row]:
        """Runs all runs that the results file lacks; `done` is called with each new row."""
        rows = []
        for run in runs:
            row = self._results.rows.get(self.key(run))
            if row is None:
                row = self._row(run)
                self._results.append(row)
                done(row)
            rows.append(row)
        return rows

    def _session_of(self, case: Case) -> TextSession:
        if case.method not in DISTRIBUTED:
            return self._session
        assert self._distributed is not None
        return self._distributed

    def _generate(self, case: Case, prompt: BenchPrompt, seed: int) -> list[Any]:
        text = self._text_to_come(case, prompt, seed)
        session = self._session_of(case)
        session.forget()
        learner = case.method, case.tree, case.sampling
        if learner not in self._learned:
            self._learned[learner] = Learned(session.classifier, session.cost_prior)
        session.learned = self._learned[learner]
        if case.tree is not None and text is not None:
            session.learned.use(case.tree, POLICIES[case.tree.policy].make(case.tree, text))
        return list(
            session.generate(
                prompt.tokens,
                sampling=replace(case.sampling, seed=seed),
                tree=case.tree,
                generation=GenerationConfig(max_tokens=case.max_tokens),
                method=case.method,
            )
        )

    def _text_to_come(self, case: Case, prompt: BenchPrompt, seed: int) -> list[int] | None:
        """The baseline's text, where the case's policy must know it; otherwise None."""
        if case.tree is None or POLICIES[case.tree.policy].needs != "continuation":
            return None
        baseline = replace(case, method=BASELINE, tree=None)
        key = prompt.sha256, baseline, seed
        if key not in self._texts:
            steps = self._generate(baseline, prompt, seed)
            self._texts[key] = [token for step in steps for token in step.tokens]
        return self._texts[key]

    def _row(self, run: Run) -> Row:
        reset_peak_memory(self._session.settings["device"])
        started = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds")
        steps = self._generate(run.case, run.prompt, run.seed)
        tokens = [token for step in steps for token in step.tokens]
        session = self._session_of(run.case)
        metrics = run_metrics(
            steps,
            session.stats,
            link_bytes_per_s=self._link["link_bytes_per_s"],
            is_chain=is_chain(run.case.method),
        )
        prompt = run.prompt
        return {
            "schema": SCHEMA,
            "kind": "run",
            "key": self.key(run),
            "label": run.case.label,
            "config": row_config(self._session, run.dataset),
            "case": run.case.settings(),
            "seed": run.seed,
            "repeat": run.repeat,
            "prompt": {
                "id": prompt.id, "sha256": prompt.sha256, "tokens": len(prompt.tokens),
                "form": prompt.form,
            },
            "link": self._link,
            "started": started,
            "finish_reason": steps[-1].finish_reason,
            "tokens_sha256": hashlib.sha256(json.dumps(tokens).encode()).hexdigest(),
            "tokens": tokens,
            "metrics": metrics,
            "passes": {
                "tokens": [len(step.tokens) for step in steps],
                "tree_nodes": [step.tree_nodes for step in steps],
                "draft_s": [round(step.draft_s, 6) for step in steps],
                "verify_s": [round(step.verify_s, 6) for step in steps],
            },
            "calibration": session.reliability.bins,
            "timing": dict(TIMING),
            "environment": self._env,
        }  # fmt: skip
