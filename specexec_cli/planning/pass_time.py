"""How long one pass over a target takes, what it waits for, and how many rows are free.

    pass = max(SSD, link to the GPU, computing)
    computing = max(weights read from memory, products, experts on the CPU)
              + unpacking + the rest of the layers

Whatever moves bytes does so while layers are computed. Within a layer nothing overlaps: its norms,
attention and activations, and the Python that starts them, come before or behind its products.
Experts that come one by one are asked for in the middle of their layer: then the links wait for the
rest of it as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from specexec_cli.planning.machine import Machine
from specexec_cli.planning.measured_rates import most_rows, product_seconds
from specexec_cli.planning.mixtures import copied_bytes, missing_bytes
from specexec_cli.planning.sizes import ModelBytes
from specexec_cli.planning.tiers import Plan

# Starting the operations of one layer, whatever its size, where that has not been measured:
# docs/measured.md, "Predicted speeds".
_CPU_LAYER_S, _GPU_LAYER_S = 1.5e-3, 0.3e-3
# Of a draft step on a GPU, which starts as one graph: between two of its kernels, of which a layer
# has about twenty, a GPU takes one or two microseconds. Reasoned, not measured.
_GRAPH_LAYER_S = 0.04e-3
# Without Triton, PyTorch unpacks a matrix 2^22 weights at a time (formats/base.py), AWQ's in 15
# operations and GPTQ's in 50, which read and write 73 and 167 bytes a weight: a test counts them.
# What Python takes to start an operation is reasoned, not measured.
UNPACKED_AT_ONCE, UNPACK_OPERATIONS, UNPACK_BYTES = 1 << 22, 30, 120
_OPERATION_S = 10e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """A pass of some rows: the bytes that it moves and the seconds that each part of it takes."""

    rows: int
    ssd_bytes: int
    link_bytes: int
    memory_bytes: int  # of weights that the computing device reads
    ssd_s: float
    link_s: float
    memory_s: float
    compute_s: float  # of products; 0 where the rate is not known
    host_s: float  # of experts that the CPU computes beside a GPU
    unpack_s: float  # of unpacking weights before products, on a GPU without Triton
    layers_s: float  # of what layers do besides products
    links_wait: bool  # for that, as where experts come one by one

    @property
    def computing_s(self) -> float:
        """Seconds in which layers are computed, one after another."""
        return max(self.memory_s, self.compute_s, self.host_s) + self.unpack_s + self.layers_s

    @property
    def seconds(self) -> float:
        """Seconds of the whole pass."""
        links_s = max(self.ssd_s, self.link_s) + self.links_wait * self.layers_s
        return max(links_s, self.computing_s)

    @property
    def bottleneck(self) -> str:
        """What the pass waits for: ssd, link, memory, compute, host or unpack."""
        streams = {"ssd": self.ssd_s, "link": self.link_s}
        slowest = max(streams, key=lambda name: streams[name])
        if self.seconds > self.computing_s or streams[slowest] >= self.seconds:
            return slowest
        parts = {
            "memory": self.memory_s, "compute": self.compute_s, "host": self.host_s,
            "unpack": self.unpack_s,
        }  # fmt: skip
        return max(parts, key=lambda name: parts[name])


def pass_time(plan: Plan, rows: int, ssd_bytes: int | None = None) -> PassTime:
    """A pass of so many rows, in the middle of a text that fills the planned context.

    Args:
        ssd_bytes: that it reads; as the plan expects unless told.
    """
    target, machine, experts = plan.target, plan.machine, plan.target.experts
    if ssd_bytes is None:
        ssd_bytes = pass_bytes(plan, rows)
    link_bytes = plan.link_bytes
    memory_bytes, host_bytes = plan.memory_bytes, 0
    if experts is not None:
        # whatever is moved, arithmetic reads no experts but those of the rows
        memory_bytes = round(target.dense.read_bytes + experts.asked_for(rows))
        planned, copied = (
            copied_bytes(plan, experts, each) for each in (plan.work.verify_rows, rows)
        )
        link_bytes += copied - planned
        if plan.on_gpu and plan.expert_bytes:
            # what is not in VRAM, and not copied to it, is computed by the CPU
            elsewhere = missing_bytes(experts, plan.device_expert_bytes, rows)
            host_bytes = max(0, elsewhere - copied)
    # every row goes through the output head as well
    weights = target.active_params + target.vocab * target.hidden
    return PassTime(
        rows=rows,
        ssd_bytes=ssd_bytes,
        link_bytes=link_bytes,
        memory_bytes=memory_bytes,
        ssd_s=ssd_bytes / machine.ssd_bytes_per_s,
        link_s=link_bytes / machine.link_bytes_per_s,
        memory_s=memory_bytes / machine.memory_bytes_per_s,
        compute_s=product_seconds(weights, rows, machine.flops),
        host_s=host_bytes / machine.host_bytes_per_s,
        unpack_s=unpack_seconds(target, memory_bytes - host_bytes, machine),
        layers_s=layers_seconds(target, rows, plan.work.context_tokens, machine),
        links_wait=bool(plan.expert_bytes),
    )


def pass_bytes(plan: Plan, rows: int) -> int:
    """Bytes from the SSD that a pass of so many rows is expected to move."""
    experts = plan.target.experts
    if experts is None or not plan.expert_bytes:
        return plan.ssd_bytes
    held = plan.expert_bytes + plan.device_expert_bytes
    dense = plan.ssd_bytes - missing_bytes(experts, held, plan.work.verify_rows)
    return dense + missing_bytes(experts, held, rows)


def unpack_seconds(
    model: ModelBytes, read_bytes: int, machine: Machine, *, graph: bool = False
) -> float:
    """What PyTorch takes to unpack the weights of a pass, where Triton's kernels do not run.

    Operations are started ahead of the GPU, so that the slower of the two counts.

    Args:
        read_bytes: of the stored weights that the GPU multiplies with, those outside of layers
            included.
        graph: all operations are started at once, as a draft step's are.
    """
    if machine.triton_obstacle is None or not model.packed:
        return 0.0
    layer_bytes = max(read_bytes - (model.resident - model.table), 0)
    weights = model.layer_params * min(layer_bytes / sum(model.layers), 1.0)
    if model.packed_head:
        weights += model.vocab * model.hidden
    starting_s = 0.0 if graph else weights / UNPACKED_AT_ONCE * UNPACK_OPERATIONS * _OPERATION_S
    return max(starting_s, weights * UNPACK_BYTES / machine.memory_bytes_per_s)


def layers_seconds(
    model: ModelBytes, rows: int, context_tokens: int, machine: Machine, *, graph: bool = False
) -> float:
    """What all layers take besides their products, half of the context being taken.

    Args:
        graph: on a GPU the layers are started at once, as a draft step's are.
    """
    count = len(model.layers)
    if machine.vram_bytes:
        return count * (_GRAPH_LAYER_S if graph else _GPU_LAYER_S)
    if machine.layer_cost is None:
        return count * _CPU_LAYER_S
    slots = context_tokens // 2 + rows
    return count * machine.layer_cost.seconds(model.hidden, model.intermediate, rows, slots)


def knee_rows(plan: Plan) -> int | None:
    """Most rows of a pass that takes no longer than one of 1 row; None: rates are not known."""
    if not plan.machine.flops:
        return None
    return most_rows(lambda rows: pass_time(plan, rows).seconds, pass_time(plan, 1).seconds)
