"""Multi-layer perceptron of the box heads."""

from itertools import pairwise

from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, *, in_features: int, hidden_features: int, out_features: int, num_layers: int) -> None:
        """Creates the layers.

        Args:
            in_features: channels of the input.
            hidden_features: channels between the layers.
            out_features: channels of the output.
            num_layers: number of linear layers, at least 1.
        """
        super().__init__()
        widths = [in_features, *[hidden_features] * (num_layers - 1), out_features]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))

    def forward(self, features: Tensor) -> Tensor:
        """Maps float [..., in_features] to [..., out_features]."""
        for layer in self.layers[:-1]:
            features = layer(features).relu()
        return self.layers[-1](features)
