"""The real models behind DSI's workers: each runs chains of tokens, with a cache of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specexec_cli.config import SamplingConfig
from specexec_cli.core import DraftTree, common_prefix
from specexec_cli.dsi.messages import Ready
from specexec_cli.dsi.workers import Stale
from specexec_cli.errors import NonFiniteLogitsError
from specexec_cli.models.layer_state import ModelState
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.pass_rows import embeddable
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.prefixes.folder import Bound
from specexec_cli.prefixes.kept_texts import KeptTexts
from specexec_cli.sampling import Sampler, uniforms
from specexec_cli.verify.rejection import DRAFT_STREAM, draw, settle
from specexec_cli.verify.verifier import LocalTarget

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

_LAST_WRITES_S = 3.0  # of a worker that ends, before its pool kills it after 5
_LAST_SEGMENT_S = 1.0  # besides, for the one that is being written by then
MOST_READING_S = 60.0  # of kept rows; what has not come by then is computed
_MEASURED_ROWS = (1, 32)  # rows of the passes that are timed when a worker starts


@dataclass(frozen=True, slots=True)
class KeptAs:
    """Where a worker finds rows of texts that were kept on disk; see KeptTexts.

    Attributes:
        most_bytes: what the user lets files of all models take; None for the usual.
        writes: whether it keeps new ones. Of target servers, whose rows are the same, one does.
    """

    name: str
    identity: str
    most_bytes: int | None
    writes: bool


class StalePass(Exception):
    """Ends a pass that has become stale; never leaves CachedModel."""


class CachedModel:
    """A model with a cache. A pass runs the rows of a text that the cache lacks, and can be ended
    between layers once its result is stale.

    Args:
        kept: where rows of texts are kept on disk; None keeps and brings back none.
    Attributes:
        rows_run: rows run through the model so far.
    """

    def __init__(self, model: StreamedModel, kept: KeptAs | None = None) -> None:
        self.model = model
        self.rows_run = 0
        self._target = LocalTarget(model)
        # of the last pass, whose rows are in the cache, but not committed
        self._pending: Sequence[int] = ()
        self._drafts: Sequence[int] = ()
        self._text: Sequence[int] = ()  # of the generation, as far as it is known
        self._kept: KeptTexts | None = None
        self._writes = kept is not None and kept.writes
        if kept is not None:
            self._kept = KeptTexts(kept.name, kept.identity, Bound(kept.most_bytes), _on_stderr)

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens with rows in the cache, as the model embeds them."""
        return [*self._target.tokens, *self._pending, *self._drafts]

    @property
    def state(self) -> ModelState:
        """What the layers keep of those tokens."""
        return self._target.state

    def logits(self, tokens: Sequence[int], first: int, stale: Stale) -> Tensor | None:
        """Logits for positions first .. len(tokens); rows that the cache has are not run again.

        Args:
            tokens: the text.
            first: first position wanted, 1 .. len(tokens).
            stale: polled after each layer.
        Returns:
            (len(tokens) + 1 - first, vocab). None if the pass became stale; the cache then holds at
            most the common prefix.
        """
        text = embeddable(tokens, self.model.vocab_size)
        self._settle(text[: first - 1])
        self._target.reserve(len(text) + 256)
        self._keep()
        if self._kept is not None:
            ends_s = time.monotonic() + MOST_READING_S
            self._kept.bring_back(
                self._target, text[:first], lambda: stale() or time.monotonic() > ends_s
            )
        pending, drafts = text[len(self.tokens) : first], text[first:]
        self.rows_run += len(pending) + len(drafts)

        def poll(index: int) -> None:
            if stale():
                raise StalePass

        try:
            self.model.on_layer = poll
            logits = self._target.verify(pending, DraftTree.chain(drafts))
        except StalePass:
            return None
        finally:
            self.model.on_layer = lambda index: None
        self._pending, self._drafts = pending, drafts
        return logits

    def fill(self, tokens: Sequence[int], stale: Stale) -> bool:
        """Runs the rows of `tokens` that the cache lacks; False if the pass became stale."""
        text = embeddable(tokens, self.model.vocab_size)
        if common_prefix(self.tokens, text) == len(text):
            return True
        return self.logits(tokens, len(tokens), stale) is not None

    def score(self, tokens: Sequence[int], first: int) -> NDArray[np.float32]:
        """Logits for each position of a text from `first` on, (len(tokens) - first, vocab)."""
        logits = self.logits(tokens[:-1], first, _never)
        assert logits is not None
        scores: NDArray[np.float32] = logits.float().cpu().numpy()
        return scores

    def _settle(self, text: Sequence[int]) -> None:
        """Commits rows of the last pass as far as they are a text's, and drops all that is not.

        They are not committed before, since recurrent layers go back from no committed row to the
        one before it.
        """
        common = common_prefix(self.tokens, text)
        if self._pending:
            begun = len(self._target.tokens) + len(self._pending)
            self._target.commit(range(max(0, common - begun)))
            self._pending = self._drafts = ()
        self._target.crop(common)

    def _keep(self, *, ended: bool = False) -> None:
        """Has rows of the text written; others belong to drafts that may be wrong."""
        if self._kept is not None and self._writes:
            length = common_prefix(self._target.tokens, self._text)
            self._kept.offer(self._target, length=length, ended=ended)

    def begin_text(self, prompt: Sequence[int]) -> None:
        """Notes what a generation goes on from: no draft, so that its rows are worth keeping."""
        self._text = embeddable(prompt, self.model.vocab_size)

    def end_text(self, tokens: Sequence[int]) -> None:
        """Notes the text that a generation has ended with; its rows and its end are kept."""
        self._text = embeddable(tokens, self.model.vocab_size)
        self._settle(self._text)
        self._keep(ended=True)

    def forget(self) -> None:
        """Empties the cache."""
        self._settle(())

    def close(self) -> None:
        """Writes what was to be kept, for some seconds at most; frees nothing else."""
        if self._kept is not None:
            self._kept.close(_LAST_WRITES_S, _LAST_SEGMENT_S)

    def ready(self) -> Ready:
        """Measures the seconds of passes; returns them with the context window."""
        seconds = {}
        measured = [min(rows, self.model.context_length) for rows in _MEASURED_ROWS]
        for rows in (*measured, *measured):  # the first passes warm up and compile kernels
            begin = time.perf_counter()
            logits = self.logits([0] * rows, rows, _never)
            assert logits is not None
            logits.sum().item()  # waits until the device is done
            seconds[rows] = time.perf_counter() - begin
            self.forget()
        return Ready(seconds, self.model.context_length)


def _on_stderr(text: str) -> None:
    print(f"notice: {text}", file=sys.stderr)


def _never() -> bool:
    return False


def judge(
    seed: int,
    probs: NDArray[np.float32] | NDArray[np.float64],
    draft: tuple[int, NDArray[np.float32]] | None,
    position: int,
) -> int:
    """The token of a position by rejection sampling; see orchestrator.Judge.

    Args:
        seed: of the sampling.
        probs: the target's distribution at the position, (vocab,).
        draft: a drafted token and the distribution (vocab,) that it was drawn from. Without one
            the token is drawn from `probs`.
        position: absolute position of the token.
    """
    target_probs = probs.astype("float64")
    if draft is None:
        return settle(target_probs, target_probs, (), seed, position)[0]
    return settle(target_probs, draft[1].astype("float64"), (draft[0],), seed, position)[0]


class CachedServer:
    """A model with a sampler: what a target server and a drafter over real models share."""

    def __init__(self, model: StreamedModel, kept: KeptAs | None = None) -> None:
        self.cached = CachedModel(model, kept)
        self._sampler = Sampler(SamplingConfig())
        self._rejection = False

    def configure(
        self, sampling: SamplingConfig, rejection: bool = False, prompt: Sequence[int] = ()
    ) -> None:
        """Sets how later tokens are drawn; with `rejection`, drafts are drawn and tested."""
        self.cached.begin_text(prompt)
        self._sampler = Sampler(sampling)
        self._rejection = rejection

    def score(self, tokens: Sequence[int], first: int) -> NDArray[np.float32]:
        """The model's logits at each position of a text from `first` on; see CachedModel.score."""
        return self.cached.score(tokens, first)

    def forget(self) -> None:
        """Empties the cache."""
        self.cached.forget()

    def end(self, tokens: Sequence[int]) -> None:
        """See CachedModel.end_text."""
        self.cached.end_text(tokens)

    def ready(self) -> Ready:
        """Measured latencies and the context window."""
        return self.cached.ready()

    def close(self) -> None:
        """Ends the keeping of rows; see CachedModel.close."""
        self.cached.close()


class ModelTarget(CachedServer):
    """A target server over a real model; see workers.TargetServer."""

    def __init__(self, model: StreamedModel, kept: KeptAs | None = None) -> None:
        super().__init__(model, kept)
        self._bonus: NDArray[np.float32] | None = None

    @property
    def bytes_streamed(self) -> int:
        """Bytes that were streamed so far."""
        return self.cached.model.bytes_streamed

    @property
    def rows_run(self) -> int:
        """Rows that were run through the model so far."""
        return self.cached.rows_run

    @property
    def bonus(self) -> NDArray[np.float32] | None:
        """See workers.TargetServer."""
        return self._bonus

    def verify(
        self,
        tokens: Sequence[int],
        first: int,
        stale: Stale,
        proposals: Sequence[NDArray[np.float32]] = (),
    ) -> tuple[int, ...] | None:
        """See workers.TargetServer."""
        self._bonus = None
        if first > len(tokens):
            return () if self.cached.fill(tokens, stale) else None
        logits = self.cached.logits(tokens, first, stale)
        if logits is None:
            return None
        draws: list[int] = []
        for row, position in enumerate(range(first, len(tokens) + 1)):
            context = tokens[:position]
            try:
                if not self._rejection:
                    draws.append(self._sampler.token(logits[row], context))
                elif position == len(tokens):
                    self._bonus = self._sampler.probs(logits[row], context).astype("float32")
                else:
                    probs = self._sampler.probs(logits[row], context)
                    draft = tokens[position], proposals[row]
                    draws.append(judge(self._sampler.config.seed, probs, draft, position))
            except NonFiniteLogitsError:
                if not draws:
                    raise
                break  # the text may end before this position
            if position < len(tokens) and draws[-1] != tokens[position]:
                break
        return tuple(draws)


class ModelDrafter(CachedServer):
    """The draft model behind a drafter; see workers.DraftServer.

    It guesses each token with the noise that the target will use at that position. For rejection
    sampling it draws each token instead, with noise that the target's tests do not use, and says
    from which distribution. All drafters draw a position with the same random number. Only one
    drafter's token is tested, and it still has that drafter's distribution. But similar
    distributions then give the same token more often, so more branches can go on with it.
    """

    def __init__(self, model: StreamedModel, vocab_size: int, kept: KeptAs | None = None) -> None:
        super().__init__(model, kept)
        self._vocab_size = vocab_size
        self._tokens: list[int] = []
        self._proposal: NDArray[np.float32] | None = None

    def configure(
        self, sampling: SamplingConfig, rejection: bool = False, prompt: Sequence[int] = ()
    ) -> None:
        """Sets how later tokens are guessed at; with `rejection`, they are drawn."""
        super().configure(sampling, rejection, prompt)
        self._proposal = None

    @property
    def proposal(self) -> NDArray[np.float32] | None:
        """The distribution (vocab,) that the last token was drawn from; None without rejection
        sampling."""
        return self._proposal

    def start(self, tokens: Sequence[int]) -> None:
        """Sets the text that the next token continues."""
        self._tokens = list(tokens)

    def next_token(self) -> int | None:
        """Drafts one more token.

        Returns:
            the token; None where the text fills the draft model's context window, which may be
            smaller than the target's, or the draft model's logits are not finite.
        """
        if len(self._tokens) >= self.cached.model.context_length:
            return None
        logits = self.cached.logits(self._tokens, len(self._tokens), _never)
        assert logits is not None
        try:
            token = self._drafted(logits[0, : self._vocab_size])
        except NonFiniteLogitsError:
            return None
        self._tokens.append(token)
        return token

    def _drafted(self, logits: Tensor) -> int:
        if not self._rejection:
            return self._sampler.token(logits, self._tokens)
        # rounded as it will be sent, so that the draft is drawn from the same numbers that it is
        # tested with
        self._proposal = self._sampler.probs(logits, self._tokens).astype("float32")
        seed, position = self._sampler.config.seed, len(self._tokens)
        uniform = float(uniforms(seed, position, DRAFT_STREAM, 1)[0])
        return draw(self._proposal.astype("float64"), uniform)


def load_target(
    folder: Path, spec: ModelSpec, threads: int, kept: KeptAs | None = None
) -> ModelTarget:
    """Loads the target, in the process of the worker that serves it.

    Args:
        folder: of the checkpoint.
        spec: how the model is opened.
        threads: threads of CPU arithmetic.
        kept: see CachedModel.
    """
    return ModelTarget(_load(folder, spec, threads), kept)


def load_drafter(
    folder: Path, spec: ModelSpec, threads: int, vocab_size: int, kept: KeptAs | None = None
) -> ModelDrafter:
    """Loads the draft model, in the process of the worker that drafts with it.

    Args:
        folder: of the checkpoint.
        spec: how the model is opened.
        threads: threads of CPU arithmetic.
        vocab_size: of the target; ids from there on are never drafted.
        kept: see CachedModel.
    """
    return ModelDrafter(_load(folder, spec, threads), vocab_size, kept)


def _load(folder: Path, spec: ModelSpec, threads: int) -> StreamedModel:
    import torch

    torch.set_num_threads(threads)
    return spec.open(read_checkpoint(folder))
