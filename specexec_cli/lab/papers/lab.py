"""The tools of a recipe: a session that opens when needed, prompts, and stored results.

The small form of a recipe takes seconds, with the demo pair and built-in prompts. The full form has
the paper's prompts and sizes. It can be stopped and resumed: every generation is a row of a results
file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from specexec_cli.lab.bench.cases import Case
from specexec_cli.lab.bench.datasets import BUILT_IN, Dataset, load_dataset
from specexec_cli.lab.bench.metrics import paired_difference, ratio_and_error
from specexec_cli.lab.bench.results import ResultsFile, Row
from specexec_cli.lab.papers.registry import Recipe, Setting

if TYPE_CHECKING:
    from specexec_cli.lab.bench.parts import Counts
    from specexec_cli.lab.bench.runner import Bench, BenchPrompt
    from specexec_cli.lab.training import Text
    from specexec_cli.session import TextSession

# (datasets, most tokens of a text, draft model or None for the pair's own) -> a session for them
OpenSession = Callable[[Sequence[Dataset], int, "str | None"], "TextSession"]

_EVERY = 1 << 20  # a number of prompts that stands for all of a dataset
_TURN = 10  # prompts between two checks of the standard error

_Made = TypeVar("_Made")


class Difference(NamedTuple):
    """A difference of two rates, and its standard error."""

    more: float
    error: float

    @property
    def shown(self) -> bool:
        """Whether it is above zero by more than two standard errors."""
        return self.more > 2 * self.error

    def __str__(self) -> str:
        return f"{self.more:+.2f} ±{self.error:.2f}"


@dataclass(frozen=True, slots=True)
class Rate:
    """The generation rate (committed tokens per target pass) of one case.

    There are two averages: `micro` is all tokens over all passes; `macro` is the mean of the
    prompts' rates, which SpecExec's authors print (run_exp.py of yandex-research/specexec).
    """

    micro: float
    error: float  # standard error of micro
    counts: Sequence[tuple[int, int]]  # (tokens, passes) of each prompt, in the dataset's order
    nodes: float  # mean draft tokens per pass

    @property
    def macro(self) -> float:
        """The mean of the prompts' own rates."""
        return self._macro[0]

    @property
    def macro_error(self) -> float:
        """The standard error of macro."""
        return self._macro[1]

    @property
    def _macro(self) -> tuple[float, float]:
        own = self._of_prompts()
        return ratio_and_error([rate for rate, _ in own], [1.0] * len(own))

    def _of_prompts(self) -> list[tuple[float, float]]:
        """Each prompt's own rate, over a weight that is the same for all."""
        return [(tokens / passes, 1.0) for tokens, passes in self.counts]

    def __str__(self) -> str:
        return (
            f"{self.micro:.2f} ±{self.error:.2f} micro, "
            f"{self.macro:.2f} ±{self.macro_error:.2f} macro"
        )

    def above(self, other: Rate) -> Difference:
        """How much more this rate is than another, over the prompts of both."""
        return Difference(*paired_difference(self.counts, other.counts))

    def macro_above(self, other: Rate) -> Difference:
        """The same of the means over prompts."""
        return Difference(*paired_difference(self._of_prompts(), other._of_prompts()))


class Lab:
    """One run of one recipe.

    Args:
        opened: returns a session, which it may open; the caller of Lab closes it. Only one session
            is needed at a time.
        folder: folder for results.
        data: folder of the datasets' files.
        most_prompts: most prompts of each dataset; None sets no limit.
        most_tokens: most tokens of a text in the full form; None leaves it to the recipe.
        done: called after each generation.
    """

    target_error = (
        0.03  # relative error of the micro rate, below which the full form takes no more prompts
    )

    def __init__(
        self,
        opened: OpenSession,
        folder: Path,
        *,
        full: bool = False,
        data: Path = Path("data"),
        most_prompts: int | None = None,
        most_tokens: int | None = None,
        seed: int = 0,
        done: Callable[[str], None] = lambda label: None,
    ) -> None:
        self.full, self.seed = full, seed
        self.most_prompts, self.most_tokens = most_prompts, most_tokens
        self.folder = folder
        self._opened, self._data, self._done = opened, data, done
        self._draft: str | None = None  # draft model of the open session
        self._session: TextSession | None = None
        self._planned: list[Dataset] = []  # datasets that the open session's memory is planned for
        self._tokens = 0  # most tokens of a text that the open session's memory is planned for
        self._file: ResultsFile | None = None
        self._models: tuple[str, str | None] | None = None  # the pair's models, once opened
        self._made: dict[Callable[[Lab], Any], Any] = {}

    def setting(self, recipe: Recipe) -> Setting:
        """The setting of the recipe's finding; to be called after the recipe."""
        target, draft = (self._models if recipe.models else None) or (None, None)
        return Setting(self.full, self.seed, target, draft)

    def once(self, make: Callable[[Lab], _Made]) -> _Made:
        """The result of make(lab), computed at the first call; for results that recipes share."""
        if make not in self._made:
            self._made[make] = make(self)
        made: _Made = self._made[make]
        return made

    def tokens(self, full: int, small: int) -> int:
        """Most tokens of a text: `small` in the small form, at most `full` in the full form."""
        if not self.full:
            return small
        return full if self.most_tokens is None else min(full, self.most_tokens)

    def dataset(self, name: str, *, chat: bool | None = None, small: int) -> Dataset:
        """A dataset's prompts in random order; in the small form the first `small` built-in ones.

        Args:
            name: the dataset, as in `bench`.
            chat: chooses built-in prompts: True takes questions to answer, False texts to continue,
                None both.
        """
        if self.full:
            # loads all prompts, even if few are used: rows contain the digest of the loaded prompts
            return load_dataset(name, data_folder=self._data, count=_EVERY, seed=self.seed)
        built_in = load_dataset(BUILT_IN, data_folder=self._data, count=_EVERY)
        chosen = [prompt for prompt in built_in.prompts if chat in (None, prompt.chat)]
        return Dataset(BUILT_IN, built_in.source, tuple(chosen[:small]))

    def parts(self, name: str, counts: Counts) -> list[Dataset]:
        """Random parts of a dataset for training, validation and tests, or fewer if it is small."""
        from specexec_cli.lab.bench.parts import load_parts, scaled

        counts = counts if self.most_prompts is None else scaled(counts, self.most_prompts)
        found = load_parts(
            name, data_folder=self._data, counts=counts, seed=self.seed, at_most=True
        )
        return list(found.values())

    def session(
        self, sets: Sequence[Dataset], tokens: int, draft: str | None = None
    ) -> TextSession:
        """The session, with memory planned for all prompts that were requested so far.

        It is opened at the first call, and opened again if the draft model changes or if a prompt
        or text is longer than all before. So a recipe with several datasets requests all first.
        """
        longer = _longest(sets) > _longest(self._planned) or tokens > self._tokens
        if self._session is None or draft != self._draft or longer:
            self._planned += [one for one in sets if one not in self._planned]
            self._tokens = max(self._tokens, tokens)
            self._session = self._opened(self._planned, self._tokens, draft)
            self._draft = draft
        if draft is None:
            pair = self._session.pair
            self._models = pair.target.name, pair.draft.name if pair.draft else None
        return self._session

    def encoded(self, dataset: Dataset, tokens: int, draft: str | None = None) -> list[BenchPrompt]:
        """The prompts as tokens, without prompts that are too long for the context window."""
        from specexec_cli.lab.bench.runner import encode_prompts

        found = encode_prompts(self.session([dataset], tokens, draft), dataset, tokens)[0]
        return found[: self.most_prompts]

    def rows(
        self, cases: Sequence[Case], dataset: Dataset, draft: str | None = None
    ) -> dict[Case, list[Row]]:
        """Rows of every case, one per prompt; rows in the results file are not measured again.

        The full form takes the dataset's prompts in order, for each case until the standard error
        of its rate is small enough.
        """
        from specexec_cli.lab.bench.runner import interleaved

        prompts = self.encoded(dataset, max(case.max_tokens for case in cases), draft)
        found: dict[Case, list[Row]] = {case: [] for case in cases}
        bench = self._bench(self.session([dataset], 0, draft))
        for start in range(0, len(prompts), _TURN):
            wanted = [case for case in cases if not (self.full and self._settled(found[case]))]
            runs = list(interleaved(wanted, [(dataset, prompts[start : start + _TURN])], 1))
            rows = bench.measure(runs, lambda row: self._done(row["label"]))
            for run, row in zip(runs, rows, strict=True):
                found[run.case].append(row)
        return found

    def _settled(self, rows: Sequence[Row]) -> bool:
        """Whether the standard error of these runs' rate is small enough."""
        if not rows:
            return False
        known = rate(rows)
        return known.error < self.target_error * known.micro

    def texts(self, dataset: Dataset, tokens: int) -> list[Text]:
        """The draft model's predictions along the target's greedy texts (DISCO, appendix D.1).

        Empty for a dataset without prompts.
        """
        from specexec_cli.config import SamplingConfig
        from specexec_cli.lab.bench.policy_labels import LabelsFile, collect

        if not dataset.prompts:
            return []
        session = self.session([dataset], tokens)
        labels = LabelsFile(session.pair_folder / "labels.jsonl")  # shared with train-policy
        found = []
        for text in collect(
            session, self.encoded(dataset, tokens), SamplingConfig(seed=self.seed), tokens, labels
        ):
            self._done(dataset.name)
            found.append(text)
        return found

    def _bench(self, session: TextSession) -> Bench:
        from specexec_cli.lab.bench.environment import environment, link
        from specexec_cli.lab.bench.runner import Bench

        if self._file is None:
            self._file = ResultsFile(self.folder / "results.jsonl")
        return Bench(session, self._file, environment(), link(session))


def _longest(sets: Sequence[Dataset]) -> int:
    """Characters of the longest prompt in all datasets."""
    return max((len(prompt.text) for one in sets for prompt in one.prompts), default=0)


def rate(rows: Sequence[Row]) -> Rate:
    """The generation rate of one case's runs."""
    tokens = [row["metrics"]["generated_tokens"] for row in rows]
    passes = [row["metrics"]["target_passes"] for row in rows]
    nodes = sum(row["metrics"]["tree_nodes"] * row["metrics"]["target_passes"] for row in rows)
    counts = list(zip(tokens, passes, strict=True))
    return Rate(*ratio_and_error(tokens, passes), counts, nodes / sum(passes))
