"""What a user asks for, before anything is looked up: the one place where defaults stand.

`specexec generate`, `chat`, `bench`, `plan` and `Session.open` all fill in a Request; resolve.py
turns it into a Decision.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from specexec_cli.config import (
    DraftScoring,
    DsiOptions,
    DtypeName,
    ExpertPlace,
    Method,
    OffloadMode,
    Overlap,
    TreeConfig,
)
from specexec_cli.errors import ConfigError

MOST_SLOTS = 256  # texts at once
_CHARACTERS_PER_TOKEN = 4  # of most texts, in most tokenizers
DEFAULT_CONTEXT_TOKENS = 4096  # planned for where nothing better is known


def in_whole_blocks(nodes: int, texts: int, block_rows: int) -> int:
    """The nodes, but for those by which the roots of so many texts would begin one more block."""
    beyond = (nodes + texts) % block_rows
    return max(1, nodes - beyond) if beyond <= texts else nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRequest:
    """The draft tree, as far as it was asked for; None leaves a number to the pair."""

    budget: int | None = None
    depth: int | None = None
    batch: int | None = None
    scoring: DraftScoring = "noise"
    policy: str | None = None  # None is cost, and fixed for other methods than specexec
    calibrated: bool = True
    past: bool = True
    overlap: Overlap = "off"

    def resolve(
        self, recommended: TreeConfig, method: Method, slots: int = 1, block_rows: int = 1
    ) -> TreeConfig:
        """The tree to use and to plan memory for.

        Under the policy `cost` a budget that was not asked for is twice the recommended one: room
        to find more nodes worthwhile. Texts that share a pass share its budget, up to four times
        the recommended one. A depth that was not asked for yields to the budget.

        Args:
            slots: texts at once.
            block_rows: rows that the device multiplies together; an open budget leaves room for
                the roots in blocks that nodes would fill.
        Raises:
            ConfigError: the numbers contradict each other.
        """
        policy = self.policy or ("cost" if method == "specexec" else "fixed")
        nodes = self.budget
        if nodes is None:
            nodes = recommended.budget * (max(2, min(slots, 4)) if policy == "cost" else 1)
            nodes = in_whole_blocks(nodes, slots, block_rows)
        depth = min(recommended.max_depth, max(nodes, 1)) if self.depth is None else self.depth
        return TreeConfig(
            budget=nodes,
            max_depth=depth,
            batch=recommended.batch if self.batch is None else self.batch,
            scoring=self.scoring,
            policy=policy,
            calibrated=self.calibrated,
            past=self.past,
            overlap=self.overlap,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Models, method, tree and machine of one session."""

    pair: str | None = None
    target: str | None = None  # a models.toml name, a folder, or a hub id
    draft: str | None = None
    method: Method = "specexec"
    models_file: Path | None = None
    revision: str | None = None
    tokenizer: Path | None = None
    offline: bool = False
    tree: TreeRequest = field(default_factory=TreeRequest)
    offload: OffloadMode = "auto"
    experts: ExpertPlace = "auto"  # where a mixture's experts are computed beside a GPU
    device: str = "auto"
    dtype: DtypeName = "auto"
    # Tokens of prompt and text to plan memory for. Longer texts are not refused: they take memory
    # beyond the plan. With a prompt, which is counted, the tokens beside it.
    context_tokens: int | None = None
    prompt: str | None = None
    slots: int = 1  # texts at once, each of that many tokens, for which memory is planned
    dsi: DsiOptions = field(default_factory=DsiOptions)
    # Begin with what earlier sessions learned about the pair, and keep what this one learns. It
    # changes how many passes a text takes, never the text.
    remember: bool = False

    def with_estimated_prompt(self) -> Request:
        """The same without a prompt, whose tokens are estimated: counting takes a tokenizer."""
        if self.prompt is None:
            return self
        tokens = (self.context_tokens or 0) + len(self.prompt) // _CHARACTERS_PER_TOKEN
        return replace(self, prompt=None, context_tokens=tokens)

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= MOST_SLOTS:
            raise ConfigError(f"`slots` must be between 1 and {MOST_SLOTS}, not {self.slots}")
        if self.slots > 1 and self.method == "dsi":
            raise ConfigError("`method='dsi'` runs one text at a time: leave `slots` at 1")
