"""Linears whose weight stays packed as it is on disk.

Where it stays on a GPU its bytes may be put in an order that is read faster there.

The packed tensors are parameters of the module, so they are streamed like any other weight. The
kernels (specexec_kernels) unpack them while multiplying.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import torch
from specexec_kernels import dispatch
from specexec_kernels.formats.base import PackedFormat, PackedWeight
from torch import Tensor, nn


class QuantizedLinear(nn.Module):
    """nn.Linear over a packed weight; the weight's tensors are the module's parameters."""

    bias: nn.Parameter | None
    block_rows: int | None = None  # see own_rows.py
    eight_bit_rows = False  # see PackedWeight

    def __init__(
        self,
        in_features: int,
        out_features: int,
        fmt: PackedFormat,
        stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        *,
        bias: bool,
    ) -> None:
        """Makes empty parameters; `stored` gives each one's shape and dtype by leaf."""
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.bias = _meta((out_features,), torch.float16) if bias else None
        self.format = fmt
        self._names = {leaf: parameter_name(leaf) for leaf in stored}
        for leaf, (shape, dtype) in stored.items():
            self.register_parameter(self._names[leaf], _meta(shape, dtype))

    @classmethod
    def of(cls, weight: PackedWeight) -> QuantizedLinear:
        """A linear without a bias that has this weight."""
        stored = {leaf: (tuple(t.shape), t.dtype) for leaf, t in weight.tensors.items()}
        found = cls(weight.in_features, weight.out_features, weight.format, stored, bias=False)
        for leaf, tensor in weight.tensors.items():
            found.register_parameter(
                parameter_name(leaf), nn.Parameter(tensor, requires_grad=False)
            )
        return found

    def forward(self, rows: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features), in the dtype of `rows`."""
        return self._product(rows, rows.dtype)

    def wide(self, rows: Tensor) -> Tensor:
        """On a GPU: (..., in_features) of two bytes -> (..., out_features) float32, not rounded."""
        return self._product(rows, torch.float32)

    def _product(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        flat = rows.reshape(-1, self.in_features)
        output = dispatch.quantized_matmul(flat, self.packed_weight(), dtype, self.block_rows)
        if self.bias is not None:
            output += self.bias.to(output.dtype)
        return output.view(*rows.shape[:-1], self.out_features)

    def rearrange(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Has the weight, which stays on a GPU, lie as its format is read fastest there.

        Args:
            tensors: by leaf; their memory is used again.
        Returns:
            the tensors by leaf that the weight has from now on; none where nothing changes.
        """
        staying = self.format.staying(self.in_features)
        if staying is None:
            return {}
        weight = PackedWeight(self.format, self.in_features, self.out_features, tensors)
        rearranged = self.format.rearrange(weight.matrices())
        self.format = staying
        return {leaf: tensors[leaf].view(new.shape).copy_(new) for leaf, new in rearranged.items()}

    @property
    def leaves(self) -> Mapping[str, str]:
        """The names of the weight's parameters by leaf."""
        return self._names

    def stored_weight(self) -> PackedWeight:
        """The weight as it is stored; see MixedLinear.stored_weight."""
        return self.packed_weight()

    def packed_weight(self) -> PackedWeight:
        """The tensors that are bound to this module now."""
        bound = self._parameters  # bypasses nn.Module's slow attribute lookup
        tensors = {leaf: cast(Tensor, bound[name]) for leaf, name in self._names.items()}
        return PackedWeight(
            self.format, self.in_features, self.out_features, tensors, self.eight_bit_rows
        )


def round_rows(model: nn.Module, others: Iterable[nn.Module] = ()) -> None:
    """Has a CPU round the rows of a model's packed linears to 8 bits.

    Args:
        others: parts that another model has too, whose rows stay as they are.
    """
    theirs = {part for other in others for part in other.modules()}
    for module in model.modules():
        if isinstance(module, QuantizedLinear) and module not in theirs:
            module.eight_bit_rows = True


def parameter_name(leaf: str) -> str:
    """The name of a leaf's parameter; PyTorch allows no dots in it."""
    return leaf.replace(".", "__")


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
