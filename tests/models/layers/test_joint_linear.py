import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from models.layers.joint_linear import JointLinear, split_rows
from models.weight_casts import casting_weights
from parity.tolerances import GRADIENT, OUTPUT

WIDTHS = (5, 3, 6)


class Owner(nn.Module):
    """Layers, and their joint product."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(16, width) for width in WIDTHS)
        self.joint = JointLinear(self.first, self.second, self.third)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, features: Tensor, together: bool) -> tuple[Tensor, ...]:
        if together:
            return self.joint(features)
        return tuple(layer(features) for layer in (self.first, self.second, self.third))


class OpCounter(TorchDispatchMode):
    """Counts calls of operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def differentiate(
    together: bool, dtype: torch.dtype = torch.float32, autocast: bool = False, cast: bool = False
) -> tuple[list[Tensor], list[Tensor], dict[str, int]]:
    owner = Owner().to(dtype)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(2, 7, 16, generator=generator).to(dtype).requires_grad_()
    upstream = [torch.randn(2, 7, width, generator=generator).to(dtype) for width in WIDTHS]
    with OpCounter() as counter:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            if cast:
                with casting_weights(owner):
                    outputs = owner(features, together)
            else:
                outputs = owner(features, together)
        torch.autograd.backward(outputs, [gradient.to(outputs[0].dtype) for gradient in upstream])
    gradients = [features.grad, *(parameter.grad for parameter in owner.parameters())]
    return list(outputs), [gradient for gradient in gradients if gradient is not None], counter.counts


def test_results_and_gradients_are_those_of_separate_products() -> None:
    (outputs, gradients, counts), (expected, expected_gradients, separate) = map(differentiate, (True, False))
    assert len(gradients) == len(expected_gradients) == 7
    for actual, wanted in zip(outputs + gradients, expected + expected_gradients, strict=True):
        torch.testing.assert_close(actual, wanted)
    assert (counts["addmm"], separate["addmm"]) == (1, 3)
    assert (counts["mm"], separate["mm"]) == (2, 6)  # of the input and of the weights


@pytest.mark.parametrize("cast", [False, True])
def test_bfloat16_errs_no_more_than_separate_products(cast: bool) -> None:
    exact = differentiate(False, torch.float64)
    competitor = differentiate(False, autocast=True)
    actual = differentiate(True, autocast=True, cast=cast)
    for results, bound in ((0, OUTPUT), (1, GRADIENT)):
        for joint, separate, expected in zip(actual[results], competitor[results], exact[results], strict=True):
            assert joint.dtype == separate.dtype
            error, allowed = ((found.double() - expected).abs().max().item() for found in (joint, separate))
            assert error <= bound.limit(allowed, expected.abs().max().item(), torch.bfloat16)
    assert actual[2]["cat"] == (1 if cast else 3)  # of the gradients; weights and biases by the cast, or where used


def test_parameters_stay_where_they_are() -> None:
    owner = Owner()
    names = [f"{layer}.{name}" for layer in ("first", "second", "third") for name in ("weight", "bias")]
    assert list(owner.state_dict()) == names == [name for name, _ in owner.named_parameters()]


def test_a_copy_refers_to_its_own_layers() -> None:
    owner = Owner()
    twin = copy.deepcopy(owner)
    with torch.no_grad():
        twin.second.bias.add_(1)
    features = torch.randn(4, 16)
    torch.testing.assert_close(twin.joint(features)[1], owner.joint(features)[1] + 1)
    assert twin.joint.layers == (twin.first, twin.second, twin.third)


def differentiate_rows(join: bool) -> tuple[Tensor, Tensor, dict[str, int]]:
    """Returns what rows get of gradients of their parts that lie in one tensor or apart, and that tensor."""
    rows = torch.randn(2, 7, sum(WIDTHS)).requires_grad_()
    joint = torch.randn(2, 7, sum(WIDTHS))
    upstream = [part if join else part.clone() for part in joint.split(WIDTHS, dim=-1)]
    parts = [part.unflatten(-1, (-1, 1)) for part in split_rows(rows, WIDTHS)]
    with OpCounter() as counter:
        (gradient,) = torch.autograd.grad(parts, rows, [part.unsqueeze(-1) for part in upstream])
    return gradient, joint, counter.counts


@pytest.mark.parametrize("join", [True, False])
def test_gradients_that_are_parts_of_one_tensor_are_not_copied(join: bool) -> None:
    gradient, joint, counts = differentiate_rows(join)
    assert torch.equal(gradient, joint)
    assert (gradient.data_ptr() == joint.data_ptr()) is join
    assert counts.get("cat", 0) == (0 if join else 1)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda parts: [parts[1], parts[0]],
        lambda parts: [parts[0], parts[0].clone()],
        lambda parts: [parts[0], parts[1].clone()],
        lambda parts: [parts[0].flip(0), parts[1]],
        lambda parts: [part[:, :1] for part in parts],
    ],
    ids=["exchanged", "other tensor", "copied", "other order", "other rows"],
)
def test_other_gradients_are_joined_as_by_split(spoil) -> None:  # type: ignore[no-untyped-def]
    upstream = spoil(torch.randn(3, 5, 8).split(4, dim=-1))
    gradients = []
    for split in (split_rows, lambda rows, widths: rows.split(widths, dim=-1)):
        rows = torch.randn(*upstream[0].shape[:2], 8).requires_grad_()
        gradients.append(torch.autograd.grad(split(rows, [4, 4]), rows, upstream)[0])
    assert torch.equal(*gradients)
    assert gradients[0].shape == (3, *upstream[0].shape[1:2], 8)


def test_rows_split_under_second_derivatives_and_vmap() -> None:
    rows = torch.randn(2, 3, 8, dtype=torch.float64).requires_grad_()

    def products(rows: Tensor) -> Tensor:
        first, second = split_rows(rows, [4, 4])
        return first.square() * second

    assert torch.autograd.gradcheck(products, rows)
    assert torch.autograd.gradgradcheck(products, rows)
    torch.testing.assert_close(torch.vmap(products)(rows), products(rows))
    gradient = torch.func.grad(lambda each: products(each).sum())
    torch.testing.assert_close(torch.vmap(gradient)(rows), gradient(rows))
