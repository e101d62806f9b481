"""A mixture's weights: the part of each layer that every row needs, and its experts one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

from torch import Tensor

from specexec_cli.offload.cuda import DeviceStream
from specexec_cli.offload.expert_device import DeviceExperts
from specexec_cli.offload.experts import Batch, ExpertStore
from specexec_cli.offload.stream import LayerStream


class MixtureStream:
    """A stream of the layers' dense parts and a store of their experts, used as one object."""

    def __init__(
        self, dense: LayerStream | DeviceStream, experts: ExpertStore | DeviceExperts
    ) -> None:
        """Joins both into one object; its close() closes them."""
        self._dense, self.experts = dense, experts

    @property
    def bytes_streamed(self) -> int:
        """Bytes of the dense parts handed out from the ring, plus bytes of experts.

        On a CPU an expert's bytes count when they are read, on a GPU when they are copied to it.
        """
        experts = self.experts
        moved = experts.bytes_read if isinstance(experts, ExpertStore) else experts.bytes_copied
        return self._dense.bytes_streamed + moved

    def layer(self, index: int) -> AbstractContextManager[Mapping[str, Tensor]]:
        """The dense part of a layer; see LayerStream.layer."""
        return self._dense.layer(index)

    def take(self, layer: int, wanted: Mapping[int, int], rows: int) -> Iterator[Batch]:
        """Experts of a layer; see ExpertStore.take."""
        return self.experts.take(layer, wanted, rows)

    @property
    def failed(self) -> bool:
        """Whether reading dense parts ahead has met an error."""
        return self._dense.failed

    def restart(self) -> None:
        """Begin again at layer 0 after an aborted pass."""
        self._dense.restart()
        self.experts.restart()

    def close(self) -> None:
        """Stop the readers, close the files, give the memory back. Idempotent."""
        self._dense.close()
        self.experts.close()
