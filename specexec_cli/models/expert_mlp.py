"""The gated MLPs (experts) of a mixture's layer: routes rows, computes experts, sums their outputs.

On a CPU one launch of kernels computes the products of all experts at hand: for a single expert,
starting a kernel would take longer than multiplying. A row's result does not depend on the device,
on the other rows, or on the order in which experts are computed. The products of all kernels have
the same bits, and each row adds its experts' outputs in the order of the experts' numbers.

Where all experts of a layer lie on a GPU, the router's choices stay there too (OnDevice).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import torch
from specexec_kernels import cpu_experts, cpu_grouped, dispatch
from specexec_kernels.cpu_experts import Experts
from specexec_kernels.cpu_grouped import Group
from specexec_kernels.cpu_layer import Workspace
from specexec_kernels.formats.plain import Plain
from torch import Tensor, nn
from transformers.integrations.moe import _default_apply_gate

from specexec_cli.models.expert_tables import OnDevice
from specexec_cli.models.linear import MixedLinear, TransposedLinear
from specexec_cli.models.own_bits import with_own_bits
from specexec_cli.models.packed_linear import QuantizedLinear
from specexec_cli.models.usual_layer import known_activation

Linear = MixedLinear | QuantizedLinear


class Routing:
    """Which rows each expert of a layer computes, and where the results are kept.

    Every row has one place for each of its chosen experts, in the order of the experts' numbers.
    Most passes have few rows, for which plain Python is faster than operations on arrays.
    """

    def __init__(self, top_k_index: Tensor) -> None:
        """Orders the router's choices, (rows, chosen) expert numbers."""
        self.rows, self.chosen = top_k_index.shape
        self.choices: list[int] = []  # place -> flat index into the router's (rows, chosen)
        self._places: dict[int, list[int]] = {}  # expert -> its places, rising
        for row, picks in enumerate(top_k_index.tolist()):
            first = row * self.chosen
            for choice in sorted(range(self.chosen), key=picks.__getitem__):
                self._places.setdefault(picks[choice], []).append(len(self.choices))
                self.choices.append(first + choice)

    @property
    def wanted(self) -> dict[int, int]:
        """Number of rows for each expert that has any, by rising expert number."""
        return {expert: len(self._places[expert]) for expert in sorted(self._places)}

    def rows_of(self, expert: int) -> list[int]:
        """The rows that are routed to an expert, rising."""
        return [place // self.chosen for place in self._places[expert]]

    def places_of(self, experts: Sequence[int]) -> list[int]:
        """The places of these experts' results, one expert's rows after another's."""
        return [place for expert in experts for place in self._places[expert]]


class RowSums:
    """Collects the experts' outputs, from any device, and sums each row's in a fixed order."""

    def __init__(self, rows: Tensor, weights: Tensor, routing: Routing) -> None:
        """Takes the (rows, hidden) rows and the router's (rows, chosen) weights."""
        in_place = weights.reshape(-1, 1)[routing.choices]
        self._on = {rows.device: (rows, in_place)}
        self._rows, self._routing = rows, routing
        self._found: Tensor | None = None  # (rows * chosen, hidden)

    def rows_on(self, device: torch.device) -> Tensor:
        """The (rows, hidden) rows on a device; they are copied there once."""
        return self._inputs(device)[0]

    def _inputs(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._on:
            rows, weights = self._on[self._rows.device]
            self._on[device] = rows.to(device), weights.to(device)
        return self._on[device]

    def add(self, experts: Sequence[int], outputs: Tensor) -> None:
        """Takes the outputs of some experts, one expert's rows after another's."""
        places, size = self._routing.places_of(experts), len(self._routing.choices)
        weights = self._inputs(outputs.device)[1]
        if places == list(range(size)):  # every output, already in order
            self._found = (outputs * weights).to(self._rows)
            return
        if self._found is None:
            self._found = self._rows.new_empty(size, self._rows.shape[1])
        self._found[places] = (outputs * weights[places]).to(self._found)

    def total(self) -> Tensor:
        """The sums, (rows, hidden); to be called when all experts were added."""
        total = torch.zeros_like(self._rows)
        if self._found is not None:
            for part in self._found.view(*self._rows.shape[:1], -1, self._rows.shape[1]).unbind(1):
                total += part
        return total


class PerExpert(nn.Module):
    """Mixture-of-experts block over separate matrices, as checkpoints store them.

    transformers fuses the experts into three-dimensional tensors. For a streamed layer that would
    copy every expert, including those to which no row is routed. Here each expert keeps its own
    linears.
    """

    def __init__(self, experts: nn.ModuleList, gate: nn.Module) -> None:
        """Takes over the experts' linears.

        Args:
            experts: two or three linears for each expert, `down` last.
            gate: computes the input of `down` from the outputs of the other linears, each row by
                itself.
        """
        super().__init__()
        self.experts = experts
        self.gate = gate
        # These dicts bypass nn.Module's slow attribute lookup, and still show linears that are
        # replaced later.
        self._linears = [cast(nn.ModuleDict, expert)._modules for expert in experts]
        self._stays = False
        self._activation = known_activation(gate.act_fn) if isinstance(gate, _ActTimesUp) else None
        self.space: Workspace | None = None  # of the model, where it is known
        self._known: dict[int, ExpertWeights] = {}  # kept while the parameters stay bound
        self._on_device: OnDevice | None = None  # kept as long
        self._buffer: int | None = None
        self._in_buffers: dict[int, OnDevice] = {}

    def stay(self, stays: bool, buffer: int | None = None) -> None:
        """Sets whether the linears' parameters stay bound, so that their weights are kept here.

        Args:
            buffer: where they lie at addresses that they always have there; None forgets all such.
        """
        self._stays, self._buffer = stays, buffer
        self._known.clear()
        if buffer is None:
            self._in_buffers.clear()
        self._on_device = None if buffer is None else self._in_buffers.get(buffer)

    def forward(self, rows: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts.

        Args:
            rows: (rows, hidden).
            top_k_index: (rows, k) experts chosen by the router.
            top_k_weights: (rows, k) their weights.
        Returns:
            (rows, hidden).
        """
        together = self.on_device(rows.device)
        if together.takes:
            return together.forward(rows, top_k_index, top_k_weights)
        routing = Routing(top_k_index)
        sums = RowSums(rows, top_k_weights, routing)
        chosen = list(routing.wanted)
        known = [self.weights_of(expert) for expert in chosen] if rows.device.type == "cpu" else []
        sums.add(chosen, self.compute(chosen, rows, routing, known))
        return sums.total()

    @property
    def keeps_tables(self) -> bool:
        """Whether a GPU computes all experts together, by tables that it has for good."""
        return self._on_device is not None and self._on_device.takes

    def on_device(self, device: torch.device) -> OnDevice:
        """How a GPU computes all experts together, as they are bound now."""
        if self._on_device is not None:
            return self._on_device
        uses = dispatch.uses_triton(device)
        every = [self.weights_of(expert) for expert in range(len(self.experts))] if uses else []
        found = OnDevice(
            [[placed.weight for placed in each.group.weights] for each in every],
            [each.biases for each in every],
            self.gate,
        )
        if self._stays or self._buffer is not None:
            self._on_device = found
        if self._buffer is not None:
            self._in_buffers[self._buffer] = found
        return found

    def weights_of(self, expert: int) -> ExpertWeights:
        """The weights that are bound to an expert's linears now."""
        if expert in self._known:
            return self._known[expert]
        linears = cast(list[Linear], list(self._linears[expert].values()))
        found = ExpertWeights(
            Group([linear.stored_weight() for linear in linears]),
            [linear._parameters.get("bias") for linear in linears],
        )
        if self._stays:
            self._known[expert] = found
        return found

    def compute(
        self,
        chosen: Sequence[int],
        rows: Tensor,
        routing: Routing,
        known: Sequence[ExpertWeights],
    ) -> Tensor:
        """Outputs of some experts, one expert's rows after another's.

        Args:
            rows: (rows, hidden) on the device of the weights.
            known: the weights of each chosen expert, see `weights_of`; empty on a GPU, where they
                are not needed. Where `takes_together` is False, the weights must also be bound to
                the experts' linears.
        """
        takes = [routing.rows_of(expert) for expert in chosen]
        if self.takes_together(rows, known):
            return self._together(rows, takes, known)
        outputs = []
        for expert, take in zip(chosen, takes, strict=True):
            *inner, down = cast(list[Linear], list(self._linears[expert].values()))
            own = rows[torch.tensor(take, device=rows.device)]
            outputs.append(down(self.gate(*(linear(own) for linear in inner))))
        return torch.cat(outputs)

    def takes_together(self, rows: Tensor, weights: Sequence[ExpertWeights]) -> bool:
        """Whether one launch of kernels computes these experts; weights need not be bound then."""
        # one launch multiplies by all linears except the last, `down`, which has its own launch
        if not weights or len(set(weights[0].group.kinds[:-1])) > 1:
            return False
        return cpu_grouped.takes_together(rows, [each.group for each in weights])

    def _together(
        self,
        rows: Tensor,
        takes: Sequence[Sequence[int]],
        weights: Sequence[ExpertWeights],
    ) -> Tensor:
        sizes = [len(take) for take in takes]
        if max(sizes) == 1 and (at_once := self._at_once(rows, weights)) is not None:
            return at_once.run(
                rows, [row for (row,) in takes], [each.group.weights for each in weights]
            )
        placed = [each.group.weights for each in weights]
        inner = cpu_grouped.products(rows, takes, [each[:-1] for each in placed])
        parts = [
            _biased(part, weights, place, sizes, rows.dtype) for place, part in enumerate(inner)
        ]
        own = [range(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
        outputs = cpu_grouped.products(self.gate(*parts), own, [each[-1:] for each in placed])[0]
        return _biased(outputs, weights, -1, sizes, rows.dtype)

    def _at_once(self, rows: Tensor, weights: Sequence[ExpertWeights]) -> Experts | None:
        """What computes a row by each of some experts as one call; None where nothing does."""
        first = weights[0]
        if self._activation is None or self.space is None or first.biases[0] is not None:
            return None
        return cpu_experts.experts(rows, len(weights), first.group, self._activation, self.space)


class ExpertWeights:
    """The weights of one expert as they are stored, `down` last, and their biases."""

    __slots__ = ("biases", "group", "packed")

    def __init__(self, group: Group, biases: Sequence[Tensor | None]) -> None:
        self.group, self.biases = group, biases
        self.packed = not isinstance(group.weights[0].weight.format, Plain)


def _biased(
    sums: Tensor,
    weights: Sequence[ExpertWeights],
    place: int,
    sizes: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """Adds the biases of the experts' linears at `place` to their sums; `sizes` are rows each."""
    biases = [each.biases[place] for each in weights]
    if biases[0] is None:
        return sums.to(dtype)
    # biases of packed weights are added after rounding, those of plain weights before
    outputs = sums.to(dtype) if weights[0].packed else sums
    for bias, part in zip(biases, torch.split(outputs, list(sizes)), strict=True):
        part += cast(Tensor, bias).to(dtype)
    return outputs.to(dtype)


class _ActTimesUp(nn.Module):
    """The gate of most mixtures: the activation of `gate` times `up`."""

    def __init__(self, act_fn: nn.Module) -> None:
        super().__init__()
        self.act_fn = act_fn

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        output: Tensor = self.act_fn(gate) * up
        return output


class _OwnGate(nn.Module):
    """The gate from an architecture's own modelling code."""

    def __init__(self, fused: nn.Module, *, interleaved: bool) -> None:
        """Takes the gate from transformers' module of all experts, and drops that module's weights.

        Args:
            interleaved: whether the gate expects the outputs of `gate` and `up` alternating, while
                `forward` is given them as separate tensors.
        """
        super().__init__()
        self.fused = fused
        self._interleaved = interleaved
        for name in list(fused._parameters):
            fused.register_parameter(name, None)
        self._gate = with_own_bits(type(fused)._apply_gate)  # type: ignore[attr-defined]

    def forward(self, *parts: Tensor) -> Tensor:
        both = torch.stack(parts, -1).flatten(-2) if self._interleaved else torch.cat(parts, dim=-1)
        output: Tensor = self._gate(self.fused, both)
        return output


def per_expert(
    fused: nn.Module, *, transposed: bool, halves_apart: bool | None = None
) -> PerExpert:
    """Separate linears in place of transformers' module of all experts (see has_separable_experts).

    Args:
        transposed: whether the checkpoint stores the matrices as (inputs, outputs).
        halves_apart: whether the checkpoint stores `gate` and `up` as separate matrices. None:
            it stores all experts in one tensor, and the layout of that tensor decides.
    """
    gate_up, down = cast(Tensor, fused.gate_up_proj), cast(Tensor, fused.down_proj)
    bias = bool(fused.has_bias)
    kind = TransposedLinear if transposed else MixedLinear
    count, *sizes = gate_up.shape
    double, hidden = reversed(sizes) if fused.is_transposed else sizes
    # a half that is contiguous in the tensor can be used as a separate matrix
    apart = bool(fused.is_concatenated) and not (transposed or bias)
    apart = apart if halves_apart is None else halves_apart
    inner = double // 2

    def expert() -> nn.ModuleDict:
        linears: dict[str, nn.Module] = {}
        for name in ("gate", "up") if apart else ("gate_up",):
            linears[name] = kind(hidden, inner if apart else double, bias=bias)
        linears["down"] = kind(inner, hidden, bias=bias)
        return nn.ModuleDict(linears)

    assert down.shape[0] == count, "both are of all experts"
    own = type(fused)._apply_gate is not _default_apply_gate  # type: ignore[attr-defined]
    plain = apart and not own
    gate: nn.Module
    if plain:
        gate = _ActTimesUp(cast(nn.Module, fused.act_fn))
    else:
        gate = _OwnGate(fused, interleaved=apart and not fused.is_concatenated)
    return PerExpert(nn.ModuleList(expert() for _ in range(count)), gate)
