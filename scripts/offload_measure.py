"""Timed pieces of work on a streamed target, for bench_offload.py. Prints nothing.

A pass is timed from the moment its first layer is ready to the moment the next pass's first layer
is. The ring is emptied before, so that no layer was read earlier for free. On a GPU a layer is
ready when the device has finished all its work, copies for later layers included; that holds for
both moments.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specexec_cli.config import Method, SamplingConfig, TreeConfig
from specexec_cli.core import DraftTree, StepResult
from specexec_cli.decoding.autoregressive import autoregressive
from specexec_cli.decoding.loop import specexec
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.errors import OutOfMemoryError
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.cuda import DeviceStream
from specexec_cli.offload.link import CudaLink
from specexec_cli.offload.memory import HugeBuffer
from specexec_cli.offload.resident import as_blob
from specexec_cli.offload.stream import LayerStream
from specexec_cli.sampling import Sampler
from specexec_cli.verify.verifier import LocalTarget

RAW_PIECE_BYTES = 8 << 20
PREFIX_TOKENS = 64


class RawLink:
    """The floor of a GPU's link: copies a layer's bytes from pinned memory again and again."""

    direct = None  # no files are read

    def __init__(self, device: torch.device, layer_bytes: int, pass_bytes: int) -> None:
        self._layer_bytes, self._pass_bytes = layer_bytes, pass_bytes
        self._link = CudaLink(device)
        self._buffer = HugeBuffer(layer_bytes, "a raw copy", "Close other programs")
        self._source = as_blob(self._buffer)
        if not self._link.register(self._source):
            raise OutOfMemoryError("the driver refuses to pin a layer, so there is no floor")
        self._target = torch.empty(layer_bytes, dtype=torch.uint8, device=device)

    def read(self, share: float) -> tuple[int, float]:
        """Copies `share` of a pass's bytes; returns bytes and seconds."""
        count = max(1, round(share * self._pass_bytes / self._layer_bytes))
        after = self._link.compute_mark()
        self._link.wait(after)
        started = time.perf_counter()
        for _ in range(count):
            after = self._link.copy(self._target, self._source, after)
        self._link.wait(after)
        return count * self._layer_bytes, time.perf_counter() - started

    def close(self) -> None:
        self._link.unregister(self._source)
        del self._source
        self._buffer.close()


class RawReader:
    """The floor of an SSD: reads the files in sequence with O_DIRECT, and does nothing else."""

    def __init__(self, paths: Sequence[Path], memory_bytes: int, readers: int = 2) -> None:
        """Opens the files; where O_DIRECT is refused, they are read through the page cache.

        Args:
            paths: the files.
            memory_bytes: memory of the buffers, at least one piece for each reader.
            readers: number of reading threads.
        """
        self.direct = hasattr(os, "O_DIRECT")
        self._pieces: list[tuple[int, int]] = []
        self._fds = []
        for path in sorted(paths):
            fd = self._open(path)
            self._fds.append(fd)
            size = os.fstat(fd).st_size
            self._pieces += [(fd, start) for start in range(0, size, RAW_PIECE_BYTES)]
        self._next = 0
        self._readers = readers
        self._buffers = deque(
            HugeBuffer(RAW_PIECE_BYTES, "a raw read", "Close other programs")
            for _ in range(max(readers, memory_bytes // RAW_PIECE_BYTES))
        )

    def _open(self, path: Path) -> int:
        if self.direct:
            try:
                return os.open(path, os.O_RDONLY | os.O_DIRECT)
            except OSError:  # tmpfs and the like
                self.direct = False
        return os.open(path, os.O_RDONLY)

    def read(self, share: float) -> tuple[int, float]:
        """Reads `share` of all files from where the last call ended; returns bytes and seconds."""
        count = max(1, round(share * len(self._pieces)))
        first = self._next
        self._next = (first + count) % len(self._pieces)
        work = iter([self._pieces[(first + i) % len(self._pieces)] for i in range(count)])
        lock = threading.Lock()
        done: list[int] = []

        def run() -> None:
            while True:
                with lock:
                    piece, buffer = next(work, None), self._buffers.popleft()
                if piece is not None:
                    done.append(os.preadv(piece[0], [buffer.view], piece[1]))
                self._buffers.append(buffer)
                if piece is None:
                    return

        threads = [threading.Thread(target=run) for _ in range(self._readers)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(done), time.perf_counter() - started

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        for buffer in self._buffers:
            buffer.close()


class TimedSource:
    """A LayerSource that notes when the first layer of a pass was ready."""

    def __init__(self, stream: LayerStream | DeviceStream, synchronize: Callable[[], None]) -> None:
        self.stream = stream
        self._synchronize = synchronize
        self.first_layer_at = 0.0

    @property
    def bytes_streamed(self) -> int:
        return self.stream.bytes_streamed

    @bytes_streamed.setter
    def bytes_streamed(self, value: int) -> None:
        self.stream.bytes_streamed = value

    @contextmanager
    def layer(self, index: int) -> Iterator[Mapping[str, Tensor]]:
        with self.stream.layer(index) as tensors:
            if index == 0:
                self._synchronize()
                self.first_layer_at = time.perf_counter()
            yield tensors

    def restart(self) -> None:
        self.stream.restart()

    def close(self) -> None:
        self.stream.close()


@dataclass
class _OneLayer:
    """A LayerSource that gives the same layer's weights for every layer of a kind."""

    model: StreamedModel
    held: Mapping[int, Mapping[str, Tensor]]  # the first layer of each kind
    bytes_streamed: int = 0

    @contextmanager
    def layer(self, index: int) -> Iterator[Mapping[str, Tensor]]:
        ranges = self.model.skeleton.layer_tensors
        first = next(each for each in self.held if ranges[each].keys() == ranges[index].keys())
        yield {
            ranges[index][name].name: self.held[first][ranges[first][name].name]
            for name in ranges[index]
        }

    def restart(self) -> None:
        pass

    def close(self) -> None:
        pass


def room_for(steps: int, tree: TreeConfig) -> int:
    """The most tokens that the first iteration and `steps` counted ones can commit."""
    return (steps + 2) * (tree.max_depth + 1)


class Measure:
    """The timed pieces of work, on an opened target and draft model."""

    def __init__(self, target: StreamedModel, draft: StreamedModel, seed: int, slots: int) -> None:
        """Takes over both models; `close` closes them.

        Args:
            target, draft: the opened models.
            seed: of random trees.
            slots: cache rows that memory is planned for.
        """
        assert isinstance(target.source, LayerStream | DeviceStream)
        self.target = LocalTarget(target)
        self._model, self._draft = target, draft
        self._stream = target.source
        self._source = TimedSource(target.source, self._synchronize)
        target.source = self._source
        self._layers = len(target.skeleton.layers)
        self._slots = slots
        self._random = np.random.default_rng(seed)
        self._prefix = self._tokens(PREFIX_TOKENS)
        self._drafter: ModelDrafter | None = None

    def streaming_pass(self) -> float:
        """Seconds of a pass that takes and releases every layer, without arithmetic."""

        def run() -> None:
            for index in range(self._layers):
                with self._source.layer(index):
                    pass

        return self._cycle(run)

    def streamed_pass(self, rows: int) -> float:
        """Seconds of a pass over the last committed token and a random tree, `rows` rows in all."""
        self._fill_prefix()
        seconds = self._cycle(lambda: self._verify(rows))
        self.target.crop(len(self._prefix))
        return seconds

    def compute_alone(self, rows: int) -> float:
        """Seconds of the same pass with one layer's weights, in memory, for every layer."""
        self._fill_prefix()
        others = self._other_kinds
        with self._first_layer() as held:
            self.wait_for_full_ring()
            self._model.source = _OneLayer(self._model, {0: held, **others})
            try:
                started = time.perf_counter()
                self._verify(rows)
                self._synchronize()
                seconds = time.perf_counter() - started
            finally:
                self._model.source = self._source
        self.target.crop(len(self._prefix))
        return seconds

    def iterations(
        self,
        method: Method,
        prompt: Sequence[int],
        count: int,
        tree: TreeConfig,
        eos: Collection[int],
    ) -> tuple[float, list[tuple[StepResult, float]]]:
        """Decodes greedily until the text ends or `count` steps after the first are done.

        Returns:
            the seconds of the first step, which runs the prompt, and all steps with their seconds.
        """
        sampler = Sampler(SamplingConfig())
        room = room_for(count, tree)
        self.target.crop(0)
        self.target.reserve(len(prompt) + room + tree.budget)
        if method == "specexec":
            if self._drafter is None:
                self._drafter = ModelDrafter(
                    self._draft, sampler, tree, self._model.vocab_size, slots=self._slots
                )
            self._drafter.forget()
            steps = specexec(self.target, self._drafter, sampler, prompt, room, eos)
        else:
            steps = autoregressive(self.target, sampler, prompt, room, eos)
        timed = []
        started = time.perf_counter()
        for step in islice(steps, count + 1):
            now = time.perf_counter()
            timed.append((step, now - started))
            started = now
        return timed[0][1], timed

    def wait_for_full_ring(self) -> None:
        """Waits until the ring is full, so that its reader does not disturb what follows."""
        before = -1
        while before != self._stream.bytes_read:
            before = self._stream.bytes_read
            time.sleep(0.1)
        self._synchronize()

    def close(self) -> None:
        """Closes both models."""
        self._model.close()
        self._draft.close()

    def _cycle(self, run: Callable[[], None]) -> float:
        with self._first_layer():
            pass  # leaving it empties the ring
        run()
        started = self._source.first_layer_at
        with self._first_layer():
            self._synchronize()
            return time.perf_counter() - started

    @cached_property
    def _other_kinds(self) -> dict[int, dict[str, Tensor]]:
        """Copies of the first layers that have other tensors than layer 0: a hybrid's attention."""
        ranges = self._model.skeleton.layer_tensors
        names = [set(ranges[index]) for index in range(self._layers)]
        wanted = {index for index in range(self._layers) if names.index(names[index]) == index}
        copies = {}
        for index in range(max(wanted) + 1) if len(wanted) > 1 else ():
            with self._stream.layer(index) as tensors:
                if index and index in wanted:
                    copies[index] = {name: tensor.clone() for name, tensor in tensors.items()}
        if copies:
            self._synchronize()
            self._stream.restart()
        return copies

    @property
    def held_bytes(self) -> int:
        """Bytes of the layers that are held in memory for `compute_alone`, beside what is planned.

        Layer 0 lies in the ring; a model whose layers are all of its kind needs no other.
        """
        copies = self.__dict__.get("_other_kinds", {})
        return sum(each.nbytes for layer in copies.values() for each in layer.values())

    def _synchronize(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)

    @contextmanager
    def _first_layer(self) -> Iterator[Mapping[str, Tensor]]:
        """Takes layer 0 outside of a pass; the stream begins again afterwards."""
        with self._stream.layer(0) as tensors:
            yield tensors
        self._stream.restart()

    def _fill_prefix(self) -> None:
        if self.target.tokens != self._prefix:
            self.target.crop(0)
            self.target.verify(self._prefix, DraftTree.empty())
            self.target.commit([])

    def _verify(self, rows: int) -> None:
        nodes = rows - 1
        parents = np.array([self._random.integers(-1, node) for node in range(nodes)], np.int64)
        depths = np.ones(nodes, np.int64)
        for node, parent in enumerate(parents):
            depths[node] = 1 if parent < 0 else depths[parent] + 1
        tree = DraftTree(np.array(self._tokens(nodes), np.int64), parents, depths, -1.0 * depths)
        self.target.verify(self._tokens(1), tree)

    def _tokens(self, count: int) -> list[int]:
        tokens: list[int] = self._random.integers(0, self._model.vocab_size, count).tolist()
        return tokens
