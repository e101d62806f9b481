"""Draws the target's token at a position, with noise keyed by (seed, position).

The token at absolute position i is the arg max over filtered logits plus Gumbel noise, and the
noise is a function of (seed, i) alone. So the text depends on target, prompt and seed, and not on
how the logits were computed: autoregressive decoding, chains and trees of any size agree token by
token. This module knows no model and no tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from specexec_kernels import cpu_gumbel, dispatch
from specexec_kernels.nucleus import nucleus
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specexec_cli.config import SamplingConfig
from specexec_cli.core import TokenLogprobs
from specexec_cli.errors import NonFiniteLogitsError
from specexec_cli.transfers import downloaded, sent

# Rows of a tree that are drawn at a time: their scores and noise take the vocabulary's width each,
# which no plan counts.
_DRAWN_ROWS = 4
# Positions whose noise is drawn before it is asked for, where the CPU draws it for a GPU.
_AHEAD = 8


@lru_cache(maxsize=64)
def gumbel_noise(seed: int, position: int, vocab_size: int) -> Tensor:
    """Standard Gumbel noise of one position, as specexec_kernels.gumbel defines it.

    A larger vocabulary extends the same sequence, so target and draft model may pad their
    vocabularies differently.

    Returns:
        (vocab_size,) float32 on the CPU. Callers share it, so it must not be written to.
    Source: Gumbel-max: Maddison et al., arXiv:1411.0030, section 2.
    """
    return cpu_gumbel.gumbel_noise(seed, position, vocab_size)


def noise_on(device: torch.device, seed: int, position: int, vocab_size: int) -> Tensor:
    """gumbel_noise on a device, where it is kept for other rows that predict the position.

    A GPU draws it itself, the same bits. Without Triton a thread draws it, and that of the
    positions to come, while the GPU computes.
    """
    if device.type == "cpu":
        return gumbel_noise(seed, position, vocab_size)
    return noise_there(device, seed, position, vocab_size)


@lru_cache(maxsize=64)
def noise_there(device: torch.device, seed: int, position: int, vocab_size: int) -> Tensor:
    """noise_on, of a GPU."""
    if dispatch.uses_triton(device):
        from specexec_kernels import triton_gumbel

        drawn = torch.empty(vocab_size, dtype=torch.float32, device=device)
        triton_gumbel.gumbel_noise(drawn, seed, position)
        return drawn
    ahead = [_drawn(seed, position + more, vocab_size) for more in range(1 + _AHEAD)]
    return sent(ahead[0].result(), device)


@lru_cache(maxsize=64)
def _drawn(seed: int, position: int, vocab_size: int) -> Future[Tensor]:
    """The noise of a position, from a thread of its own: compiled code lets others run."""
    return _drawing_thread().submit(gumbel_noise, seed, position, vocab_size)


@cache
def _drawing_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="specexec-noise")


def uniforms(seed: int, position: int, stream: int, count: int) -> NDArray[np.float64]:
    """Uniform numbers of one position, independent of its Gumbel noise and of other streams.

    Args:
        stream: number of the stream, 1 or more.
        count: how many numbers.
    Returns:
        (count,) above 0 and below 1.
    """
    words = np.random.Philox(key=seed, counter=[0, position, stream, 0]).random_raw(count)
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


class _TopP:
    """transformers' filter, which on a CPU sorts a row only where no faster way is sure of the same
    result."""

    def __init__(self, top_p: float) -> None:
        self._top_p = top_p
        self._sorting: Callable[[Tensor, Tensor], Tensor] = TopPLogitsWarper(top_p)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if scores.device.type != "cpu":
            return self._sorting(input_ids, scores)
        found = torch.full_like(scores, -torch.inf)
        for own, row in zip(found, scores, strict=True):
            kept = nucleus(row.numpy(), self._top_p)
            if kept is None:
                own.copy_(self._sorting(input_ids, row[None])[0])
            else:
                tokens = torch.from_numpy(kept)
                own[tokens] = row[tokens]
        return found


class Constraint(Protocol):
    """A grammar for one text: says which tokens may follow."""

    def allowed(self, context: Sequence[int]) -> Tensor:
        """The tokens that may follow a context; always the same for the same context.

        Args:
            context: prompt and text so far, every token of it allowed.
        Returns:
            (tokens,) bool on the CPU, at least one of them True; ids past its end are excluded.
        Raises:
            ConfigError: the grammar cannot be followed any further.
        """


class Sampler:
    """Chooses tokens from the target's logits under one SamplingConfig.

    The filters are transformers' own logits processors in transformers' own order: repetition
    penalty, temperature, top-k, top-p, min-p. A constraint comes before them all.

    Args:
        constraint: excludes tokens, for the target and for the draft model.
        top_logprobs: records how probable each drawn token was under the target's own logits,
            before any filter, and this many of the most probable ones; None records nothing.
    """

    def __init__(
        self,
        config: SamplingConfig,
        constraint: Constraint | None = None,
        top_logprobs: int | None = None,
    ) -> None:
        self.config = config
        self.constraint = constraint
        self._top_logprobs = top_logprobs
        self._records: dict[int, TokenLogprobs] = {}  # by position
        self._penalty = LogitsProcessorList()
        if config.repetition_penalty != 1.0:
            self._penalty.append(RepetitionPenaltyLogitsProcessor(float(config.repetition_penalty)))
        self._temperature = LogitsProcessorList()
        self._truncation = LogitsProcessorList()
        if config.temperature > 0.0:
            if config.temperature != 1.0:
                self._temperature.append(TemperatureLogitsWarper(float(config.temperature)))
            if config.top_k > 0:
                self._truncation.append(TopKLogitsWarper(config.top_k))
            if config.top_p < 1.0:
                self._truncation.append(_TopP(config.top_p))
            if config.min_p > 0.0:
                self._truncation.append(MinPLogitsWarper(config.min_p))

    def filtered(
        self,
        logits: Tensor,
        context: Sequence[int],
        paths: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Logits after every filter; -inf where a token is excluded.

        Args, Returns: as for `tempered`.
        """
        return self.truncated(self.tempered(logits, context, paths))

    @property
    def truncates(self) -> bool:
        """Whether `truncated` excludes improbable tokens: top-k, top-p or min-p are in use."""
        return bool(self._truncation)

    def truncated(self, scores: Tensor) -> Tensor:
        """The result of `tempered`, (rows, vocab), with -inf where top-k, top-p or min-p exclude a
        token."""
        return self._warped(self._truncation, scores)

    def tempered(
        self,
        logits: Tensor,
        context: Sequence[int],
        paths: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Logits after constraint, repetition penalty and temperature, before any token is excluded
        for being improbable.

        Args:
            logits: (rows, vocab) any float dtype.
            context: every token before the position, prompt included; the same for all rows.
            paths: (rows,) for the constraint, the tokens of a tree between the context and each
                row's position; None: no tokens.
        Returns:
            (rows, vocab) float32.
        """
        scores = logits.float()
        if self.constraint is not None:
            scores = self._constrained(scores, context, paths or [()] * len(scores))
        if self._penalty:
            # the context may have ids past the end of a draft model's smaller vocabulary, which not
            # every version of transformers skips
            known = [token for token in context if token < scores.shape[-1]]
            ids = sent(torch.tensor([known], dtype=torch.int64), logits.device)
            # a copy: transformers' processors may write in place
            scores = self._penalty(ids.expand(len(scores), -1), scores.clone())
        return self._warped(self._temperature, scores)

    @staticmethod
    def _warped(warpers: LogitsProcessorList, scores: Tensor) -> Tensor:
        # the warpers do not use the ids
        found: Tensor = warpers(torch.empty(1, 0, dtype=torch.int64), scores)
        return found

    def token(self, logits: Tensor, context: Sequence[int]) -> int:
        """The target's token at position len(context).

        Args:
            logits: (vocab,) the target's raw logits.
            context: every token before the position, prompt included.
        Raises:
            NonFiniteLogitsError: the logits hold NaN or infinities.
        """
        position = len(context)
        scores = self.filtered(logits[None], context)[0]
        if self.config.temperature > 0.0:
            scores = scores + noise_on(scores.device, self.config.seed, position, scores.shape[0])
        drawn = scores.argmax(dim=0, keepdim=True)
        wanted = [_finite(logits), drawn]
        if self._top_logprobs is not None:
            wanted += _logprobs(logits, drawn, self._top_logprobs)
        finite, token, *record = downloaded(wanted).tolist()
        _check_finite(finite, position)
        if self._top_logprobs is not None:
            best = len(record) // 2
            pairs = zip(map(int, record[1 : 1 + best]), record[1 + best :], strict=True)
            self._records[position] = TokenLogprobs(int(token), record[0], tuple(pairs))
        return int(token)

    def draws_rows(self, logits: Tensor) -> bool:
        """Whether `tokens` draws these rows of a tree, with one wait where `token` has one each.

        On a GPU, unless a filter needs a row's path (a constraint, a repetition penalty) or rounds
        by how many rows it is given (top-p's and min-p's sums), rows are recorded, or the CPU draws
        the noise. Those rows are drawn as the walk reaches them: of a tree it reaches few.
        """
        config, device = self.config, logits.device
        if device.type == "cpu" or len(logits) == 1:
            return False
        if self.constraint is not None or self._top_logprobs is not None or self._penalty:
            return False
        if config.temperature == 0.0:
            return True
        return config.top_p == 1.0 and config.min_p == 0.0 and dispatch.uses_triton(device)

    def tokens(
        self, logits: Tensor, depths: Sequence[int], context: Sequence[int]
    ) -> list[int | None]:
        """What `token` draws for each of several rows, which `draws_rows`; waits once.

        Args:
            logits: (rows, vocab) the target's raw logits.
            depths: (rows,) tokens of a tree between the context and each row's position.
            context: every token before the tree.
        Returns:
            (rows,) tokens; None where `token` would raise an error.
        """
        drawn = []
        for rows in range(0, len(depths), _DRAWN_ROWS):
            scores = self.filtered(logits[rows : rows + _DRAWN_ROWS], context)
            if self.config.temperature > 0.0:
                places = [len(context) + depth for depth in depths[rows : rows + _DRAWN_ROWS]]
                noise = [noise_on(scores.device, self.config.seed, place, scores.shape[1])
                         for place in places]  # fmt: skip
                scores = torch.stack(noise).add_(scores)
            drawn.append(scores.argmax(dim=-1))
        extremes = torch.stack(torch.aminmax(logits, dim=-1))
        found = downloaded([torch.cat(drawn)[None], extremes.isfinite().all(dim=0)[None]])[0]
        tokens, finite = found[: len(depths)].tolist(), found[len(depths) :].tolist()
        return [int(token) if fine else None for token, fine in zip(tokens, finite, strict=True)]

    def recorded(self, position: int, count: int) -> tuple[TokenLogprobs, ...]:
        """The records of the tokens at `count` positions from `position` on, each returned once.

        Empty if nothing is recorded.
        """
        if self._top_logprobs is None:
            return ()
        return tuple(self._records.pop(position + index) for index in range(count))

    def _constrained(
        self, scores: Tensor, context: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> Tensor:
        """A copy of the scores, -inf where the constraint excludes a token."""
        assert self.constraint is not None
        allowed = torch.zeros(scores.shape, dtype=torch.bool)
        for row, path in enumerate(paths):
            found = self.constraint.allowed([*context, *path])[: scores.shape[1]]
            allowed[row, : len(found)] = found
        return scores.masked_fill(~sent(allowed, scores.device), float("-inf"))

    def probs(self, logits: Tensor, context: Sequence[int]) -> NDArray[np.float64]:
        """The distribution that `token` draws from, for a temperature above 0.

        Args, Raises: as for `token`.
        Returns:
            (vocab,)
        """
        probs = self.filtered(logits[None], context)[0].double().softmax(-1)
        found = downloaded([_finite(logits), probs])
        _check_finite(found[0], len(context))
        return found[1:]


def _logprobs(logits: Tensor, drawn: Tensor, top: int) -> list[Tensor]:
    """What a record is made of, under the softmax of the logits, (vocab,).

    Args:
        drawn: (1,) the token.
        top: how many of the most probable tokens.
    Returns:
        the token's log-probability, (1,), the most probable tokens, and their log-probabilities.
    """
    log_probs = logits.float().log_softmax(-1)
    best = log_probs.topk(min(top, len(log_probs)))
    return [log_probs.gather(0, drawn), best.indices, best.values]


def _finite(logits: Tensor) -> Tensor:
    """(1,) bool: whether all logits, (vocab,), are finite. The extremes are NaN if one is."""
    return torch.stack(torch.aminmax(logits)).isfinite().all()[None]


def _check_finite(finite: float, position: int) -> None:
    """Raises an error if a position's logits are not all finite."""
    if not finite:
        raise NonFiniteLogitsError(
            f"the target's logits for position {position} are not finite: the checkpoint is "
            "damaged or its values overflow this dtype. Try `dtype='float32'`"
        )
