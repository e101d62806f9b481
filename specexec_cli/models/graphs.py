"""Draft steps over static tensors, so that a GPU can replay them as CUDA graphs.

A draft step runs a handful of rows through a small model: on a GPU, launching its hundreds of
kernels one by one takes longer than running them. A graph launches them together, but holds
addresses and shapes: so rows are padded to a bucket, inputs live in fixed buffers, and the rows'
keys and values go to cache slots that a tensor names. One graph is captured per bucket and lasts
until the cache outgrows its buffers, which double, whatever the prompts are.

On a CPU the same steps run without capture; the tests hold them against plain passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from specexec_cli.errors import clear_shortage
from specexec_cli.models.kv_cache import SlotCache
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.planning.memory import STEP_ROWS, STEP_SLOTS

BUCKETS = STEP_ROWS
_CAPACITY = STEP_SLOTS  # slots of the first buffers
_WARM_UPS = 3  # runs before a capture, as PyTorch's documentation of CUDA graphs asks


class StepRunner:
    """Runs passes of few rows of a resident model as steps, the others as they are.

    Args:
        cache: of the model; nobody else may append to it.
        capture: whether to replay steps as CUDA graphs.
    """

    def __init__(self, model: StreamedModel, cache: SlotCache, capture: bool) -> None:
        self._model = model
        self._cache = cache
        self._capture = capture
        self._steps: dict[int, _Step] = {}
        # one memory and one stream for all captures: no two steps run at once, and what a step
        # returns is copied before the next
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self._stream: Any = None
        if capture:
            self._stream = torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]

    def forward(self, rows: PassRows, logit_rows: Sequence[int]) -> Tensor:
        """As StreamedModel.forward on the runner's cache."""
        count = len(rows.tokens)
        bucket = next((size for size in BUCKETS if size >= count), None)
        if not self._cache.is_initialized:  # no pass has come to its last layer yet
            return self._model.forward(rows, self._cache, logit_rows)
        # one slot more, the last, is where padding goes
        capacity = self._cache.zeroed_capacity_for(self._cache.length + count + 1, _CAPACITY)
        if capacity != self._cache.zeroed_capacity:
            self._steps.clear()  # before the buffers go that they point to
            self._cache.grow_zeroed(capacity)
        if bucket is None:
            return self._model.forward(rows, self._cache, logit_rows)
        step = self._steps.get(bucket) or _Step(self._model, self._cache, bucket)
        step.load(rows)
        if step.replay is None:
            step.replay = self._captured(step) if self._capture else step.run
            self._steps[bucket] = step  # a capture that fails leaves none behind
        step.replay()
        self._cache.advance(count)
        return step.logits[list(logit_rows)]

    def _captured(self, step: _Step) -> Callable[[], None]:
        try:
            with clear_shortage("it ran out while a draft step was being recorded"):
                return step.captured(self._pool, self._stream)
        except BaseException:
            # the allocator may go on to take this pool for one that is being recorded to, and
            # then refuses to record to it again
            self._pool = torch.cuda.graph_pool_handle()
            raise


class _Step:
    """Static inputs and outputs of steps of up to `bucket` rows."""

    def __init__(self, model: StreamedModel, cache: SlotCache, bucket: int) -> None:
        self._model = model
        self._cache = cache
        device = model.device
        self._tokens = torch.zeros(1, bucket, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._tokens)
        self._slots = torch.zeros(bucket, dtype=torch.int64, device=device)
        shape = (1, 1, bucket, cache.capacity)
        self._masks = {
            span: model.context.dense(torch.zeros(shape, dtype=torch.bool)) for span in model.spans
        }
        self.logits = torch.empty(0)
        self.replay: Callable[[], None] | None = None

    def load(self, rows: PassRows) -> None:
        """Copies the rows into the inputs; padding attends to the padding slot alone."""
        bucket, count = self._tokens.shape[1], len(rows.tokens)
        padding, padding_slot = [0] * (bucket - count), self._cache.capacity - 1
        self._tokens.copy_(torch.tensor([[*rows.tokens, *padding]]))
        self._positions.copy_(torch.tensor([[*rows.positions, *padding]]))
        slots = range(self._cache.length, self._cache.length + count)
        self._slots.copy_(torch.tensor([*slots, *[padding_slot] * (bucket - count)]))
        for span, static in self._masks.items():
            mask = torch.zeros(static.shape, dtype=torch.bool)
            visible = rows.mask(0, count, span)
            mask[:, :, :count, : visible.shape[3]] = visible
            mask[:, :, count:, padding_slot] = True
            static.copy_(self._model.context.dense(mask))

    def run(self) -> None:
        """Computes one step kernel by kernel, without a captured graph."""
        with self._cache.writing_to(self._slots):
            self.logits = self._model.step(self._tokens, self._positions, self._masks, self._cache)

    def captured(self, pool: Any, side: Any) -> Callable[[], None]:
        """Captures a step; what it computed on the way is computed again by the first replay.

        Args:
            pool: of the graph's memory.
            side: the stream to capture on.
        """
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self.run()
        here.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with _capturing(graph, pool, side):
            self.run()
        replay: Callable[[], None] = graph.replay
        return replay


@contextmanager
def _capturing(graph: Any, pool: Any, side: Any) -> Iterator[None]:
    """torch.cuda.graph, and what it leaves undone where the capture fails.

    It ends the capture before it goes back to the stream that was current. Ending a capture that
    has failed is an error of its own: it would hide the first one, and leave `side` current.
    """
    here = torch.cuda.current_stream()
    failure: BaseException | None = None
    try:
        # other threads copy weights to the device meanwhile: their calls are not part of it
        with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
            try:
                yield
            except BaseException as error:
                failure = error
                raise
    except BaseException:
        torch.cuda.set_stream(here)
        if failure is not None:
            raise failure from None
        raise
    finally:
        del failure  # it refers to this frame, which would keep what is in use alive
