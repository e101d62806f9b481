"""Puts tensors into modules that have none of their own, and takes them out again."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


class Binding:
    """Parameters and buffers of a module that are filled anew for each layer or expert.

    torch's functional_call would search all modules at every call. A mixture's layer has thousands
    of tensors, so for one row that search takes longer than the products.
    """

    def __init__(self, module: nn.Module, keys: Mapping[str, str]) -> None:
        """Looks up the places once and remembers their present contents.

        Args:
            keys: path inside the module, such as `gate.weight` -> the name under which `bind` is
                given the tensor for that path.
        """
        self._places = []
        for path, key in keys.items():
            parent, _, leaf = path.rpartition(".")
            part = module.get_submodule(parent)
            members = part._buffers if leaf in part._buffers else part._parameters
            self._places.append((members, leaf, key, members[leaf]))

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts tensors, given by their names, into their places."""
        for members, leaf, key, _ in self._places:
            members[leaf] = tensors[key]  # type: ignore[assignment]

    def release(self) -> None:
        """Restores the first contents, so that the module holds no view of a bound tensor."""
        for members, leaf, _, empty in self._places:
            members[leaf] = empty  # type: ignore[assignment]
