"""Toy models behind the real slots: what a row attends to is read from its mask and positions.

SlotToy stands where a StreamedModel stands, so the real LocalTarget, ModelDrafter and masks run at
the speed of a toy. Every row's context is put together from the slots its mask shows; a slot too
many, too few, or at a wrong position fails at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from toys import NoisyCopy, ToyLM, classifier

from specexec_cli.config import SamplingConfig, TreeConfig
from specexec_cli.decoding import batch
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.drafting.learned import Learned
from specexec_cli.models import graphs, kv_cache
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.sampling import Sampler
from specexec_cli.verify.verifier import LocalTarget


@dataclass
class SlotList:
    """A model's state of (token, position) for each slot, in place of keys and values."""

    slots: list[tuple[int, int]] = field(default_factory=list)
    lost: ClassVar[bool] = False  # it is on no other machine

    @property
    def length(self) -> int:
        return len(self.slots)

    def reserve(self, slots: int) -> None:
        pass

    def keep_at(self, length: int) -> None:
        pass

    def reachable(self, length: int) -> int:
        return min(length, self.length)

    def crop(self, length: int) -> int:
        del self.slots[length:]
        return self.length

    def copy(self, other: SlotList, length: int) -> int:
        assert length <= other.length
        self.slots = other.slots[:length]
        return length

    def commit(self, prefix_len: int, path: Sequence[int]) -> None:
        assert list(path) == sorted(set(path)), "kept slots rise"
        assert all(prefix_len <= slot < len(self.slots) for slot in path)
        self.slots[prefix_len:] = [self.slots[slot] for slot in path]


@dataclass
class SlotToy:
    """A StreamedModel over a toy."""

    model: ToyLM | NoisyCopy
    chunk_rows: int = 512
    context_length: int = 4096
    source: None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    passes: int = 0
    bytes_streamed: int = 0
    read_s: float = 0.0
    reads_hidden_rows: bool = False

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def new_state(self) -> SlotList:
        return SlotList()

    def close(self) -> None:
        pass

    def meanwhile(self, work: Callable[[], None]) -> None:
        work()

    def forward(self, rows: PassRows, cache: SlotList, logit_rows: Sequence[int]) -> Tensor:
        self.passes += 1
        assert max(rows.positions) < self.context_length
        assert max(rows.tokens) < self.vocab_size, "an embedding has no row for it"
        logits = []
        for start in range(0, len(rows.tokens), self.chunk_rows):
            stop = min(start + self.chunk_rows, len(rows.tokens))
            cache.slots += zip(
                list(rows.tokens)[start:stop], list(rows.positions)[start:stop], strict=True
            )
            mask = rows.mask(start, stop, None)[0, 0].numpy()
            assert mask.shape == (stop - start, cache.length)
            logits += [self.model.logits(self._context(cache, row)) for row in mask]
        return torch.from_numpy(np.stack([logits[row] for row in logit_rows]))

    def forward_together(
        self, texts: Sequence[tuple[PassRows, SlotList, Sequence[int]]]
    ) -> list[Tensor]:
        caches = [cache for _, cache, _ in texts]
        assert len(set(map(id, caches))) == len(caches), "no two texts share a cache"
        found = [self.forward(*text) for text in texts]
        self.passes -= len(texts) - 1
        return found

    def _context(self, cache: SlotList, attended: np.ndarray) -> list[int]:
        seen = sorted(cache.slots[slot][::-1] for slot in np.flatnonzero(attended))
        assert [position for position, _ in seen] == list(range(len(seen))), "a path, from 0 on"
        return [token for _, token in seen]


def slot_target(model: ToyLM, chunk_rows: int = 512) -> LocalTarget:
    return LocalTarget(SlotToy(model, chunk_rows))  # type: ignore[arg-type]


def slot_drafter(
    model: ToyLM | NoisyCopy,
    sampling: SamplingConfig,
    tree: TreeConfig,
    chunk_rows: int = 512,
    context_length: int = 4096,
) -> ModelDrafter:
    toy = SlotToy(model, chunk_rows, context_length)
    return ModelDrafter(
        toy,  # type: ignore[arg-type]
        Sampler(sampling),
        tree,
        model.vocab_size,
        learned=Learned(classifier),
    )


def few_slots(
    patch: pytest.MonkeyPatch, steps: int, *, planned: int | None = None, growth: int | None = None
) -> None:
    """Buffers begin so small that short texts outgrow them.

    Args:
        steps: slots of the first buffers of draft steps.
        planned: slots of those whose most slots are known beforehand; None leaves them as they are.
        growth: slots by which a cache grows where nobody reserved any; None leaves that as it is.
    """
    for module, name, slots in (
        (graphs, "_CAPACITY", steps),
        (kv_cache, "STEP_SLOTS", planned),
        (kv_cache, "_GROWTH_SLOTS", growth),
    ):
        if slots is not None:
            patch.setattr(module, name, slots)


def prompt_rows(patch: pytest.MonkeyPatch, rows: int) -> None:
    """Prompts of several texts come in chunks of so many rows, whatever a pass takes."""
    for name in ("_LEAST_ROWS", "_MOST_ROWS", "_ROWS", "PROMPT_ROWS"):
        patch.setattr(batch, name, rows)
