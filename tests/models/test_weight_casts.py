from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from models.layers.joint_linear import JointLinear
from models.weight_casts import Place, cast_together, casting_weights, replacing_parameters


class CastCounter(TorchDispatchMode):
    """Counts casts of single tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(2), nn.Linear(16, 5), nn.LayerNorm(5), nn.Linear(5, 2)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def train_once(cast: bool, dtype: torch.dtype | None) -> tuple[list[Tensor], int]:
    model, images = build(), torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    with CastCounter() as casts:
        autocast = torch.autocast("cpu", dtype=dtype, enabled=dtype is not None)
        with autocast, casting_weights(model) if cast else nullcontext():
            output = model(images)
        output.float().square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [output.detach(), *(gradient for gradient in gradients if gradient is not None)], casts.count


def test_outputs_and_gradients_are_those_of_autocast_bit_for_bit() -> None:
    (together, few), (alone, many) = (train_once(cast, torch.bfloat16) for cast in (True, False))
    assert len(together) == len(alone) == 9
    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))
    assert many - few == 12  # weight and bias of three layers, forward and back


def test_without_autocast_nothing_is_cast() -> None:
    (together, few), (alone, many) = (train_once(cast, None) for cast in (True, False))
    assert few == many == 0
    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))


def test_the_parameters_are_put_back_even_after_an_error() -> None:
    model = build()
    before = list(model.named_parameters())
    dtypes = []
    model[5].register_forward_pre_hook(
        lambda module, inputs: dtypes.extend([module.weight.dtype, model[4].weight.dtype])
    )
    with (
        pytest.raises(RuntimeError),
        torch.autocast("cpu", dtype=torch.bfloat16),
        casting_weights(model),
    ):
        model(torch.randn(2, 3, 1, 1))  # smaller than the kernel
    assert dtypes == []
    with torch.autocast("cpu", dtype=torch.bfloat16), casting_weights(model):
        model(torch.randn(2, 3, 6, 6))
    assert dtypes == [torch.bfloat16, torch.float32]  # norms stay as they are
    assert all(now is then for (_, now), (_, then) in zip(model.named_parameters(), before, strict=True))


def test_a_place_shows_what_stands_there() -> None:
    layer, other = nn.Linear(2, 2), torch.zeros(2, 2)
    place = Place(layer, "weight")
    with replacing_parameters([place], [other]):
        assert place.tensor is other
    assert place.tensor is layer.weight


def test_results_that_nobody_uses_have_no_gradient() -> None:
    used, unused = (torch.randn(3, requires_grad=True) for _ in range(2))
    cast_together([], [used, unused], torch.float16)[1][0].sum().backward()
    assert used.grad is not None
    assert used.grad.dtype == torch.float32
    assert unused.grad is None


def test_what_is_frozen_has_no_backward_pass() -> None:
    trained, frozen = torch.randn(3, requires_grad=True), torch.randn(3)
    _, (cast_trained, cast_frozen) = cast_together([], [trained, frozen], torch.bfloat16)
    assert cast_trained.requires_grad
    assert not cast_frozen.requires_grad
    model = build()
    model[0].requires_grad_(False)
    with torch.autocast("cpu", dtype=torch.bfloat16), casting_weights(model):
        assert not model[:3](torch.randn(2, 3, 6, 6)).requires_grad
        assert model(torch.randn(2, 3, 6, 6)).requires_grad


def test_strides_are_kept() -> None:
    kernel = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    _, (cast,) = cast_together([], [kernel], torch.bfloat16)
    assert cast.stride() == kernel.stride()
    assert torch.equal(cast, kernel.bfloat16())


def test_groups_are_joined_and_their_gradients_parted() -> None:
    first, second, single = (torch.randn(rows, 3, requires_grad=True) for rows in (2, 4, 1))
    (joined,), (alone,) = cast_together([[first, second]], [single], torch.bfloat16)
    assert torch.equal(joined, torch.cat((first, second)).bfloat16())
    assert torch.equal(alone, single.bfloat16())
    upstream = torch.randn(6, 3).bfloat16()
    joined.backward(upstream)
    assert torch.equal(first.grad, upstream[:2].float())
    assert torch.equal(second.grad, upstream[2:].float())
    assert single.grad is None


def test_joint_layers_find_their_weights_joined_for_a_while() -> None:
    layers = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 3)])
    joint = JointLinear(*layers)
    owner = nn.ModuleList([layers, joint, nn.Linear(4, 4)])
    with torch.autocast("cpu", dtype=torch.bfloat16), casting_weights(owner):
        assert joint.joined is not None
        weight, bias = joint.joined
        assert torch.equal(weight, torch.cat([layer.weight for layer in layers]).bfloat16())
        assert torch.equal(bias, torch.cat([layer.bias for layer in layers]).bfloat16())
        assert layers[0].weight.dtype == torch.float32  # what is joined is not cast once more
    assert joint.joined is None
    with pytest.raises(RuntimeError), torch.autocast("cpu", dtype=torch.bfloat16), casting_weights(owner):
        owner[2](torch.randn(2, 5))
    assert joint.joined is None
