"""Data that every room uses: the draft tree, and the results of a pass and of a generation.

numpy is imported where arrays are made: the simulator runs without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FinishReason = Literal["length", "eos", "stop"]


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many first tokens two texts share, which is how many rows of a cache can be kept."""
    shared = min(len(left), len(right))
    ours, theirs = list(left[:shared]), list(right[:shared])
    if ours == theirs:  # the usual case, in one comparison
        return shared
    return next(at for at in range(shared) if ours[at] != theirs[at])


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Candidate continuations of the committed text, nodes in insertion order.

    All arrays have shape (nodes,). Parents precede their children; parent -1 is the root, which is
    the last committed token and not itself a node.
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    depths: NDArray[np.int64]  # 1 for a child of the root
    log_probs: NDArray[np.float64]  # cumulative log-probability from the root, nats

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def empty(cls) -> DraftTree:
        """The tree of plain autoregressive decoding: no node at all."""
        import numpy as np

        ints = np.zeros(0, dtype=np.int64)
        return cls(ints, ints, ints, np.zeros(0, dtype=np.float64))

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> DraftTree:
        """A tree that is one path of these tokens; log-probabilities are set to 0, as unknown."""
        import numpy as np

        ids = np.arange(len(tokens), dtype=np.int64)
        return cls(np.array(tokens, dtype=np.int64), ids - 1, ids + 1, np.zeros(len(tokens)))


@dataclass(frozen=True, slots=True)
class Piece:
    """The rows of one text of a pass that are computed together, in a layer or on a machine."""

    text: int  # index of the text within the pass
    start: int  # first row, counted within the text
    stop: int

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How probable a committed token was, in nats, and which tokens were most probable there."""

    token: int
    log_prob: float
    top: tuple[tuple[int, float], ...]  # (token, log-probability), most probable first


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One iteration: the tokens it committed, and what they cost."""

    tokens: tuple[int, ...]  # committed tokens, the bonus token last
    drafted: tuple[bool, ...]  # per token: True if it came from the tree, False for the bonus token
    tree_nodes: int
    tree_depth: int
    draft_s: float  # drafting before the pass
    verify_s: float
    bytes_streamed: int
    pending_rows: int  # committed rows the pass carried besides the tree
    read_s: float = 0.0  # seconds in which the SSD was read; 0 where that is not known
    text: str = ""  # to be shown now: complete characters, no possible stop string
    pieces: tuple[str, ...] = ()  # `text` by the token that released it, one piece per token
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if they were asked for
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassProgress:
    """How far a target pass has come, for live status."""

    number: int  # of the pass within its generation, from 1
    layer: int  # layers done
    layers: int
    bytes_per_s: float  # streamed since the pass began; 0 if nothing is
    draft_nodes: int  # of the tree in this pass


_TELLING_PAUSES = 4  # fewest passes without a tree for a comparison with the others


@dataclass(slots=True)
class GenerationStats:
    """Sums over the steps of one generation."""

    prompt_tokens: int = 0
    prompt_rows: int = 0  # prompt tokens that the caches did not hold yet
    generated_tokens: int = 0
    target_passes: int = 0
    ttft_s: float = 0.0  # to the end of the first pass, prefill included
    first_tokens: int = 0  # committed by the first pass
    total_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    # After the first pass, if the method grows trees: tokens and seconds of passes with a tree;
    # number and seconds of passes for which the policy wanted no tree.
    tree_tokens: int = 0
    tree_s: float = 0.0
    paused_passes: int = 0
    paused_s: float = 0.0
    bytes_streamed: int = 0
    peak_ram_bytes: int = 0
    peak_vram_bytes: int = 0
    link_bytes_per_s: float | None = field(default=None)  # probed, if a probe ran
    # For a mixture with experts that come one by one, summed over layers and passes: experts that
    # rows were routed to, and those of them that were already in memory.
    experts_asked: int = 0
    experts_held: int = 0

    def add(self, step: StepResult) -> None:
        """Adds one iteration."""
        self.generated_tokens += len(step.tokens)
        self.target_passes += 1
        self.draft_s += step.draft_s
        self.verify_s += step.verify_s
        self.bytes_streamed += step.bytes_streamed
        if step.pending_rows > 1:
            return
        if step.tree_nodes:
            self.tree_tokens += len(step.tokens)
            self.tree_s += step.draft_s + step.verify_s

    def add_pause(self, step: StepResult) -> None:
        """Adds an iteration without a tree by the policy's choice; call it besides `add`."""
        if step.pending_rows == 1:
            self.paused_passes += 1
            self.paused_s += step.draft_s + step.verify_s

    @property
    def drafting_loss(self) -> tuple[float, float] | None:
        """Seconds per token with trees and without; None unless trees made tokens slower."""
        if not self.tree_tokens or self.paused_passes < _TELLING_PAUSES:
            return None
        drafted_s, plain_s = self.tree_s / self.tree_tokens, self.paused_s / self.paused_passes
        return (drafted_s, plain_s) if drafted_s > plain_s else None

    @property
    def generation_rate(self) -> float:
        """Committed tokens per target pass, bonus token included."""
        return self.generated_tokens / self.target_passes if self.target_passes else 0.0

    @property
    def bytes_per_token(self) -> float:
        """Bytes streamed for each generated token, those of the prompt's pass included."""
        return self.bytes_streamed / self.generated_tokens if self.generated_tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the whole wall time, prefill included."""
        return self.generated_tokens / self.total_s if self.total_s else 0.0

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after those of the first pass (TPOT); 0 with one pass only."""
        rest = self.generated_tokens - self.first_tokens
        return (self.total_s - self.ttft_s) / rest if rest > 0 else 0.0

    @property
    def stream_bytes_per_s(self) -> float:
        """Bytes streamed over the time spent in target passes."""
        return self.bytes_streamed / self.verify_s if self.verify_s else 0.0

    def named(self) -> dict[str, float]:
        """The statistics by their documented names, for JSON."""
        return {name: getattr(self, name) for name in _DOCUMENTED}


_DOCUMENTED = (
    "prompt_tokens", "generated_tokens", "target_passes", "generation_rate", "ttft_s", "tpot_s",
    "tokens_per_s", "draft_s", "verify_s", "bytes_streamed", "stream_bytes_per_s",
    "peak_ram_bytes", "peak_vram_bytes", "experts_asked", "experts_held", "bytes_per_token",
)  # fmt: skip
