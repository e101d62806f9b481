"""How long one pass over a target takes, what it waits for, and how many rows are free.

    pass = max(SSD, link to the GPU, computing)
    computing = max(weights read from memory, products, experts on the CPU)
              + unpacking + keys and values from RAM + the rest of the layers

Whatever moves bytes does so while layers are computed. Within a layer nothing overlaps: its norms,
attention and activations, and on a CPU the Python that starts them, come before or behind its
products. A GPU computes while the host starts what comes next, so there the slower of the two
counts, and waits of the host for the GPU are added to both. A GPU's memory is read once for each
128 rows (machine_rates.py).
Other machines have their turns one after another, as they do in a pass of one wave, which a tree
is; hosts.py counts those of prompts and of several texts. Of what the others wait for meanwhile a
ring of buffers comes ahead at most, which is not counted.
Experts that come one by one are asked for in the middle of their layer: then the links wait for the
rest of it as well.

What a pass starts on a GPU, and how often the host waits for it, is counted on the stand-in device:
tests/unit/test_launches.py counts the same from passes of the code that runs (tests/fake_cuda.py)
and fails where the constants are no longer what is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from specexec_cli.catalog.architectures import ONE_CALL
from specexec_cli.planning.machine import Machine
from specexec_cli.planning.machine_rates import (
    BLOCK,
    CALLED_ROWS,
    USUAL_CALL_S,
    GpuRates,
    most_rows,
    one_row_flops,
    product_seconds,
    unmeasured_seconds,
)
from specexec_cli.planning.memory import PASS_ROWS, Work
from specexec_cli.planning.placement import copied_bytes, missing_bytes
from specexec_cli.planning.sizes import ExpertBytes, ModelBytes
from specexec_cli.planning.tiers import Plan

# Starting the operations of one layer, whatever its size, where that has not been measured.
_CPU_LAYER_S = 1.5e-3
# Without Triton, PyTorch unpacks a matrix 2^22 weights at a time (formats/base.py), AWQ's in 15
# operations and GPTQ's in 50, which read and write 73 and 167 bytes a weight: a test counts them.
# What Python takes to start an operation is reasoned, not measured.
UNPACKED_AT_ONCE, UNPACK_OPERATIONS, UNPACK_BYTES = 1 << 22, 30, 120
_OPERATION_S = 10e-6


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
MIXTURE_LAYER = Launches(operations=12, kernels=14)  # with all of its experts
ONE_BY_ONE = Launches(operations=6, kernels=10, waits=3)  # a layer whose experts come one by one
EXPERT = Launches(operations=10, kernels=3, waits=1)  # of these, one that has a row
# gpt-oss' of the same three: plain weights around its experts, and a router and activations of
# transformers.
GPT_OSS_LAYERS = (
    Launches(operations=49, kernels=7), Launches(operations=47, kernels=3, waits=3),
    Launches(operations=15, kernels=2, waits=1),
)  # fmt: skip
# A product of plain weights is PyTorch's; a target's comes in blocks of rows (models/own_rows.py).
PLAIN_PRODUCT = Launches(operations=1, kernels=-1)
IN_BLOCKS = Launches(operations=1)
# What a recurrent layer starts beyond one that attends: Qwen3.5's, over a tree.
RECURRENCE = Launches(operations=58, kernels=1, waits=1)
STREAMED = Launches(waits=1)  # of a layer that comes over a link: until it has come
# Of a pass that is replayed: the graph, its wanted rows, and as much as Python's work before them
# takes, which was that of 8 to 40 operations on the one host with a GPU (docs/gpu.md).
REPLAYED = Launches(operations=20)
OUTSIDE = Launches(operations=26)  # of a pass: embeddings, masks, head, logits


def pass_launches(
    model: ModelBytes, asked_for: float | None, *, streamed: int = 0, drafts: bool = False
) -> Launches:
    """What a pass over a model's layers starts.

    Args:
        asked_for: experts of each layer that come one by one and have a row; 0 where experts are
            with their layers, None where the model is no mixture.
        streamed: layers that come over a link.
        drafts: whether it is a draft model's.
    """
    usual = MIXTURE_LAYER, ONE_BY_ONE, EXPERT
    whole, one_by_one, expert = GPT_OSS_LAYERS if model.model_type == "gpt_oss" else usual
    layer = DENSE_LAYER
    if asked_for is not None:
        layer = one_by_one + expert.times(asked_for) if asked_for else whole
    if not model.packed:
        product = PLAIN_PRODUCT if drafts else PLAIN_PRODUCT + IN_BLOCKS
        layer += product.times(7 if asked_for is None else 4)
    recurrent = sum(size > 0 for size in model.layer_states)
    others = RECURRENCE.times(recurrent) + STREAMED.times(streamed) + OUTSIDE
    return layer.times(len(model.layers)) + others


def planned_launches(plan: Plan, rows: int) -> Launches:
    """What a pass of so many rows starts where nothing replays it."""
    asked = asked_of_each(plan.target.experts, rows, one_by_one=bool(plan.expert_bytes))
    streamed = len(plan.tiers) - plan.tiers.count("resident")
    return pass_launches(plan.target, asked, streamed=streamed)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """A pass of some rows: the bytes that it moves and the seconds that each part of it takes."""

    rows: int
    ssd_bytes: int
    link_bytes: int
    memory_bytes: int  # of weights that the computing device reads, as often as it does
    ssd_s: float
    link_s: float
    memory_s: float
    compute_s: float  # of products; of one row at least, where a CPU's rates are not known
    host_s: float  # of experts that the CPU computes beside a GPU
    unpack_s: float  # of unpacking weights before products, on a GPU without Triton
    layers_s: float  # of what layers do besides products
    kv_s: float  # in which layers wait for keys and values from RAM
    starting_s: float  # in which the host starts all that a GPU computes; 0 on a CPU
    waits_s: float  # in which it waits for the GPU
    links_wait: bool  # for the layers' rest, as where experts come one by one
    others_s: tuple[float, ...]  # turns of other machines, with their rows on the way

    @property
    def computing_s(self) -> float:
        """Seconds in which layers are computed, one after another."""
        products_s = max(self.memory_s, self.compute_s, self.host_s)
        device_s = products_s + self.unpack_s + self.layers_s + self.kv_s
        return max(device_s, self.starting_s) + self.waits_s

    @property
    def links_s(self) -> float:
        """Seconds in which weights move to where they are computed with."""
        rest_s = max(self.layers_s, self.starting_s) + self.waits_s
        return max(self.ssd_s, self.link_s) + self.links_wait * rest_s

    @property
    def turns_s(self) -> tuple[float, ...]:
        """Seconds of every machine's turn, this one's first."""
        return max(self.links_s, self.computing_s), *self.others_s

    @property
    def hosts_s(self) -> float:
        """Seconds in which other machines have their turns."""
        return sum(self.others_s)

    @property
    def seconds(self) -> float:
        """Seconds of the whole pass."""
        return sum(self.turns_s)

    @property
    def bottleneck(self) -> str:
        """What the pass waits for: ssd, link, memory, compute, host, unpack,
        starting or hosts."""
        streams = {"ssd": self.ssd_s, "link": self.link_s}
        slowest = max(streams, key=lambda name: streams[name])
        if self.hosts_s > self.seconds / 2:
            return "hosts"
        if self.links_s > self.computing_s or streams[slowest] >= self.seconds:
            return slowest
        parts = {
            "memory": self.memory_s, "compute": self.compute_s, "host": self.host_s,
            "unpack": self.unpack_s, "starting": self.starting_s,
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
    read_bytes, compute_s = products(target, rows, memory_bytes, host_bytes, machine)
    link_bytes += plan.kv_link_bytes
    started = Launches()
    if plan.replays and rows <= PASS_ROWS[-1]:
        started = REPLAYED
    elif machine.vram_bytes:
        started = planned_launches(plan, rows)
    return PassTime(
        rows=rows,
        ssd_bytes=ssd_bytes,
        link_bytes=link_bytes,
        memory_bytes=read_bytes,
        ssd_s=ssd_bytes / machine.ssd_bytes_per_s,
        link_s=link_bytes / machine.link_bytes_per_s,
        memory_s=read_bytes / machine.memory_bytes_per_s,
        compute_s=compute_s,
        host_s=machine.host_s(host_bytes, target.packed_bits),
        unpack_s=unpack_seconds(target, memory_bytes - host_bytes, machine),
        layers_s=layers_seconds(
            target, rows, plan.work, machine, one_by_one=bool(plan.expert_bytes)
        ),
        kv_s=plan.kv_link_bytes / machine.link_bytes_per_s,
        starting_s=started.host_s(machine.gpu),
        waits_s=started.waits * machine.gpu.wait_s,
        links_wait=bool(plan.expert_bytes),
        others_s=tuple(
            pass_time(each.plan, rows).seconds + each.hop_s(rows) for each in plan.others
        ),
    )


def products(
    model: ModelBytes, rows: int, n_bytes: int, host_bytes: int, machine: Machine
) -> tuple[int, float]:
    """Bytes of weights that products read from the device's memory, and their seconds.

    Args:
        n_bytes: of the weights that products are made with.
        host_bytes: of them, those of experts that the CPU multiplies beside a GPU.
    """
    head = model.vocab * model.hidden  # every row goes through it as well
    if not machine.vram_bytes:
        seconds, one_s = 0.0, n_bytes / machine.memory_bytes_per_s
        if machine.flops:
            seconds = product_seconds(model.active_params + head, rows, machine.flops)
        else:  # further rows take no less
            weights = model.active_params + head
            one_s = max(one_s, product_seconds(weights, 1, one_row_flops()))
        if not machine.flops or machine.products_assumed:
            seconds = max(seconds, unmeasured_seconds(one_s, model.packed_bits))
        return n_bytes, seconds
    gpu, experts = machine.gpu, model.experts
    bits, packed_as = model.packed_bits, model.packed_as
    compute_s = gpu.arithmetic_seconds(head, rows, bits if model.packed_head else 0, packed_as)
    blocks, asked = -(-rows // BLOCK), 0
    if experts is None:
        compute_s += gpu.arithmetic_seconds(model.active_params, rows, bits, packed_as)
    else:
        asked = round(experts.asked_for(rows))
        others = 1.0 - experts.chosen / experts.count
        params = (model.layer_params - model.active_params) / others if others else 0.0
        share = max(0, asked - host_bytes) / sum(experts.layers)
        # an expert's rows are multiplied in tiles of their own
        each = rows * experts.chosen / (experts.count * asked / sum(experts.layers))
        compute_s += gpu.arithmetic_seconds(model.layer_params - params, rows, bits, packed_as)
        compute_s += gpu.arithmetic_seconds(share * params, round(each), bits, packed_as)
    return (n_bytes - asked) * blocks + max(0, asked - host_bytes), compute_s


def asked_of_each(experts: ExpertBytes | None, rows: int, *, one_by_one: bool) -> float | None:
    """Experts of each layer that come one by one and have a row; None for no mixture."""
    if experts is None:
        return None
    if not one_by_one:
        return 0.0
    return experts.count * experts.asked_for(rows) / sum(experts.layers)


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
    model: ModelBytes,
    rows: int,
    work: Work,
    machine: Machine,
    *,
    drafts: bool = False,
    one_by_one: bool = False,
) -> float:
    """What all layers take besides their products, half of the context being taken.

    Of a GPU only the time between its kernels is counted: what they do is little beside products.

    Args:
        drafts: whether it is a draft model's step, whose keys are never in 8 bits.
        one_by_one: whether a mixture's experts come one by one.
    """
    count = len(model.layers)
    if machine.vram_bytes:
        asked = asked_of_each(model.experts, rows, one_by_one=one_by_one)
        return pass_launches(model, asked, drafts=drafts).device_s(machine.gpu)
    one_call = model.model_type in ONE_CALL and machine.one_call
    # of plain weights there are none in two bytes where the CPU widens them
    one_call = one_call and not (work.widened and not model.packed)
    one_call = one_call and (drafts or not work.eight_bit_kv)
    if machine.layer_cost is None:
        called = one_call and rows <= CALLED_ROWS
        return count * (USUAL_CALL_S if called else _CPU_LAYER_S)
    slots = work.context_tokens // 2 + rows
    return count * machine.layer_cost.seconds(
        model.hidden, model.intermediate, rows, slots, one_call=one_call
    )


def knee_rows(plan: Plan) -> int | None:
    """Most rows of a pass that takes no longer than one of 1 row; None: rates are not known."""
    if not plan.machine.flops and not plan.machine.vram_bytes:
        return None
    return most_rows(lambda rows: pass_time(plan, rows).seconds, pass_time(plan, 1).seconds)
