from dataclasses import replace

import torch

from models.encoder import DeformableEncoder, DeformableEncoderLayer, pixel_centers
from models.structures import FeatureLevels, LevelGeometry

SHAPES = ((2, 4), (1, 2))


def build(gradient_checkpointing: bool = False) -> DeformableEncoder:
    torch.manual_seed(0)
    layers = [
        DeformableEncoderLayer(
            d_model=16,
            num_heads=2,
            num_levels=2,
            num_points=2,
            dim_feedforward=24,
            dropout=0.2,
            backend="reference",
            fused=True,
            fused_norm=True,
        )
        for _ in range(2)
    ]
    return DeformableEncoder(layers=layers, gradient_checkpointing=gradient_checkpointing)


def make_levels() -> FeatureLevels:
    generator = torch.Generator().manual_seed(0)
    features, positions = torch.randn(2, 1, 10, 16, generator=generator)
    geometry = LevelGeometry(torch.zeros(1, 10, dtype=torch.bool), SHAPES, torch.ones(1, 2, 2))
    return FeatureLevels(features, positions, geometry)


def test_pixel_centers_by_hand() -> None:
    valid_ratios = torch.tensor([[[0.5, 1.0], [1.0, 1.0]]])
    centers = pixel_centers(SHAPES, valid_ratios)
    assert centers.shape == (1, 10, 2, 2)
    # Row 1, column 0 of the first level: a quarter of the half that is valid, which is x = 1/8 there.
    torch.testing.assert_close(centers[0, 4], torch.tensor([[0.125, 0.75], [0.25, 0.75]]))
    torch.testing.assert_close(centers[0, 9], torch.tensor([[0.375, 0.5], [0.75, 0.5]]))


def test_checkpointing_changes_nothing_but_memory() -> None:
    results = []
    for gradient_checkpointing in (False, True):
        encoder, levels = build(gradient_checkpointing), make_levels()
        torch.manual_seed(1)
        encoder(levels).square().sum().backward()
        results.append([parameter.grad for parameter in encoder.parameters()])
    assert all(torch.equal(plain, recomputed) for plain, recomputed in zip(*results, strict=True))


def test_positions_are_added_to_the_query_of_each_layer_only() -> None:
    encoder, levels = build().eval(), make_levels()
    layer = encoder.layers[0]
    torch.nn.init.normal_(layer.self_attn.attention_weights.weight)
    centers = pixel_centers(SHAPES, levels.geometry.valid_ratios)
    values = []
    layer.self_attn.value_proj.register_forward_hook(lambda module, inputs, output: values.append(inputs[0]))
    output = layer(levels.features, centers, levels)
    assert torch.equal(values[0], levels.features)
    still = replace(levels, positions=0 * levels.positions)
    assert not torch.allclose(layer(levels.features, centers, still), output)
