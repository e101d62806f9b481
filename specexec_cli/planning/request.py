"""What a user asks for, before anything is looked up: the one place where defaults stand.

`specexec generate`, `chat`, `bench`, `plan` and `Session.open` all fill in a Request; resolve.py
turns it into a Decision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from specexec_cli.config import (
    ADVANCED,
    COMMON,
    MEMORY,
    TREE,
    Activations,
    DraftScoring,
    DsiOptions,
    DtypeName,
    ExpertPlace,
    KvRows,
    Method,
    OffloadMode,
    TreeConfig,
    setting,
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

    budget: int | None = setting(None, TREE, "Most nodes. Default: the pair's.")
    depth: int | None = setting(None, TREE, "Longest path, in tokens. Default: the pair's.")
    batch: int | None = setting(None, TREE, "Nodes expanded at once. Default: the pair's.")
    scoring: DraftScoring = setting(
        "noise", TREE, "Rank draft tokens by the target's sampling noise: noise, or probs.",
        name="draft_scoring",
    )  # fmt: skip
    policy: str | None = setting(
        None, TREE, "How much of the budget each tree uses: {policies}. auto is cost, and fixed "
        "for other methods than specexec.", auto=True,
    )  # fmt: skip
    calibrated: bool = setting(
        True, TREE, "Correct draft probabilities by what was accepted.", name="calibration"
    )
    past: bool = setting(True, TREE, "Add what followed the last tokens where they stood before.")

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
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Models, method, tree and machine of one session."""

    # a pair's name, or any reference of Registry.resolve
    model: str | None = setting(
        None, COMMON, "A name, GGUF file, folder, hub id (org/name@revision, org/name:Q4_K_M) or "
        "ollama:NAME. Default: see 'use'.",
    )  # fmt: skip
    draft: str | None = setting(
        None, COMMON, "Model (dsi: A,B) or trained head; self: 4-bit copy; mtp: its MTP layer; "
        "suffix: past text; auto: fastest. Default: the pair's, or auto.",
    )  # fmt: skip
    models_file: Path | None = setting(None, ADVANCED, "Entries that override models.toml.")
    tokenizer: Path | None = setting(None, ADVANCED, "Folder of a tokenizer, for models without.")
    offline: bool = setting(False, ADVANCED, "Use downloaded files only.")
    method: Method = setting(
        "specexec", ADVANCED,
        "specexec, autoregressive (a token a pass), dsi. The text is the same.",
    )  # fmt: skip
    revision: str | None = setting(None, ADVANCED, "Branch, tag or commit of the model.")
    tree: TreeRequest = field(default_factory=TreeRequest)
    offload: OffloadMode = setting(
        "auto", MEMORY, "Where layers stream from: ssd, ram, none (they stay), or auto."
    )
    experts: ExpertPlace = setting(
        "auto", MEMORY, "Beside a GPU, what computes a mixture's experts: gpu, cpu, or auto."
    )
    hosts: Path | None = setting(
        None, ADVANCED, "File of other machines that have layers too: docs/hosts.md."
    )
    device: str = setting("auto", MEMORY, "auto, cpu, cuda or cuda:N.")
    dtype: DtypeName = setting("auto", MEMORY, "float32, bfloat16, float16, or auto.")
    activations: Activations = setting(
        "full", MEMORY, "Rows on a CPU, times packed weights: full; 8bit, faster, another text; "
        "8bit-draft, drafts alone.",
    )  # fmt: skip
    kv: KvRows = setting(
        "full", ADVANCED, "The target's keys and values: full; 8bit, half the memory, another text."
    )
    cache: bool = setting(
        True, ADVANCED, "Keep rows of texts on disk: what goes on or begins alike is not read anew."
    )
    cache_gb: float | None = setting(
        None, ADVANCED, "GB that they may take in all. Default: a tenth of the free disk."
    )
    dsi: DsiOptions = field(default_factory=DsiOptions)
    # Tokens of prompt and text to plan memory for. Longer texts are not refused: they take memory
    # beyond the plan. With a prompt, which is counted, the tokens beside it.
    context_tokens: int | None = None
    prompt: str | None = None
    slots: int = 1  # texts at once, each of that many tokens, for which memory is planned
    # Begin with what earlier sessions learned about the pair and, with `cache`, with the rows that
    # they kept of texts; and keep what this one brings. It changes how long a text takes, never the
    # text.
    remember: bool = False

    def with_estimated_prompt(self) -> Request:
        """The same without a prompt, whose tokens are estimated: counting takes a tokenizer."""
        if self.prompt is None:
            return self
        tokens = (self.context_tokens or 0) + len(self.prompt) // _CHARACTERS_PER_TOKEN
        return replace(self, prompt=None, context_tokens=tokens)

    @property
    def cache_bytes(self) -> int | None:
        """`cache_gb` in bytes."""
        return None if self.cache_gb is None else int(self.cache_gb * 1e9)

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= MOST_SLOTS:
            raise ConfigError(f"`slots` must be between 1 and {MOST_SLOTS}, not {self.slots}")
        if self.cache_gb is not None and not 0 < self.cache_gb < math.inf:
            raise ConfigError(f"`cache_gb` must be above 0, not {self.cache_gb}")
        if self.hosts is not None and self.method == "dsi":
            raise ConfigError("`method='dsi'` has whole copies of the target: leave `hosts` out")
        if self.hosts is not None and self.offload == "none":
            raise ConfigError("`hosts` streams layers: leave `offload` at auto")
        if self.slots > 1 and self.method == "dsi":
            raise ConfigError("`method='dsi'` runs one text at a time: leave `slots` at 1")
