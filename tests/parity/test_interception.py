"""An op that rounds otherwise differs by one unit in the last place in half precision, and not at all in float32."""

import pytest
import torch

import msda_op
from parity.cases import DEFAULT_CASES, make_inputs
from parity.interception import calling_around_op, rounding_otherwise


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


def test_directions_follow_from_the_outputs_and_no_generator():
    ones = torch.full((400, 50), 1.0, dtype=torch.bfloat16)

    def moved(values: torch.Tensor, seed: int) -> torch.Tensor:
        with calling_around_op(lambda call, args, kwargs: values), rounding_otherwise(seed):
            return msda_op.ms_deform_attn() / values

    state = torch.get_rng_state()
    first = moved(ones, 1)
    assert torch.equal(torch.get_rng_state(), state)
    for other in (moved(2 * ones, 1), moved(ones, 2), first.flip(0), first.roll(1, 1), first.roll(1, 0)):
        assert abs((other == first).double().mean() - 0.5) < 0.02  # independent: 4 deviations of 20,000 coins
    assert abs((first > 1).double().mean() - 0.5) < 0.02


@pytest.mark.gpu
def test_a_graph_draws_anew_where_outputs_are_others():
    values = torch.full((4000,), 1.0, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with calling_around_op(lambda call, args, kwargs: values), rounding_otherwise(1):
        eager = []
        for size in (1.0, 2.0):
            values.fill_(size)
            eager.append(msda_op.ms_deform_attn() / values)
        with torch.cuda.graph(graph):
            moved = msda_op.ms_deform_attn() / values
    for size, expected in zip((1.0, 2.0), eager, strict=True):
        values.fill_(size)
        graph.replay()
        assert torch.equal(moved, expected)
    assert not torch.equal(*eager)


def test_float32_stays_as_it_is_and_nothing_is_left_behind():
    assert torch.equal(run(torch.float32, 1), run(torch.float32, None))
    assert msda_op.ms_deform_attn.__module__ == "msda_op.api"
