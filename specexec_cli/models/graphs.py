"""Draft steps over static tensors, so that a GPU can replay them as CUDA graphs.

A draft step runs a few rows through a small model. On a GPU, launching its hundreds of kernels one
by one takes longer than running them. A graph launches them together, but its addresses and shapes
are fixed. So rows are padded to a bucket size, inputs are in fixed buffers, and a tensor names the
cache slots that the rows' keys and values go to. One graph is captured for each bucket size. It
serves all prompts, and lasts until a cache that it reads outgrows its buffers.

On a CPU the same steps run without capture, which lets tests compare them with plain passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from specexec_kernels import dispatch
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
    """Runs a resident model's passes: those of few rows as steps, longer ones as plain passes.

    Args:
        cache: the model's cache, to which nobody else may append.
        capture: whether to replay steps as CUDA graphs.
    """

    def __init__(self, model: StreamedModel, cache: SlotCache, capture: bool) -> None:
        self._model = model
        self._cache = cache
        self._capture = capture
        self.prepared: dict[int, Step] = {}
        self._moves = 0  # StepPlaces.moves when the steps were captured
        # All captures share one memory pool and one stream: no two steps run at once, and a step's
        # result is copied before the next step.
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self._stream: Any = None
        if capture:
            self._stream = torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]

    def forward(self, rows: PassRows, logit_rows: Sequence[int]) -> Tensor:
        """As StreamedModel.forward, on the runner's cache."""
        use_device(self._model.device)
        count = len(rows.tokens)
        bucket = next((size for size in BUCKETS if size >= count), None)
        if not self._cache.is_initialized:  # no pass has reached the last layer yet
            return self._model.forward(rows, self._cache, logit_rows)
        places = self._cache.places
        # one more slot, the last, takes the padding rows
        capacity = self._cache.zeroed_capacity_for(places.filled + count + 1, _CAPACITY)
        if capacity != self._cache.zeroed_capacity or places.moves != self._moves:
            self._forget()  # before the buffers that the steps point to are freed
            self._moves = places.moves
        if capacity != self._cache.zeroed_capacity:
            self._cache.grow_zeroed(capacity)
        if bucket is None:
            return self._model.forward(rows, self._cache, logit_rows)
        step = self.prepared.get(bucket) or Step(self._model, self._cache, bucket)
        step.load(rows, logit_rows)
        if step.replay is None:
            step.replay = self._captured(step) if self._capture else step.run
            self.prepared[bucket] = step  # only after a capture that succeeded
        step.replay()
        self._cache.advance(count)
        return step.wanted_logits(len(logit_rows))

    def _forget(self) -> None:
        """Drops all steps, and their pool with them: none may record to a pool that has no graph
        left."""
        if self.prepared and self._capture:  # an interrupted one may still read pinned memory
            torch.cuda.current_stream().synchronize()
        self.prepared.clear()
        if self._capture:
            self._pool = torch.cuda.graph_pool_handle()

    def _captured(self, step: Step) -> Callable[[], None]:
        try:
            with clear_shortage("it ran out while a draft step was being recorded"):
                return step.captured(self._pool, self._stream)
        except BaseException:
            # after a failure the allocator may believe that this pool is still being recorded to,
            # and refuse to record to it again
            self._pool = torch.cuda.graph_pool_handle()
            raise


class Step:
    """Static inputs and outputs of steps of up to `bucket` rows.

    All inputs of a step form one block of bytes, which is filled in pinned memory. The step's first
    kernel reads it there, past the weights that wait for the copy engine; without Triton, or where
    the driver pins no memory, it is uploaded before the step. It holds tokens, positions, cache
    slots and the rows whose logits are wanted, (bucket,) int64 each. For each span of the model it
    also holds one bit for every row and slot, set where the row attends; the device makes masks
    from these bits.
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
        self._reads_host = dispatch.uses_triton(model.device) and self._host.is_pinned()
        self._read: Any = None  # the event recorded behind the last step, which has read the block
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
        """Copies the rows into the inputs; padding rows attend only to the padding slot."""
        if self._read is not None and not self._read.query():
            self._read.synchronize()  # the pinned memory is about to be overwritten
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
        if not self._reads_host:
            self._block.copy_(self._host, non_blocking=True)

    def run(self) -> None:
        """Computes one step kernel by kernel, without a captured graph."""
        if self._reads_host:
            from specexec_kernels.triton_pinned import read_pinned

            read_pinned(self._block, self._host)
        visible = (self._bits >> self._bit_places) & 1  # (spans, 1, 1, bucket, bytes, 8)
        dense = visible.flatten(-2).view(torch.bool)[..., : self._columns]
        masks = {
            span: self._model.context.dense(mask)
            for span, mask in zip(self._spans, dense.unbind(), strict=True)
        }
        with self._cache.writing_to(self._slots):
            self.logits = self._model.step(self._tokens, self._positions, masks, self._cache)

    def wanted_logits(self, count: int) -> Tensor:
        """(count, vocab) float32 logits of the first `count` rows that load() was asked for."""
        if self._model.device.type == "cuda":
            self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._read.record(torch.cuda.current_stream())
        return self.logits.index_select(0, self._wanted[:count])

    def captured(self, pool: Any, side: Any) -> Callable[[], None]:
        """Captures a step; the first replay computes again what the warm-up runs have computed.

        Args:
            pool: the memory pool of all graphs.
            side: the stream to capture on.
        """
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        try:
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    self.run()
        except BaseException:
            side.synchronize()  # what it reads is about to be freed
            raise
        here.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with _capturing(graph, pool, side):
            self.run()
        replay: Callable[[], None] = graph.replay
        return replay


def _pinned(n_bytes: int, device: torch.device) -> Tensor:
    """(n_bytes,) uint8 zeros in RAM, pinned for a GPU if its driver allows it."""
    plain = torch.zeros(n_bytes, dtype=torch.uint8)
    if device.type != "cuda":
        return plain
    try:
        return plain.pin_memory()
    except RuntimeError:  # no more memory can be pinned: uploads are slower, but still right
        return plain


@contextmanager
def _capturing(graph: Any, pool: Any, side: Any) -> Iterator[None]:
    """torch.cuda.graph, with the first error raised and the stream restored if the capture fails.

    torch.cuda.graph ends the capture before it restores the current stream. Ending a failed capture
    raises another error, which would hide the first one and leave `side` current.
    """
    here = torch.cuda.current_stream()
    failure: BaseException | None = None
    try:
        # thread_local: other threads may copy weights to the device during the capture
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
        del failure  # the error refers to this frame, which would keep its tensors alive
