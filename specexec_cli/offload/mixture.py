"""A mixture's weights: the part of each layer that every row needs, and its experts one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

from torch import Tensor

from specexec_cli.offload.experts import ExpertStore
from specexec_cli.offload.stream import LayerStream


class MixtureStream:
    """A LayerStream over dense parts with an ExpertStore beside it; the same interface as both."""

    def __init__(self, dense: LayerStream, experts: ExpertStore) -> None:
        """Takes both over: close() closes them."""
        self._dense, self.experts = dense, experts

    @property
    def bytes_streamed(self) -> int:
        """Bytes of dense parts handed out from the ring, and of experts read."""
        return self._dense.bytes_streamed + self.experts.bytes_read

    def layer(self, index: int) -> AbstractContextManager[Mapping[str, Tensor]]:
        """The dense part of a layer; see LayerStream.layer."""
        return self._dense.layer(index)

    def take(
        self, layer: int, wanted: Mapping[int, int], rows: int
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Experts of a layer; see ExpertStore.take."""
        return self.experts.take(layer, wanted, rows)

    def restart(self) -> None:
        """Begin again at layer 0 after an aborted pass."""
        self._dense.restart()
        self.experts.restart()

    def close(self) -> None:
        """Stop the readers, close the files, give the memory back. Idempotent."""
        self._dense.close()
        self.experts.close()
