"""Activations of transformers' layers whose result for an element does not depend on the others."""

from __future__ import annotations

from specexec_kernels import cpu_activation
from specexec_kernels.cpu_activation import Activation
from torch import Tensor, nn
from transformers.activations import ACT2FN

# By transformers' names; others stay PyTorch's, which rounds what does not fill a vector otherwise.
_KERNELS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


class FixedActivation(nn.Module):
    """An activation that is computed by a kernel where there is one."""

    def __init__(self, activation: Activation, otherwise: nn.Module) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.otherwise = otherwise

    def forward(self, x: Tensor) -> Tensor:
        """Any shape; the same shape and dtype."""
        if cpu_activation.supports(x):
            return cpu_activation.apply(self.activation, x)
        output: Tensor = self.otherwise(x)
        return output


def replace_activations(layer: nn.Module) -> None:
    """Puts kernels in the place of a layer's activations."""
    classes = {type(ACT2FN[name]): kernel for name, kernel in _KERNELS.items()}
    for module in list(layer.modules()):
        for name, child in list(module.named_children()):
            if type(child) in classes:
                setattr(module, name, FixedActivation(classes[type(child)], child))
