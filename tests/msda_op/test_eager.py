"""The op in eager code: what a call decides once, copies of strided inputs, gradients asked for twice."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from msda_op import call_memory, eager, fused_ms_deform_attn, ms_deform_attn
from msda_op.triton import launch
from parity.cases import Case
from parity.fused import FusedInputs, make_fused_inputs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASE = Case("small", ((3, 4), (2, 5)), num_queries=3, head_dim=32)


def parts_of_a_product(inputs: FusedInputs) -> tuple[Tensor, Tensor]:
    offsets, logits = inputs.sampling_offsets, inputs.attention_logits
    rows = torch.cat((offsets.flatten(2), logits.flatten(2)), -1)
    parts = rows.split((offsets[0, 0].numel(), logits[0, 0].numel()), dim=-1)
    return parts[0].view(offsets.shape).requires_grad_(), parts[1].view(logits.shape).requires_grad_()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[eager.Attention]:
    """What calls have been looked at."""
    attentions: list[eager.Attention] = []

    class Noted(eager.Attention):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            attentions.append(self)

    monkeypatch.setattr(eager, "Attention", Noted)
    return attentions


def attend(inputs: FusedInputs, offsets: Tensor, logits: Tensor, **changes: Any) -> Tensor:
    rest = (inputs.spatial_shapes, None, inputs.reference_points, offsets, logits)
    return fused_ms_deform_attn(inputs.value, *rest, backend="triton", deterministic=False, **changes)


def test_plain_kernels_get_one_copy_for_both_passes(monkeypatch: pytest.MonkeyPatch, made: list) -> None:
    monkeypatch.setattr(launch, "_capability_of", lambda tensor: (8, 0))
    given: list[Tensor] = []
    for name in ("forward_launch", "backward_launch"):
        original = getattr(launch, name)

        def note(*arguments: Any, original: Any = original) -> Any:
            inputs = next(argument for argument in arguments if isinstance(argument, launch.Inputs))
            given.extend((inputs.points, inputs.scores))
            return original(*arguments)

        monkeypatch.setattr(launch, name, note)
    inputs = make_fused_inputs(CASE, torch.float32, DEVICE, 0, 2)
    parts = parts_of_a_product(inputs)
    gradients = torch.autograd.grad(attend(inputs, *parts).sum(), parts)
    assert all(gradient.is_contiguous() for gradient in gradients)
    assert not made[0].joint
    points, scores, *again = given
    assert points.is_contiguous()
    assert scores.is_contiguous()
    assert [tensor.data_ptr() for tensor in again] == [points.data_ptr(), scores.data_ptr()]


@pytest.mark.usefixtures("hopper_kernels")
def test_second_derivatives_of_parts_are_refused_by_name() -> None:
    inputs = make_fused_inputs(CASE, torch.float32, DEVICE, 0, 2)
    offsets, logits = parts_of_a_product(inputs)
    output = attend(inputs, offsets, logits)
    gradients = torch.autograd.grad(output.square().sum(), (offsets, logits), create_graph=True)
    with pytest.raises(RuntimeError, match="pass backend='reference'"):
        torch.autograd.grad(gradients[0].sum(), logits)


@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("asked", [("offsets",), ("logits",), ("offsets", "logits")], ids=str)
def test_gradients_are_joint_only_together(asked: tuple[str, ...], made: list) -> None:
    inputs = make_fused_inputs(CASE, torch.float32, DEVICE, 0, 2)
    parts = dict(zip(("offsets", "logits"), parts_of_a_product(inputs), strict=True))
    given = {name: part if name in asked else part.detach() for name, part in parts.items()}
    gradients = torch.autograd.grad(attend(inputs, **given).sum(), [given[name] for name in asked])
    assert made[0].joint
    assert all(gradient.is_contiguous() is (len(asked) == 1) for gradient in gradients)
    every = torch.autograd.grad(attend(inputs, *parts.values()).sum(), list(parts.values()))
    expected = dict(zip(parts, every, strict=True))
    assert all(torch.equal(gradient, expected[name]) for name, gradient in zip(asked, gradients, strict=True))


def test_interpreted_calls_are_not_remembered(made: list) -> None:
    inputs = make_fused_inputs(CASE, torch.float32, DEVICE, 0, 2)
    outputs = [attend(inputs, inputs.sampling_offsets, inputs.attention_logits) for _ in range(2)]
    assert torch.equal(*outputs)
    interpreted = DEVICE.type == "cpu"
    assert len(made) == (2 if interpreted else 1)
    assert len(call_memory._ways) == (0 if interpreted else 1)


@pytest.mark.parametrize("enabled", [True, False])
def test_forward_derivatives_are_refused(enabled: bool) -> None:
    """Rather than taken for zero."""
    value, samples = torch.rand(1, 40, 2, 32, device=DEVICE), torch.rand(1, 3, 2, 2, 4, 2, device=DEVICE)
    weights = torch.rand(1, 3, 2, 2, 4, device=DEVICE)
    with forward_ad.dual_level(), torch.set_grad_enabled(enabled):
        dual = forward_ad.make_dual(value, torch.ones_like(value))
        with pytest.raises(NotImplementedError, match="jvp"):
            ms_deform_attn(dual, ((4, 5), (2, 10)), None, samples, weights, backend="triton")


def test_without_gradients_no_function_is_recorded() -> None:
    inputs = make_fused_inputs(CASE, torch.float32, DEVICE, 0, 2)
    offsets, logits = parts_of_a_product(inputs)
    recorded = attend(inputs, offsets, logits)
    with torch.no_grad():
        output = attend(inputs, offsets, logits)
    assert torch.equal(output, recorded)
    assert recorded.requires_grad
    assert not output.requires_grad


@pytest.mark.gpu
def test_a_table_on_the_device_comes_with_each_call(made: list) -> None:
    """Alike calls share what was decided, not the numbers of the first table."""
    value = torch.rand(1, 40, 2, 32, device=DEVICE)
    samples = torch.rand(1, 3, 2, 2, 4, 2, device=DEVICE), torch.rand(1, 3, 2, 2, 4, device=DEVICE)
    for shapes in (((4, 5), (2, 10)), ((5, 4), (10, 2))):
        table = torch.tensor(shapes, device=DEVICE), torch.tensor((0, 20), device=DEVICE)
        output = ms_deform_attn(value, *table, *samples, backend="triton")
        expected = ms_deform_attn(value, *table, *samples, backend="reference")
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    assert len(made) == 1
