"""SpecExec decoding of several texts at once; texts come and go between passes.

A pass carries for each text what loop.py's pass carries for one: its pending tokens, and a draft
tree after them. Each text has its own caches, sampler and context, and is token for token what it
would be alone. Only the trees are grown together, and share the budget of a pass.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from specexec_cli.core import DraftTree, FinishReason, StepResult, common_prefix
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.drafting.forest import Forest, ForestDrafter, GrowingText
from specexec_cli.errors import NonFiniteLogitsError, SpecexecError
from specexec_cli.planning.memory import PROMPT_ROWS
from specexec_cli.prefixes.kept_pair import KeptPair
from specexec_cli.sampling import Sampler
from specexec_cli.verify.accept import Accepted, accept
from specexec_cli.verify.verifier import LocalTarget, verify_together

# Rows of prompts that a pass carries while other texts are being decoded: as many as make the pass
# about twice as long, but at least _LEAST_ROWS and at most _MOST_ROWS; _ROWS if there is no cost
# model. If no text is being decoded, the first prompt is carried whole, and of the others as many
# rows as memory is planned for.
_LEAST_ROWS, _MOST_ROWS, _ROWS = 64, 512, 256
# A new text waits one pass if another text's rows in this pass have at least this many of its first
# tokens: they can be copied then, and need not be computed twice.
_WORTH_WAITING = 32


@dataclass(frozen=True, slots=True, eq=False)
class Seat:
    """Memory for one text: its caches. Rows are kept for the next text, which may begin alike."""

    target: LocalTarget
    drafter: ForestDrafter | None


class BatchText:
    """A text that is under way.

    Args:
        seat: for this text alone until it has ended.
        sampler: draws its tokens.
        prompt: at least one token.
        max_tokens: most tokens to generate, at least 1.
        eos_ids: tokens that end it.
    Attributes:
        context: prompt and committed tokens.
        stop: the context's greatest length.
        begun: whether any pass has carried rows of it.
        carried: whether the last pass did.
        plain: whether its next pass goes without a tree.
        fed_rows, fed_bytes: rows and streamed bytes of passes since its last token.
    """

    def __init__(
        self,
        seat: Seat,
        sampler: Sampler,
        prompt: Sequence[int],
        max_tokens: int,
        eos_ids: Collection[int],
    ) -> None:
        self.seat = seat
        self.sampler = sampler
        self.context = list(prompt)
        self.stop = len(prompt) + max_tokens
        self.eos_ids = eos_ids
        self.begun = False
        self.carried = False
        self.plain = False
        self.fed_rows = self.fed_bytes = 0

    @property
    def missing(self) -> int:
        """How many committed tokens the target's cache lacks; 1 except for a prompt."""
        return len(self.context) - len(self.seat.target.tokens)

    def next_tokens(self, count: int) -> list[int]:
        """The first `count` of the missing tokens."""
        first = len(self.seat.target.tokens)
        return self.context[first : first + count]


# What a pass brought for a text: a step, the error that ends it, or None for a part of its prompt.
Outcome = StepResult | SpecexecError | None


@dataclass(slots=True)
class _Part:
    """One text's part of a pass."""

    text: BatchText
    pending: list[int]  # committed tokens that the pass runs
    whole: bool  # whether the cache lacks no others, so that the pass brings the text a token
    tree: DraftTree
    accepted: Accepted | None = None
    error: SpecexecError | None = None  # why the text ends; set before the pass if drafting failed

    @property
    def committed(self) -> list[int]:
        """The committed tokens that the target's cache has after the pass."""
        return [*self.text.seat.target.tokens, *self.pending]


class Batch:
    """Runs passes over texts with the same target and draft model.

    Args:
        forest: grows the trees; None for plain decoding.
        seats: one for each text that there may be at once.
        kept: brings rows back that are on disk, and keeps new ones; None for neither.
    """

    def __init__(
        self, forest: Forest | None, seats: Sequence[Seat], kept: KeptPair | None = None
    ) -> None:
        self._forest = forest
        self._seats = seats
        self._kept = kept

    def seat_for(self, prompt: Sequence[int], taken: Collection[Seat]) -> Seat:
        """The free seat with the longest part of a prompt in its cache; one must be free."""
        free = [seat for seat in self._seats if seat not in taken]
        return max(free, key=lambda seat: common_prefix(seat.target.tokens, prompt[:-1]))

    def step(self, texts: Sequence[BatchText]) -> list[Outcome]:
        """Runs one pass.

        Args:
            texts: the texts under way, the oldest first; at least one.
        Returns:
            an outcome for each text.
        Raises:
            StreamError, OutOfMemoryError: the pass failed; every text is as it was before.
        """
        model = texts[0].seat.target.model
        started, bytes_before = time.perf_counter(), model.bytes_streamed
        read_before_s = model.read_s
        parts = self._parts(texts)
        self._draft(parts)
        drafted = time.perf_counter()
        carried = [part for part in parts if part.error is None]
        for text in texts:
            text.carried = any(part.text is text for part in carried)
        for part, logits in zip(carried, _verified(carried), strict=True):
            _settle(part, logits)
        plain = StepResult(
            tokens=(), drafted=(), tree_nodes=0, tree_depth=0, draft_s=drafted - started,
            verify_s=time.perf_counter() - drafted, pending_rows=0,
            bytes_streamed=(model.bytes_streamed - bytes_before) // max(len(carried), 1),
            read_s=model.read_s - read_before_s,
        )  # fmt: skip
        for part in carried:
            part.text.fed_bytes += plain.bytes_streamed
        outcomes = {part.text: part.error or _step(part, plain) for part in parts}
        if self._kept is not None:
            for part in carried:
                self._kept.offer(part.text.seat.target, part.text.seat.drafter)
        if self._forest is not None and any(part.accepted for part in parts):
            self._forest.observe(_as_one(carried, plain))
        return [outcomes.get(text) for text in texts]

    def _parts(self, texts: Sequence[BatchText]) -> list[_Part]:
        """Decides which committed rows of each text the pass carries; leaves out texts without."""
        prompts = [text for text in texts if text.missing > 1]
        going = len(prompts) < len(texts)
        most = self._forest.most_pending if self._forest is not None else None
        room = min(max(most or _ROWS, _LEAST_ROWS), _MOST_ROWS) if going else PROMPT_ROWS
        parts: list[_Part] = []
        for text in texts:
            if not text.begun:
                self._share(text)
                self._keep_partings(text, texts)
            rows = text.missing
            if rows > 1:
                if any(_brings(part, text) >= _WORTH_WAITING for part in parts):
                    continue
                whole = not going and text is prompts[0]  # no other text waits for this pass
                rows = rows if whole else min(rows, room)
                room = max(room - rows, 0)
            if rows:
                pending = text.next_tokens(rows)
                parts.append(_Part(text, pending, rows == text.missing, DraftTree.empty()))
        return parts

    def _share(self, text: BatchText) -> None:
        """Copies the rows of a new text's first tokens from the seat that has the most of them."""
        prompt, seat = text.context[:-1], text.seat
        held = common_prefix(seat.target.tokens, prompt)
        seat.target.crop(held)
        for other in self._seats:
            common = common_prefix(other.target.tokens, prompt)
            if other.target.state.reachable(common) > len(seat.target.tokens):
                seat.target.copy_rows(other.target, common)
            if not isinstance(seat.drafter, ModelDrafter):
                continue
            assert isinstance(other.drafter, ModelDrafter)
            common = common_prefix(other.drafter.rows.tokens, prompt)
            if common > common_prefix(seat.drafter.rows.tokens, prompt):
                seat.drafter.copy_rows(other.drafter, common)
        if self._kept is not None:
            self._kept.bring_back(seat.target, seat.drafter, text.context)
        seat.target.keep_at(held)

    def _keep_partings(self, text: BatchText, texts: Sequence[BatchText]) -> None:
        """Has a new text's recurrent layers keep their state where others part from it: at the
        length that spares the others the most tokens.

        Those others are new texts, which copy the state after this pass, and the texts that seats
        hold, whose layers had no state there: the next text that begins like both finds one.
        """
        prompt = text.context[:-1]
        new = [each.context for each in texts if each is not text and not each.begun]
        held = [seat.target.tokens for seat in self._seats if seat is not text.seat]
        lengths = [common_prefix(tokens, prompt) for tokens in (*new, *held)]
        spared = {at: at * sum(each >= at for each in lengths) for at in lengths}
        text.seat.target.keep_at(max(spared, key=lambda at: spared[at], default=0))

    def _draft(self, parts: Sequence[_Part]) -> None:
        """Grows trees for the texts that get a token, and runs the draft model on the others'
        prompts, where other machines have layers while they have the pass's rows."""
        if self._forest is None:
            return
        fed = [(_drafter(part), part.committed) for part in parts if not part.whole]
        grown = [part for part in parts if part.whole and not part.text.plain]
        texts = [
            GrowingText(
                _drafter(part), part.text.context, part.text.stop - len(part.text.context) - 1
            )
            for part in grown
        ]
        trees = self._forest.grow(texts, sum(len(part.pending) for part in parts))
        for part, text, tree in zip(grown, texts, trees, strict=True):
            part.tree, part.error = tree, text.error
        # each pass brings its own, so that none is left of a pass that never began
        self._seats[0].target.model.meanwhile(partial(self._forest.feed, fed))


def _drafter(part: _Part) -> ForestDrafter:
    """The text's drafter, which it has if there is a forest."""
    assert part.text.seat.drafter is not None
    return part.text.seat.drafter


def _brings(part: _Part, text: BatchText) -> int:
    """How many rows that a new text lacks a pass computes already, as part of another text."""
    common = common_prefix(part.committed, text.context[:-1])
    if text.begun or common <= len(part.text.seat.target.tokens):  # copied before, as far as can be
        return 0
    return common - len(text.seat.target.tokens)


def _verified(parts: Sequence[_Part]) -> list[Tensor]:
    """The logits of each part; see LocalTarget.verify."""
    if not parts:
        return []
    return verify_together([(part.text.seat.target, part.pending, part.tree) for part in parts])


def _settle(part: _Part, logits: Tensor) -> None:
    """Commits what the pass brought a text, or notes why the text cannot go on."""
    text, target = part.text, part.text.seat.target
    text.begun = True
    if not part.whole:
        target.commit([])
        text.fed_rows += len(part.pending)
        return
    try:
        part.accepted = accepted = accept(
            part.tree, logits, text.sampler, text.context, text.stop - len(text.context),
            text.eos_ids,
        )  # fmt: skip
    except NonFiniteLogitsError as error:
        # A wrong draft may be the cause, see loop.py: the next pass tries again without a tree.
        text.plain = bool(len(part.tree))
        part.error = None if text.plain else error
        return
    except SpecexecError as error:  # a grammar that cannot be followed any further
        part.error = error
        return
    text.plain = False
    target.commit(accepted.nodes)
    text.fed_rows += len(part.pending)
    if text.seat.drafter is not None:
        text.seat.drafter.commit(accepted.nodes, accepted.tokens)
    text.context += accepted.tokens


def _step(part: _Part, plain: StepResult) -> StepResult | None:
    """The step that a pass brought a text; None if it got no token."""
    if part.accepted is None:
        return None
    tokens = part.accepted.tokens
    ended = tokens[-1] in part.text.eos_ids
    finish: FinishReason | None = "eos" if ended else None
    if not ended and len(part.text.context) == part.text.stop:
        finish = "length"
    text = part.text
    fed_rows, fed_bytes = text.fed_rows, text.fed_bytes
    text.fed_rows = text.fed_bytes = 0
    return replace(
        plain,
        tokens=tokens,
        drafted=part.accepted.drafted,
        tree_nodes=len(part.tree),
        tree_depth=int(part.tree.depths.max(initial=0)),
        bytes_streamed=fed_bytes,
        pending_rows=fed_rows,
        finish_reason=finish,
    )


def _as_one(parts: Sequence[_Part], plain: StepResult) -> StepResult:
    """The pass as one step, as if all trees were one text's, for the policy."""
    settled = [part.accepted for part in parts if part.accepted is not None]
    return replace(
        plain,
        tokens=tuple(token for each in settled for token in each.tokens),
        drafted=tuple(drafted for each in settled for drafted in each.drafted),
        tree_nodes=sum(len(part.tree) for part in parts),
        tree_depth=max(int(part.tree.depths.max(initial=0)) for part in parts),
        pending_rows=sum(len(part.pending) for part in parts),
    )
