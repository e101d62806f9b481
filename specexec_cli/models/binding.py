"""Putting tensors into modules that have none of their own, and taking them out again."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


class Binding:
    """Places inside a module whose tensors come and go with a layer or an expert.

    torch's functional_call looks through all modules at every call: for one row that takes longer
    than the products, and a mixture's layer has thousands of tensors.
    """

    def __init__(self, module: nn.Module, keys: Mapping[str, str]) -> None:
        """Remembers what is there now.

        Args:
            keys: path inside the module, as `gate.weight`, to the name by which `bind` finds what
                belongs there.
        """
        self._places = []
        for path, key in keys.items():
            parent, _, leaf = path.rpartition(".")
            part = module.get_submodule(parent)
            members = part._buffers if leaf in part._buffers else part._parameters
            self._places.append((members, leaf, key, members[leaf]))

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Take tensors by their keys."""
        for members, leaf, key, _ in self._places:
            members[leaf] = tensors[key]  # type: ignore[assignment]

    def release(self) -> None:
        """Put back what was there; no view of the tensors is left in the module."""
        for members, leaf, _, empty in self._places:
            members[leaf] = empty  # type: ignore[assignment]
