import torch
from torch import nn

from models.weight_hash import hash_weights


def test_the_hash_sees_names_shapes_and_numbers():
    weights = {"a": torch.zeros(2, 3), "b": torch.ones(3)}
    base = hash_weights(weights)
    assert hash_weights(dict(reversed(weights.items()))) == base
    for other in (
        {"a": torch.zeros(3, 2), "b": torch.ones(3)},
        {"a": torch.zeros(2, 3), "c": torch.ones(3)},
        {"a": torch.zeros(2, 3), "b": torch.tensor([1, 1, 1 + 1e-6])},
        {"a": torch.zeros(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)},
    ):
        assert hash_weights(other) != base


def test_the_hash_sees_one_bit():
    model = nn.Linear(3, 2)
    before = hash_weights(model.state_dict())
    with torch.no_grad():
        model.bias[0] = torch.nextafter(model.bias[0], torch.tensor(torch.inf))
    assert hash_weights(model.state_dict()) != before
