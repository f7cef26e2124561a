import pytest
import torch

from models.layers.feed_forward import relu_dropout


def test_without_dropping_it_is_relu() -> None:
    features = torch.randn(50)
    assert torch.equal(relu_dropout(features, 0.3, training=False), features.relu())
    assert torch.equal(relu_dropout(features, 0.0, training=True), features.relu())


@pytest.mark.parametrize("probability", [0.3, 1.0])
def test_output_and_gradient_are_those_of_relu_and_dropout(probability: float) -> None:
    results = []
    for function in (
        lambda features: relu_dropout(features, probability, training=True),
        lambda features: torch.nn.functional.dropout(features.relu(), probability),
    ):
        features = torch.randn(400, generator=torch.Generator().manual_seed(0), requires_grad=True)
        torch.manual_seed(1)
        output = function(features)
        output.backward(torch.arange(400.0))
        results.append((output, features.grad))
    (output, gradient), (expected, expected_gradient) = results
    assert torch.equal(output, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    assert (output > 0).any() == (probability < 1)


def test_keeps_one_tensor_for_the_backward_pass() -> None:
    features = torch.randn(400, requires_grad=True) * 2
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda x: x):
        relu_dropout(features, 0.5, training=True)
    assert kept == [(400,)]
