"""An op that rounds otherwise differs by one unit in the last place in half precision, and not at all in float32."""

import pytest
import torch

import msda_op
from parity.cases import DEFAULT_CASES, make_inputs
from parity.interception import rounding_otherwise


def run(dtype: torch.dtype, seed: int | None) -> torch.Tensor:
    inputs = make_inputs(DEFAULT_CASES[0], dtype, torch.device("cpu"), seed=0)
    arguments = (inputs.value, inputs.spatial_shapes, None, inputs.sampling_locations, inputs.attention_weights)
    torch.manual_seed(5)
    if seed is None:
        return msda_op.ms_deform_attn(*arguments, backend="reference")
    with rounding_otherwise(seed):
        return msda_op.ms_deform_attn(*arguments, backend="reference")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_moves_by_one_unit_both_ways(dtype):
    sound, moved = run(dtype, None), run(dtype, 1)
    assert moved.dtype == dtype
    ratio = (moved.double() / sound.double())[sound.double().abs() > 1e-3]
    assert (ratio - 1).abs().max() < 2 * torch.finfo(dtype).eps
    assert (ratio > 1).double().mean() > 0.4
    assert (ratio < 1).double().mean() > 0.4


def test_directions_follow_from_the_seed():
    first, again, other = (run(torch.bfloat16, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_float32_stays_as_it_is_and_nothing_is_left_behind():
    assert torch.equal(run(torch.float32, 1), run(torch.float32, None))
    assert msda_op.ms_deform_attn.__module__ == "msda_op.api"
