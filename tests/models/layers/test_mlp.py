import torch
from torch import nn

from models.layers.mlp import MLP


def test_relu_between_but_not_after_the_layers() -> None:
    mlp = MLP(in_features=2, hidden_features=3, out_features=4, num_layers=3)
    features = torch.randn(5, 2)
    first, second, third = mlp.layers
    nn.init.constant_(third.bias, -10)
    torch.testing.assert_close(mlp(features), third(second(first(features).relu()).relu()))
    assert mlp(features).max() < 0
    assert [tuple(parameter.shape) for parameter in mlp.parameters()] == [(3, 2), (3,), (3, 3), (3,), (4, 3), (4,)]
