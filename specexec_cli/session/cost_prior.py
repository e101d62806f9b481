"""What is known of the cost of iterations before the first: what the policy cost begins with.

A pass streams its bytes at the rate that the link was probed at. A CPU multiplies at the rates that
were measured at its first use (planning/measured_rates.py). Where there are none, as of a GPU, the
rate is measured here, on one of the model's own linears filled with made-up weights. Small models
spend their time between the products; those run a pass to find out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.func import functional_call

from specexec_cli.core import DraftTree
from specexec_cli.drafting.iteration_cost import CostModel
from specexec_cli.models.linear import MixedLinear
from specexec_cli.models.packed_linear import QuantizedLinear
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.resident import TORCH_DTYPES
from specexec_cli.planning.measured_rates import most_rows
from specexec_cli.planning.memory import BLOCK_ROWS
from specexec_cli.planning.pass_time import pass_time
from specexec_cli.planning.resolve import Decision
from specexec_cli.planning.sizes import ModelBytes
from specexec_cli.planning.tiers import Plan
from specexec_cli.verify.verifier import LocalTarget

# Rows of a measured product. A CPU multiplies in chunks of up to 13 rows, and a kernel is compiled
# for each size of a chunk: these two need no other kernel than the passes to come.
_FEW, _MANY = 12, 36
_MOST_WEIGHTS = 1 << 24  # of the linear that is measured: some 10 ms on a CPU
_SMALL_S = 0.05  # passes with less arithmetic are run
_BEYOND = 64  # rows behind the knee, over which a row's seconds are taken
_RUNS = 5
_PASSES = 2  # of a small model, likewise

_Linear = MixedLinear | QuantizedLinear


def measured_prior(
    decision: Decision, target: LocalTarget, draft: StreamedModel | None
) -> CostModel:
    """The cost model by the probed link and measured arithmetic; takes at most some 10 ms.

    Args:
        target: idle; its cache is left as it is.
    Raises:
        StreamError: the weights could not be read.
    """
    model, sizes = target.model, decision.target.sizes
    stream_s, of_few_s = (_stream_s(decision.plan, count) for count in (1, _FEW))
    found = _by_rates(decision.plan, stream_s)
    if found is None:
        rows = min(_FEW, model.context_length - len(target.tokens))
        try:
            first_s, row_s = _arithmetic(
                model, sizes, rows, lambda: target.verify([0] * rows, DraftTree.empty())
            )
        finally:
            target.crop(len(target.tokens))
        base_s = max(stream_s, first_s)
        knee = 1.0 + (base_s - first_s) / row_s if row_s else 0.0
    else:
        base_s, row_s, knee = found
    step_s = 0.0  # what the text's own past says costs next to nothing
    if draft is not None and decision.draft is not None:
        chain = PassRows.chain([0] * min(_FEW, draft.context_length), 0)
        draft_first_s, draft_row_s = _arithmetic(
            draft, decision.draft.sizes, len(chain.tokens),
            lambda: draft.forward(chain, draft.new_state(), [0]),
        )  # fmt: skip
        step_s = draft_first_s + (decision.tree.batch - 1) * draft_row_s
    block_rows = BLOCK_ROWS if model.device.type == "cuda" else 1
    if of_few_s > stream_s:  # each row of a mixture brings its own experts: none hides behind it
        row_s, knee, block_rows = row_s + (of_few_s - stream_s) / (_FEW - 1), 1.0, 1
    return CostModel(
        base_s=base_s,
        row_s=row_s,
        knee_rows=knee,
        step_s=step_s,
        block_rows=block_rows,
    )


def _stream_s(plan: Plan, rows: int) -> float:
    """Seconds of a pass's stream; on a CPU, layers in RAM are where they are computed."""
    found = pass_time(plan, rows)
    return max(found.ssd_s, found.link_s)


def _weights(sizes: ModelBytes) -> int:
    """Weights that every row is multiplied by, the output head included."""
    return sizes.active_params + sizes.vocab * sizes.hidden


def _by_rates(plan: Plan, stream_s: float) -> tuple[float, float, float] | None:
    """Seconds of a pass of one row, of each row beyond the knee, and the knee in rows.

    None where rates are not known, or a pass has so little arithmetic that they do not tell.
    """

    def computing_s(rows: int) -> float:
        found = pass_time(plan, rows)
        return found.compute_s + found.layers_s

    if pass_time(plan, _FEW).compute_s < _SMALL_S:
        return None
    base_s = max(stream_s, computing_s(1))
    knee = most_rows(computing_s, base_s)
    return base_s, (computing_s(knee + _BEYOND) - base_s) / _BEYOND, float(knee)


def _arithmetic(
    model: StreamedModel, sizes: ModelBytes, rows: int, run_pass: Callable[[], Tensor]
) -> tuple[float, float]:
    """Seconds of a pass of one row as far as they are not the stream's, and of each further row."""
    linear, tensors = _sample(model)
    few, many = _FEW, _MANY
    if linear.block_rows is not None:  # fewer rows than a block take as long as the block
        few, many = linear.block_rows, 2 * linear.block_rows
    share = _weights(sizes) / (linear.in_features * linear.out_features)
    products_s = _products_s(model, linear, tensors, (few, many))
    few_s, many_s = (share * seconds for seconds in products_s)
    # a disturbed measurement must not make rows free: each costs between 5 % and all of its share
    row_s = (many_s - few_s) / (many - few)
    row_s = min(max(row_s, 0.05 * many_s / many), many_s / many)
    first_s = max(few_s - (few - 1) * row_s, row_s)
    if few_s < _SMALL_S:
        pass_s = min(_seconds(run_pass) for _ in range(_PASSES))
        first_s = max(first_s, pass_s - (max(rows, linear.block_rows or 1) - 1) * row_s)
    return first_s, row_s


def _sample(model: StreamedModel) -> tuple[_Linear, dict[str, Tensor]]:
    """The largest linear of a layer that is quickly measured, and tensors such as it streams."""
    first = model.skeleton.layers[0].get_submodule("layer")
    linears = {
        path: module for path, module in first.named_modules() if isinstance(module, _Linear)
    }

    def preference(path: str) -> tuple[bool, int]:
        weights = linears[path].in_features * linears[path].out_features
        return weights <= _MOST_WEIGHTS, weights if weights <= _MOST_WEIGHTS else -weights

    path = max(linears, key=preference)
    if model.source is None:
        return linears[path], {}  # its weights are there
    stored = model.skeleton.layer_tensors[0]
    tensors = {}
    for leaf, parameter in linears[path].named_parameters():
        dtype = TORCH_DTYPES[stored[f"{path}.{leaf}"].dtype]
        # zeros and denormal numbers might be multiplied at another speed; indices must be small
        value = 0.5 if dtype.is_floating_point else 0
        tensors[leaf] = torch.full(parameter.shape, value, dtype=dtype, device=model.device)
    return linears[path], tensors


def _products_s(
    model: StreamedModel, linear: _Linear, tensors: dict[str, Tensor], counts: tuple[int, int]
) -> tuple[float, float]:
    """Seconds of few and of many rows through the linear: medians of runs that take turns."""
    inputs = [
        torch.full((rows, linear.in_features), 0.5, dtype=model.dtype, device=model.device)
        for rows in counts
    ]

    def product(rows: Tensor) -> Tensor:
        output: Tensor = functional_call(linear, tensors, (rows,))
        return output

    with torch.no_grad():
        for rows in inputs:
            product(rows)  # kernels may have to be compiled
        turns = [[_seconds(partial(product, rows)) for rows in inputs] for _ in range(_RUNS)]
    few_s, many_s = (median(times) for times in zip(*turns, strict=True))
    return few_s, many_s


def _seconds(run: Callable[[], Tensor]) -> float:
    """Seconds of one run, until its result is known to the host."""
    started = time.perf_counter()
    run().flatten()[0].item()
    return time.perf_counter() - started
