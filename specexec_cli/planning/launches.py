"""What a pass starts on a GPU, and how often it waits for it, counted on the stand-in device.

tests/unit/test_launches.py counts the same from passes of the code that runs (tests/fake_cuda.py)
and fails where these constants are no longer what is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from specexec_cli.planning.gpu_rates import GpuRates


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """What is started for some part of a pass."""

    operations: float = 0.0  # of PyTorch
    kernels: float = 0.0  # of ours
    waits: float = 0.0  # of the host for the GPU

    def __add__(self, other: Launches) -> Launches:
        return Launches(
            operations=self.operations + other.operations,
            kernels=self.kernels + other.kernels,
            waits=self.waits + other.waits,
        )

    def times(self, count: float) -> Launches:
        """So many of them."""
        return Launches(
            operations=count * self.operations,
            kernels=count * self.kernels,
            waits=count * self.waits,
        )

    def host_s(self, rates: GpuRates) -> float:
        """Seconds of the host in which all of it is started, waits left out."""
        return self.operations * rates.operation_s + self.kernels * rates.kernel_s

    def device_s(self, rates: GpuRates) -> float:
        """Seconds in which the GPU stands between two kernels."""
        return (self.operations + self.kernels) * rates.start_s


# Of one decoder layer with packed weights, Llama's and, without its MLP, Qwen3-MoE's. Layers whose
# norms or positions are no kernel of ours (models/fused.py) start 7 operations more for each norm
# and 10 for their positions.
DENSE_LAYER = Launches(operations=6, kernels=11)
DRAFT_LAYER = Launches(operations=6, kernels=11)
MIXTURE_LAYER = Launches(operations=12, kernels=14)  # with all of its experts
ONE_BY_ONE = Launches(operations=6, kernels=10, waits=3)  # a layer whose experts come one by one
EXPERT = Launches(operations=10, kernels=3, waits=1)  # of these, one that has a row
# Of a pass that is replayed: the graph, its wanted rows, and as much as Python's work before them
# takes, which was that of 8 to 40 operations on the one host with a GPU (docs/gpu.md).
REPLAYED = Launches(operations=20)
OUTSIDE = Launches(operations=26)  # of a pass: embeddings, masks, head, logits


def pass_launches(layers: int, asked_for: float | None, *, drafts: bool = False) -> Launches:
    """What a pass over so many layers starts.

    Args:
        asked_for: experts of each layer that come one by one and have a row; 0 where experts are
            with their layers, None where the model is no mixture.
        drafts: whether it is a draft model's.
    """
    dense = DRAFT_LAYER if drafts else DENSE_LAYER
    layer = dense
    if asked_for is not None:
        layer = ONE_BY_ONE + EXPERT.times(asked_for) if asked_for else MIXTURE_LAYER
    return layer.times(layers) + OUTSIDE
