"""Draft steps over static tensors, so that a GPU can replay them as CUDA graphs.

A draft step runs a handful of rows through a small model: on a GPU, launching its hundreds of
kernels one by one takes longer than running them. A graph launches them together, but holds
addresses and shapes: so rows are padded to a bucket, inputs live in fixed buffers, and the rows'
keys and values go to cache slots that a tensor names. One graph is captured per bucket, whatever
the prompts are, and lasts until a cache that it reads outgrows its buffers.

On a CPU the same steps run without capture; the tests hold them against plain passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specexec_cli.errors import clear_shortage
from specexec_cli.models.kv_cache import SlotCache
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.link import use_device
from specexec_cli.planning.memory import STEP_ROWS, STEP_SLOTS

BUCKETS = STEP_ROWS
_CAPACITY = STEP_SLOTS  # slots of the first buffers
_NUMBERS = 4  # integers of each row among a step's inputs
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
        self._moves = 0  # of the buffers of another cache whose rows are read
        # one memory and one stream for all captures: no two steps run at once, and what a step
        # returns is copied before the next
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self._stream: Any = None
        if capture:
            self._stream = torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]

    def forward(self, rows: PassRows, logit_rows: Sequence[int]) -> Tensor:
        """As StreamedModel.forward on the runner's cache."""
        use_device(self._model.device)
        count = len(rows.tokens)
        bucket = next((size for size in BUCKETS if size >= count), None)
        if not self._cache.is_initialized:  # no pass has come to its last layer yet
            return self._model.forward(rows, self._cache, logit_rows)
        places = self._cache.places
        # one slot more, the last, is where padding goes
        capacity = self._cache.zeroed_capacity_for(places.filled + count + 1, _CAPACITY)
        if capacity != self._cache.zeroed_capacity or places.moves != self._moves:
            self._steps.clear()  # before the buffers go that they point to
            self._moves = places.moves
        if capacity != self._cache.zeroed_capacity:
            self._cache.grow_zeroed(capacity)
        if bucket is None:
            return self._model.forward(rows, self._cache, logit_rows)
        step = self._steps.get(bucket) or _Step(self._model, self._cache, bucket)
        step.load(rows, logit_rows)
        if step.replay is None:
            step.replay = self._captured(step) if self._capture else step.run
            self._steps[bucket] = step  # a capture that fails leaves none behind
        step.replay()
        self._cache.advance(count)
        return step.wanted_logits(len(logit_rows))

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
    """Static inputs and outputs of steps of up to `bucket` rows.

    All inputs of a step are one block of bytes: tokens, positions, cache slots and the rows whose
    logits are wanted, (bucket,) int64 each, and for each span of the model a bit for every row and
    slot, set where the row attends. It is put together in pinned memory and goes to the device by
    one copy; masks are made of the bits there.
    """

    def __init__(self, model: StreamedModel, cache: SlotCache, bucket: int) -> None:
        self._model = model
        self._cache = cache
        self._bucket = bucket
        self._spans = sorted(model.spans, key=str)
        self._columns = cache.places.columns
        column_bytes = -(-self._columns // 8)
        n_bytes = _NUMBERS * 8 * bucket + len(self._spans) * bucket * column_bytes
        self._host = _pinned(n_bytes, model.device)
        self._uploaded: Any = None  # the event behind the last upload
        self._block = torch.zeros(n_bytes, dtype=torch.uint8, device=model.device)
        numbers = self._block[: _NUMBERS * 8 * bucket].view(torch.int64).view(_NUMBERS, 1, bucket)
        self._tokens, self._positions = numbers[0], numbers[1]
        self._slots, self._wanted = numbers[2, 0], numbers[3, 0]
        bits = self._block[_NUMBERS * 8 * bucket :]
        self._bits = bits.view(len(self._spans), 1, 1, bucket, column_bytes, 1)
        self._bit_places = torch.arange(8, dtype=torch.uint8, device=model.device)
        self.logits = torch.empty(0)
        self.replay: Callable[[], None] | None = None

    def load(self, rows: PassRows, logit_rows: Sequence[int]) -> None:
        """Copies the rows into the inputs; padding attends to the padding slot alone."""
        if self._uploaded is not None:
            self._uploaded.synchronize()  # what it copies from is written anew
        bucket, count = self._bucket, len(rows.tokens)
        places = self._cache.places
        block = self._host.numpy()
        numbers = block[: _NUMBERS * 8 * bucket].view(np.int64).reshape(_NUMBERS, bucket)
        numbers[:] = 0
        numbers[0, :count], numbers[1, :count] = rows.tokens, rows.positions
        numbers[2] = places.own - 1
        numbers[2, :count] = np.arange(places.filled, places.filled + count)
        numbers[3, : len(logit_rows)] = logit_rows
        bits = block[_NUMBERS * 8 * bucket :].reshape(len(self._spans), bucket, -1)
        for span, packed in zip(self._spans, bits, strict=True):
            mask = np.zeros((bucket, self._columns), dtype=bool)
            visible = rows.mask(0, count, span)[0, 0].numpy()
            own = visible[:, places.shared :]
            mask[:count, : places.shared] = visible[:, : places.shared]
            mask[:count, places.others : places.others + own.shape[1]] = own
            mask[count:, -1] = True
            packed[:] = np.packbits(mask, axis=1, bitorder="little")
        self._block.copy_(self._host, non_blocking=True)
        if self._model.device.type == "cuda":
            self._uploaded = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._uploaded.record(torch.cuda.current_stream())

    def run(self) -> None:
        """Computes one step kernel by kernel, without a captured graph."""
        visible = (self._bits >> self._bit_places) & 1  # (spans, 1, 1, bucket, bytes, 8)
        dense = visible.flatten(-2).view(torch.bool)[..., : self._columns]
        masks = {
            span: self._model.context.dense(mask)
            for span, mask in zip(self._spans, dense.unbind(), strict=True)
        }
        with self._cache.writing_to(self._slots):
            self.logits = self._model.step(self._tokens, self._positions, masks, self._cache)

    def wanted_logits(self, count: int) -> Tensor:
        """(count, vocab) float32, of the rows that load() was told of."""
        return self.logits.index_select(0, self._wanted[:count])

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


def _pinned(n_bytes: int, device: torch.device) -> Tensor:
    """(n_bytes,) uint8 zeros in RAM, pinned for a GPU where its driver grants it."""
    plain = torch.zeros(n_bytes, dtype=torch.uint8)
    if device.type != "cuda":
        return plain
    try:
        return plain.pin_memory()
    except RuntimeError:  # the limit on pinned memory is met: the upload waits, and is right
        return plain


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
