"""Sizes and inputs of the presets."""

import pytest
import torch

from parity.presets import PRESETS, Preset, make_preset_inputs

CPU = torch.device("cpu")
TINY_ENCODER = Preset("tiny", ((4, 6), (2, 3)), num_queries=30, num_heads=4, head_dim=4, num_points=2)
TINY_DECODER = Preset("tiny", ((4, 6), (2, 3)), num_queries=7, num_heads=4, head_dim=4, num_points=2)


def test_encoders_have_a_query_for_each_pixel() -> None:
    for name in ("encoder", "large"):
        assert PRESETS[name].num_queries == PRESETS[name].value_length
    assert PRESETS["encoder"].value_length == 22223
    assert all(name == preset.name for name, preset in PRESETS.items())


@pytest.mark.parametrize("preset", [TINY_ENCODER, TINY_DECODER])
def test_inputs_have_their_shapes_and_dtypes(preset: Preset) -> None:
    inputs = make_preset_inputs(preset, 3, torch.bfloat16, CPU, seed=0)
    q = preset.num_queries
    assert inputs.value.shape == (3, 30, 4, 4)
    assert inputs.sampling_locations.shape == (3, q, 4, 2, 2, 2)
    assert inputs.attention_weights.shape == (3, q, 4, 2, 2)
    assert inputs.grad_output.shape == (3, q, 16)
    assert inputs.sampling_locations.dtype == torch.float32
    assert inputs.value.dtype == inputs.attention_weights.dtype == inputs.grad_output.dtype == torch.bfloat16
    torch.testing.assert_close(
        inputs.attention_weights.float().sum((-1, -2)), torch.ones(3, q, 4), rtol=0, atol=2 * 2**-8
    )


def test_an_encoder_samples_around_its_pixels() -> None:
    locations = make_preset_inputs(TINY_ENCODER, 200, torch.float32, CPU, seed=0).sampling_locations
    # Heads look in opposite directions, so that the mean over heads and items is the pixel itself, (x, y) from (h, w).
    mean = locations.mean((0, 2, 4))[:, 0]
    assert (mean[0] - torch.tensor([0.5 / 6, 0.5 / 4])).abs().max() < 0.05
    assert (mean[5] - torch.tensor([5.5 / 6, 0.5 / 4])).abs().max() < 0.05
    assert (mean[23] - torch.tensor([5.5 / 6, 3.5 / 4])).abs().max() < 0.05


def test_points_move_away_along_the_direction_of_their_head() -> None:
    locations = make_preset_inputs(TINY_ENCODER, 400, torch.float32, CPU, seed=0).sampling_locations.mean((0, 1))
    steps_in_pixels = (locations[:, :, 1] - locations[:, :, 0]) * torch.tensor([(6, 4), (3, 2)])
    expected = torch.tensor([(1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0)])
    assert (steps_in_pixels - expected[:, None]).abs().max() < 0.15


def test_seed_decides_the_numbers() -> None:
    first, again, other = (make_preset_inputs(TINY_DECODER, 2, torch.float32, CPU, seed) for seed in (1, 1, 2))
    assert torch.equal(first.sampling_locations, again.sampling_locations)
    assert not torch.equal(first.value, other.value)
