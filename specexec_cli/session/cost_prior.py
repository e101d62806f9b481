"""Estimates the cost of iterations before the first one, as a start for the policy cost.

A pass streams its bytes at the probed rate of the link. A CPU multiplies at the rates that were
measured when it was first used (planning/machine_rates.py). Without such rates, and for a GPU,
this module times one of the model's own linears, filled with made-up weights. Small models spend
most of their time between the products, so for them a whole pass is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from specexec_kernels import dispatch
from torch import Tensor
from torch.func import functional_call

from specexec_cli.core import DraftTree
from specexec_cli.drafting.iteration_cost import CostModel
from specexec_cli.models.linear import MixedLinear
from specexec_cli.models.packed_linear import QuantizedLinear
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.resident import TORCH_DTYPES
from specexec_cli.planning.machine_rates import most_rows
from specexec_cli.planning.memory import BLOCK_ROWS
from specexec_cli.planning.pass_time import pass_time
from specexec_cli.planning.resolve import Decision
from specexec_cli.planning.sizes import ModelBytes
from specexec_cli.planning.tiers import Plan
from specexec_cli.verify.verifier import LocalTarget

# Rows of the measured products. A CPU multiplies in chunks of up to 13 rows and compiles one kernel
# for each chunk size. These two numbers need no kernels that passes would not need anyway.
_FEW, _MANY = 12, 36
_MOST_WEIGHTS = 1 << 24  # most weights of the measured linear: about 10 ms on a CPU
_SMALL_S = 0.05  # if a pass has less arithmetic than this, a whole pass is timed
_BEYOND = 64  # rows beyond the knee over which the seconds of a row are averaged
_RUNS = 5
_PASSES = 2  # timed passes of a small model

_Linear = MixedLinear | QuantizedLinear


def measured_prior(
    decision: Decision, target: LocalTarget, draft: StreamedModel | None
) -> CostModel:
    """The cost model from the probed link and measured arithmetic; takes at most some 10 ms.

    Args:
        target: a target without a pass under way; its committed tokens are kept.
    Raises:
        StreamError: the weights could not be read.
    """
    model, sizes = target.model, decision.target.sizes
    stream_s, of_few_s = (_stream_s(decision.plan, count) for count in (1, _FEW))
    found = by_rates(decision.plan, stream_s)
    if found is None:
        rows = min(_FEW, model.context_length - len(target.tokens))
        replays = target.steps is not None  # trees, from the third pass on
        pending, nodes = ([0], [0] * (rows - 1)) if replays else ([0] * rows, [])
        try:
            first_s, row_s = _arithmetic(
                model, sizes, rows, lambda: target.verify(pending, DraftTree.chain(nodes)),
                passes=_PASSES + 2 * replays,
            )  # fmt: skip
        finally:
            target.crop(len(target.tokens))
        base_s = max(stream_s, first_s)
        knee = 1.0 + (base_s - first_s) / row_s if row_s else 0.0
    else:
        base_s, row_s, knee = found
    step_s = 0.0  # without a draft model, drafting from the text itself costs almost nothing
    if draft is not None and decision.draft is not None:
        chain = draft.rows_to_time(min(_FEW, draft.context_length))
        draft_first_s, draft_row_s = _arithmetic(
            draft, decision.draft.sizes, len(chain.tokens),
            lambda: draft.forward(chain, draft.new_state(), [0]),
        )  # fmt: skip
        step_s = draft_first_s + (decision.tree.batch - 1) * draft_row_s
    block_rows = _block_rows(_sample(model)[0], model.device)
    if of_few_s > stream_s:  # in a mixture each row streams its own experts, so no row is free
        row_s, knee, block_rows = row_s + (of_few_s - stream_s) / (_FEW - 1), 1.0, 1
    return CostModel(
        base_s=base_s,
        row_s=row_s,
        knee_rows=knee,
        step_s=step_s,
        block_rows=block_rows,
    )


def _stream_s(plan: Plan, rows: int) -> float:
    """Seconds that a pass of `rows` rows streams weights; on a CPU, layers in RAM take none."""
    found = pass_time(plan, rows)
    return max(found.ssd_s, found.link_s)


def _weights(sizes: ModelBytes) -> int:
    """Weights that every row is multiplied by, the output head included."""
    return sizes.active_params + sizes.vocab * sizes.hidden


def by_rates(plan: Plan, stream_s: float) -> tuple[float, float, float] | None:
    """Estimates a pass from measured rates.

    Returns:
        the seconds of a pass of one row, the seconds of each row beyond the knee, and the knee in
        rows. None if no rates are known, or if a pass has too little arithmetic to predict.
    """

    def computing_s(rows: int) -> float:
        found = pass_time(plan, rows)
        return found.compute_s + found.layers_s + found.hosts_s

    known = plan.machine.flops and not plan.machine.vram_bytes
    if not known or pass_time(plan, _FEW).compute_s < _SMALL_S:
        return None
    base_s = max(stream_s, computing_s(1))
    knee = most_rows(computing_s, base_s)
    return base_s, (computing_s(knee + _BEYOND) - base_s) / _BEYOND, float(knee)


def _arithmetic(
    model: StreamedModel,
    sizes: ModelBytes,
    rows: int,
    run_pass: Callable[[], Tensor],
    passes: int = _PASSES,
) -> tuple[float, float]:
    """Seconds of arithmetic in a pass of one row, streaming left out, and of each further row.

    Args:
        passes: how often a small model's pass is timed.
    """
    linear, tensors = _sample(model)
    few, many = _FEW, _MANY
    block_rows = _block_rows(linear, model.device)
    if block_rows > 1:  # fewer rows take as long as a full block
        few, many = block_rows, max(2 * block_rows, BLOCK_ROWS)
    share = _weights(sizes) / (linear.in_features * linear.out_features)
    products_s = _products_s(model, linear, tensors, (few, many))
    few_s, many_s = (share * seconds for seconds in products_s)
    # Bounds that hold even if the measurement was disturbed: a row costs between 5 % and 100 % of
    # its share of many_s.
    row_s = (many_s - few_s) / (many - few)
    row_s = min(max(row_s, 0.05 * many_s / many), many_s / many)
    first_s = max(few_s - (few - 1) * row_s, row_s)
    if few_s < _SMALL_S:
        pass_s = min(_seconds(run_pass) for _ in range(passes))
        first_s = max(first_s, pass_s - (max(rows, block_rows) - 1) * row_s)
    return first_s, row_s


def _block_rows(linear: _Linear, device: torch.device) -> int:
    """Rows that a device multiplies by a linear's weight in the time of one."""
    if device.type == "cpu":
        return 1
    if isinstance(linear, QuantizedLinear) and dispatch.fuses(linear.format, device):
        return dispatch.FUSED_ROWS
    return linear.block_rows or 1


def _sample(model: StreamedModel) -> tuple[_Linear, dict[str, Tensor]]:
    """The largest linear of the first layer that is quick to time, and made-up weights for it."""
    first = model.skeleton.layers[0].get_submodule("layer")
    linears = {
        path: module for path, module in first.named_modules() if isinstance(module, _Linear)
    }

    def preference(path: str) -> tuple[bool, int]:
        weights = linears[path].in_features * linears[path].out_features
        return weights <= _MOST_WEIGHTS, weights if weights <= _MOST_WEIGHTS else -weights

    path = max(linears, key=preference)
    if model.source is None:
        return linears[path], {}  # its own weights are resident
    stored = model.skeleton.layer_tensors[0]
    tensors = {}
    for leaf, parameter in linears[path].named_parameters():
        dtype = TORCH_DTYPES[stored[f"{path}.{leaf}"].dtype]
        # zeros and denormal numbers may be faster or slower to multiply; indices must be in range
        value = 0.5 if dtype.is_floating_point else 0
        tensors[leaf] = torch.full(parameter.shape, value, dtype=dtype, device=model.device)
    return linears[path], tensors


def _products_s(
    model: StreamedModel, linear: _Linear, tensors: dict[str, Tensor], counts: tuple[int, int]
) -> tuple[float, float]:
    """Median seconds of a linear over few and over many rows, in runs that take turns."""
    inputs = [
        torch.full((rows, linear.in_features), 0.5, dtype=model.dtype, device=model.device)
        for rows in counts
    ]

    def product(rows: Tensor) -> Tensor:
        output: Tensor = functional_call(linear, tensors, (rows,))
        return output

    with torch.no_grad():
        for rows in inputs:
            product(rows)  # compiles kernels if need be
        turns = [[_seconds(partial(product, rows)) for rows in inputs] for _ in range(_RUNS)]
    few_s, many_s = (median(times) for times in zip(*turns, strict=True))
    return few_s, many_s


def _seconds(run: Callable[[], Tensor]) -> float:
    """Seconds of one run, until its result has reached the CPU."""
    started = time.perf_counter()
    run().flatten()[0].item()
    return time.perf_counter() - started
