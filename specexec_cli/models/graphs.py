"""Passes of few rows over static tensors, so that a GPU can replay them as CUDA graphs.

On a GPU, launching the hundreds of kernels of such a pass one by one takes longer than running
them. A graph launches them together, but its addresses and shapes are fixed. So rows are padded to
the size of a bucket, inputs are in fixed buffers, and a tensor names the cache slots that the rows'
keys and values go to. One graph is captured for each bucket. It serves all prompts, and lasts until
a cache that it reads outgrows its buffers.

A draft model's steps attend under masks of all slots; a target's passes take the kernel that all of
its passes take (attention.py), so that a row has the bits that it has in any other pass.

On a CPU a draft model's steps run without capture, which lets tests compare them with plain passes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from specexec_kernels import dispatch
from specexec_kernels.tree_attention import COLUMNS, TreeMask
from torch import Tensor

from specexec_cli.errors import clear_shortage
from specexec_cli.models import attention
from specexec_cli.models.kv_cache import SlotCache, StepPlaces
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.link import use_device
from specexec_cli.planning.memory import PASS_ROWS, STEP_ROWS, STEP_SLOTS

_CAPACITY = STEP_SLOTS  # slots of a draft model's first buffers
_NUMBERS = 4  # integers of each row among a step's inputs
# Runs before a capture, in which libraries take their workspaces and kernels are loaded: three, as
# PyTorch's documentation of CUDA graphs asks; of a target, whose first pass did most of it, one.
_WARM_UPS, _TARGET_WARM_UPS = 3, 1
_LEVELS = 32  # of a tree: graphs are captured for multiples of so many
_LEAST_ABOUT = 1024  # tokens before a tree: graphs are captured again where twice as many are


class _Runner:
    """Runs a model's passes of few rows as steps, and keeps the steps that it has prepared.

    Args:
        cache: the state of the text whose passes they are.
        capture: whether to replay steps as CUDA graphs.
    """

    def __init__(self, model: StreamedModel, cache: SlotCache, capture: bool) -> None:
        cache.keep_in_one_piece()
        self._model = model
        self._cache = cache
        self._capture = capture
        self.prepared: dict[Hashable, Step] = {}
        self._warm_ups = _WARM_UPS
        self._moves = 0  # how often buffers had been replaced when the steps were captured
        # All captures share one memory pool and one stream: no two steps run at once, and a step's
        # result is copied before the next step.
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self._stream: Any = None
        if capture:
            self._stream = torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]

    def _run(
        self, key: Hashable, make: Callable[[], Step], rows: PassRows, logit_rows: Sequence[int]
    ) -> Tensor:
        step = self.prepared.get(key) or make()
        step.load(rows, logit_rows)
        if step.replay is None:
            step.replay = self._captured(step) if self._capture else step.run
            self.prepared[key] = step  # only after a capture that succeeded
        try:
            step.replay()
        finally:
            step.note_read()
        self._cache.advance(len(rows.tokens))
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
            with clear_shortage("it ran out while a pass was being recorded"):
                return step.captured(self._pool, self._stream, self._warm_ups)
        except BaseException:
            # after a failure the allocator may believe that this pool is still being recorded to,
            # and refuse to record to it again
            self._forget()
            raise


class StepRunner(_Runner):
    """Runs a draft model's passes: those of few rows as steps, longer ones as plain passes.

    Nobody else may append to its cache.
    """

    def forward(self, rows: PassRows, logit_rows: Sequence[int]) -> Tensor:
        """As StreamedModel.forward, on the runner's cache."""
        use_device(self._model.device)
        count = len(rows.tokens)
        bucket = next((size for size in STEP_ROWS if size >= count), None)
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
        return self._run(bucket, lambda: self._step(bucket), rows, logit_rows)

    def _step(self, bucket: int) -> Step:
        return Step(self._model, self._cache, bucket, SlotBits(self._model, self._cache, bucket))


class PassRunner(_Runner):
    """Runs a target's passes over layers that all stay on a GPU: of a token or a tree as steps.

    Whether there is memory for steps is planned (planning/placement.py). Where another program has
    taken it meanwhile, or a layer does what no graph can hold, passes go on without.

    Args:
        notice: told, in one line, if a pass could not be recorded.
    Attributes:
        obstacle: why passes go on without; empty while nothing is known that is in their way.
    """

    def __init__(
        self,
        model: StreamedModel,
        cache: SlotCache,
        notice: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__(model, cache, capture=True)
        self._notice = notice
        self._warm_ups = _TARGET_WARM_UPS
        self._first = True  # whether the first pass, which binds parameters, is still to come
        self._logits: Tensor | None = None  # (most rows, vocab) of the last replay, of any graph
        self.obstacle = ""

    def forward(self, rows: PassRows, logit_rows: Sequence[int]) -> Tensor:
        """As StreamedModel.forward, on the runner's cache."""
        count, cache, model = len(rows.tokens), self._cache, self._model
        bucket = next((size for size in PASS_ROWS if size >= count), None)
        prompt = count > 1 and not rows.tree_mask.size  # once a text
        if bucket is None or prompt or not cache.is_initialized or not self._takes_steps(bucket):
            logits = model.forward(rows, cache, logit_rows)
            self._first = False
            return logits
        use_device(model.device)
        length = cache.length
        if cache.capacity < length + count:
            self._forget()  # before the buffers that the steps point to are freed
            cache.make_room(length + count)
        if (moves := sum(layer.moves for layer in cache.layers)) != self._moves:
            self._forget()
            self._moves = moves
        levels = about = 0
        if count > 1:
            deepest = rows.tree_mask.sum(1).max(initial=1)
            levels = -(-int(deepest) // _LEVELS) * _LEVELS
            about = max(_LEAST_ABOUT, 1 << length.bit_length())
        key = bucket, levels, about
        model.on_layer(0)
        try:
            logits = self._run(key, lambda: self._step(*key), rows, logit_rows)
        except Exception as error:
            if key in self.prepared:
                raise  # it is recorded: what failed is the pass
            self._give_up(str(error) or type(error).__name__)
            cache.crop(length)
            if model.source is not None:
                model.source.restart()
            return model.forward(rows, cache, logit_rows)
        model.on_layer(len(model.layers) - 1)
        return logits

    def _give_up(self, obstacle: str) -> None:
        """Has all passes go on without, and gives memory back."""
        self.obstacle = obstacle
        self._forget()
        self._logits = None
        torch.cuda.empty_cache()
        self._notice(
            "passes are started kernel by kernel from here on, which takes longer: the GPU could "
            f"record none ({obstacle.splitlines()[0]})"
        )

    def _captured(self, step: Step) -> Callable[[], None]:
        told, self._model.on_layer = self._model.on_layer, lambda index: None
        try:
            return super()._captured(step)
        finally:
            self._model.on_layer = told

    def _takes_steps(self, bucket: int) -> bool:
        """Whether passes are replayed; what a model's parameters are is known behind a pass."""
        if self._first or self.obstacle or bucket > self._model.context.chunk_rows:
            return False
        if not self.prepared:
            if not dispatch.uses_triton(self._model.device):
                self.obstacle = "Triton's kernels do not run"
            elif not self._model.capturable:
                self.obstacle = "the model's passes cannot be captured"
        return not self.obstacle

    def _step(self, bucket: int, levels: int, about: int) -> Step:
        if self._logits is None:
            sizes = PASS_ROWS[-1], self._model.vocab_size
            self._logits = torch.empty(sizes, dtype=torch.float32, device=self._model.device)
        paths = Paths(self._model, bucket, levels, about)
        return Step(self._model, self._cache, bucket, paths, self._logits[:bucket])


class Masks(Protocol):
    """What a step's rows attend to, as bytes among its inputs."""

    n_bytes: int

    def load(self, block: NDArray[np.uint8], rows: PassRows) -> None:
        """Writes the masks of some rows, and of the padding rows behind them, into (n_bytes,)."""

    def read(self, block: Tensor) -> dict[Any, Any]:
        """The mask of each span of the model, from (n_bytes,) uint8 on the device."""

    def padding_slot(self, places: StepPlaces, count: int) -> int:
        """The slot that padding rows behind `count` rows are written to."""


class SlotBits:
    """One bit for each span of the model, row and slot, set where the row attends; the device makes
    masks from them. Padding rows attend only to the padding slot."""

    def __init__(self, model: StreamedModel, cache: SlotCache, bucket: int) -> None:
        self._context, self._cache = model.context, cache
        self._spans = sorted(model.spans, key=str)
        self._bucket, self._columns = bucket, cache.places.columns
        self._column_bytes = -(-self._columns // 8)
        self.n_bytes = len(self._spans) * bucket * self._column_bytes
        self._bits = torch.arange(8, dtype=torch.uint8, device=model.device)

    def load(self, block: NDArray[np.uint8], rows: PassRows) -> None:
        """See Masks."""
        count, places = len(rows.tokens), self._cache.places
        parts = block.reshape(len(self._spans), self._bucket, -1)
        for span, packed in zip(self._spans, parts, strict=True):
            mask = np.zeros((self._bucket, self._columns), dtype=bool)
            visible = rows.mask(0, count, span)[0, 0].numpy()
            seen = visible[:, places.shared :]
            mask[:count, : places.shared] = visible[:, : places.shared]
            mask[:count, places.others : places.others + seen.shape[1]] = seen
            mask[count:, -1] = True
            packed[:] = np.packbits(mask, axis=1, bitorder="little")

    def read(self, block: Tensor) -> dict[Any, Tensor]:
        """See Masks."""
        shape = len(self._spans), 1, 1, self._bucket, self._column_bytes, 1
        visible = (block.view(shape) >> self._bits) & 1
        dense = visible.flatten(-2).view(torch.bool)[..., : self._columns]
        return {
            span: self._context.dense(mask)
            for span, mask in zip(self._spans, dense.unbind(), strict=True)
        }

    def padding_slot(self, places: StepPlaces, count: int) -> int:
        """The last, which no row has."""
        return places.own - 1


class Paths:
    """The table of a TreeMask for each span of the model. Padding rows see what the last row sees.

    Args:
        levels: as many as the tables have room for.
        about: as in TreeMask.
    """

    def __init__(self, model: StreamedModel, bucket: int, levels: int, about: int) -> None:
        self._spans = sorted(model.spans, key=str)
        self._shape = len(self._spans), bucket, COLUMNS + levels
        self.n_bytes = 4 * len(self._spans) * bucket * (COLUMNS + levels)
        self._about = about

    def load(self, block: NDArray[np.uint8], rows: PassRows) -> None:
        """See Masks."""
        count, here = len(rows.tokens), torch.device("cpu")
        tables = block.view(np.int32).reshape(self._shape)
        for span, table in zip(self._spans, tables, strict=True):
            found = attention.tree_mask(rows, 0, count, span, here).table
            table[:count, : found.shape[1]] = found.numpy()
            table[count:] = table[count - 1]

    def read(self, block: Tensor) -> dict[Any, TreeMask]:
        """See Masks."""
        tables = block.view(torch.int32).view(self._shape)
        return {
            span: TreeMask(table, self._about)
            for span, table in zip(self._spans, tables.unbind(), strict=True)
        }

    def padding_slot(self, places: StepPlaces, count: int) -> int:
        """The last row's, whose keys and values padding rows have too."""
        return places.filled + count - 1


class Step:
    """Static inputs and outputs of passes of up to `bucket` rows.

    All inputs of a step form one block of bytes, which is filled in pinned memory. The step's first
    kernel reads it there, past the weights that wait for the copy engine; without Triton, or where
    the driver pins no memory, it is uploaded before the step. It holds tokens, positions, cache
    slots and the rows whose logits are wanted, (bucket,) int64 each, then the masks, and the rows'
    embeddings where their table is in RAM. Padding rows are the last row once more.
    """

    def __init__(
        self,
        model: StreamedModel,
        cache: SlotCache,
        bucket: int,
        masks: Masks,
        logits: Tensor | None = None,
    ) -> None:
        """Lays out the inputs.

        Args:
            logits: (bucket, vocab) float32, to which results are copied; each step has its own
                where none are given.
        """
        self._model = model
        self._cache = cache
        self._masks = masks
        self._table = model.table_in_ram
        sizes = _NUMBERS * 8 * bucket, masks.n_bytes
        begins = sizes[0], sizes[0] + -(-sizes[1] // 8) * 8  # of masks, and of embeddings
        table_bytes = 0 if self._table is None else bucket * self._table[0].nbytes
        self._host = _pinned(begins[1] + table_bytes, model.device)
        self._reads_host = dispatch.uses_triton(model.device) and self._host.is_pinned()
        self._read: Any = None  # the event recorded behind the last step, which has read the block
        self._block = torch.zeros(len(self._host), dtype=torch.uint8, device=model.device)

        def parts(block: Tensor) -> list[Tensor]:
            numbers, masks = block[: begins[0]], block[begins[0] : begins[0] + sizes[1]]
            return [numbers.view(torch.int64).view(_NUMBERS, bucket), masks, block[begins[1] :]]

        self._inputs = [part.numpy() for part in parts(self._host)]
        numbers, self._own_masks, looked_up = parts(self._block)
        self._tokens, self._positions = numbers[:2, None]
        self._slots, self._wanted = numbers[2:]
        self._looked_up: Tensor | None = None
        if self._table is not None:
            self._looked_up = looked_up.view(self._table.dtype).view(bucket, -1)
        self._shared_logits = logits
        self.logits = torch.empty(0)
        self.replay: Callable[[], None] | None = None

    def load(self, rows: PassRows, logit_rows: Sequence[int]) -> None:
        """Copies the rows into the inputs."""
        if self._read is not None and not self._read.query():
            self._read.synchronize()  # the pinned memory is about to be overwritten
        count, places = len(rows.tokens), self._cache.places
        numbers, masks, looked_up = self._inputs
        for line, values in ((0, rows.tokens), (1, rows.positions)):
            numbers[line, :count], numbers[line, count:] = values, values[-1]
        numbers[2] = self._masks.padding_slot(places, count)
        numbers[2, :count] = np.arange(places.filled, places.filled + count)
        numbers[3] = 0
        numbers[3, : len(logit_rows)] = logit_rows
        self._masks.load(masks, rows)
        if self._table is not None:
            found = self._table[torch.from_numpy(numbers[0])]
            looked_up[:] = found.view(torch.uint8).view(-1).numpy()
        if not self._reads_host:
            self._block.copy_(self._host, non_blocking=True)

    def run(self) -> None:
        """Computes one step kernel by kernel, without a captured graph."""
        if self._reads_host:
            from specexec_kernels.triton_pinned import read_pinned

            read_pinned(self._block, self._host)
        masks = self._masks.read(self._own_masks)
        with self._cache.writing_to(self._slots):
            logits = self._model.step(
                self._tokens, self._positions, masks, self._cache, self._looked_up
            )
        if self._shared_logits is None:
            self.logits = logits
        else:
            self.logits = self._shared_logits.copy_(logits)

    def note_read(self) -> None:
        """Notes that what has been started by now reads the inputs."""
        if self._model.device.type == "cuda":
            self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._read.record(torch.cuda.current_stream())

    def wanted_logits(self, count: int) -> Tensor:
        """(count, vocab) float32 logits of the first `count` rows that load() was asked for."""
        return self.logits.index_select(0, self._wanted[:count])

    def captured(self, pool: Any, side: Any, warm_ups: int) -> Callable[[], None]:
        """Captures a step; the first replay computes again what the warm-up runs have computed.

        Args:
            pool: the memory pool of all graphs.
            side: the stream to capture on.
            warm_ups: runs before the capture.
        """
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        try:
            with torch.cuda.stream(side):
                for _ in range(warm_ups):
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
