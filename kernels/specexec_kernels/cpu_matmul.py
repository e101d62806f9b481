"""Multiplies rows by plain or packed weights on a CPU; a row's bits are its own.

Sums are float32, in an order that depends on neither the other rows nor the number of threads.
cpu_matmul_ir says how they are formed, and formats/ what the stored weights mean. A weight that no
kernel reads is unpacked by its format's definition and multiplied as float32, in such an order too.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor
from torch.nn.functional import pad

from specexec_kernels import cpu_jit, cpu_team
from specexec_kernels.cpu_matmul_plan import plan_for
from specexec_kernels.cpu_matmul_spec import CHUNKS, OUT, PARTS
from specexec_kernels.formats.base import PackedWeight
from specexec_kernels.formats.plain import plain_weight

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def takes_plain(rows: torch.dtype) -> bool:
    """Whether these kernels multiply rows of a dtype by plain weights.

    They do not multiply rows of float16 where the CPU has instructions for them: PyTorch is faster
    there. With Arm's instructions for bfloat16 it is too, but its sums of a row depend on how many
    rows there are.
    """
    return rows in _DTYPES and not (rows == torch.float16 and cpu_jit.has_matmul(rows))


def matmul(x: Tensor, weight: PackedWeight) -> Tensor:
    """Computes x @ W.T.

    Where the CPU multiplies pairs of bfloat16, bfloat16 rows are multiplied so, by weights rounded
    to bfloat16 as the format's `pairs` says. Where it multiplies pairs of int16 instead, rows of
    bfloat16 become multiples of a power of two for each block, and formats with `integers` are
    multiplied exactly. All other rows are multiplied as float32. Where the weight asks for it and
    its format allows it (rounds_rows), rows of every dtype are rounded to 8 bits and multiplied as
    integers instead (cpu_arrange_int8).

    Args:
        x: (rows, inputs) float32, bfloat16 or float16.
        weight: W, (outputs, inputs).
    Returns:
        (rows, outputs) float32.
    """
    rows = x.shape[0]
    if not rows:
        return torch.empty(0, weight.out_features)
    plan = plan_for(x.dtype, rows, weight)
    if plan is None:
        return _by_definition(x, weight)
    chunks = -(-rows // plan.rows)
    sums = plan.sums(chunks)
    kept = plan.arrange(x.to(plan.dtype), chunks) | plan.scratch() | stored(weight)
    arguments = array("q", plan.arguments)
    for place, tensor in kept.items():
        arguments[place] = tensor.data_ptr()
    arguments[OUT], arguments[CHUNKS] = sums.data_ptr(), chunks
    cpu_team.run(plan.kernel, arguments.buffer_info()[0], plan.claims)
    del kept
    found = plan.flat(sums)
    return found if len(found) == rows else found[:rows]


def stored(weight: PackedWeight) -> dict[int, Tensor]:
    """A weight's tensors, each under the position of its address in the kernel's arguments."""
    return {
        PARTS + 2 * number: weight.tensors[part.leaf].contiguous()
        for number, part in enumerate(weight.format.parts)
    }


def _by_definition(x: Tensor, weight: PackedWeight) -> Tensor:
    """`matmul` for weights that no kernel reads: unpacks them by the format's definition.

    Unpacks some outputs at a time, since the whole matrix as float32 may not fit the RAM. Where
    the outputs are cut changes no sum.
    """
    (rows, inputs), outputs = x.shape, weight.out_features
    fmt = weight.format.for_rows(x.dtype, pairs=False)
    unpacked = PackedWeight(fmt, inputs, outputs, weight.tensors)
    out = torch.empty(rows, outputs)
    for start, slab in unpacked.slabs():
        # padded with zeros to whole units of inputs and at least one vector of outputs, which is
        # the least that the kernels for plain weights read
        whole = plain_weight(slab)
        missing = -inputs % whole.format.unit, max(cpu_jit.lanes() - len(slab), 0)
        padded = plain_weight(pad(slab, (0, missing[0], 0, missing[1])))
        found = matmul(pad(x.float(), (0, missing[0])), padded)
        out[:, start : start + len(slab)] = found[:, : len(slab)]
    return out
