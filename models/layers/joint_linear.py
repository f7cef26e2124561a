"""Linear layers of one input, as one product."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class JointLinear(nn.Module):
    """Computes the results of several linear layers of the same input by one product.

    y_i = x W_i^T + b_i for all i, as the parts of x [W_1; W_2; ...]^T + [b_1; b_2; ...]: the input is read once, and
    its gradient is one product instead of a sum. The layers stay children of the module that owns them, which keeps
    their names and their parameters; here they are only referred to.

    Attributes:
        layers: the layers, of one input width, all with a bias.
        joined: weights and biases below one another, [sum of out_features, in_features] and [sum of out_features],
            where `models.weight_casts.casting_weights` has made them for a while; else None, and each call joins them.
    """

    def __init__(self, *layers: nn.Linear) -> None:
        """Refers to the layers."""
        super().__init__()
        self.layers = layers  # in a tuple, where PyTorch does not look for children
        self.joined: tuple[Tensor, Tensor] | None = None

    def parameters_to_join(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the layers' weights and their biases."""
        return [layer.weight for layer in self.layers], [layer.bias for layer in self.layers]

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        """Maps float [..., in_features] to one [..., out_features] a layer: strided views of one tensor."""
        weight, bias = self.joined or tuple(torch.cat(tensors) for tensors in self.parameters_to_join())
        return linear(features, weight, bias).split([layer.out_features for layer in self.layers], dim=-1)
