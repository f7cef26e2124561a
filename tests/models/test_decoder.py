from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from models.decoder import BoxRefinement, DeformableDecoder, DeformableDecoderLayer, predict_boxes, scale_to_levels
from models.proposals import embed_boxes
from models.structures import LevelGeometry

SHAPES = ((2, 4), (1, 2))


def build(gradient_checkpointing: bool = False, **overrides: Any) -> DeformableDecoder:
    torch.manual_seed(0)
    layers = [
        DeformableDecoderLayer(
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
        for _ in range(3)
    ]
    settings: dict[str, Any] = {"norm": None, "ref_point_head": None, "look_forward_twice": False} | overrides
    return DeformableDecoder(
        layers=layers, inverse_sigmoid_eps=1e-5, gradient_checkpointing=gradient_checkpointing, **settings
    )


def make_inputs(
    coordinates: int = 2, attention_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, LevelGeometry, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    query, query_pos = torch.randn(2, 1, 5, 16, generator=generator)
    memory = torch.randn(1, 10, 16, generator=generator)
    levels = LevelGeometry(torch.zeros(1, 10, dtype=torch.bool), SHAPES, torch.ones(1, 2, 2))
    reference_points = torch.rand(1, 5, coordinates, generator=generator)
    return query, query_pos, reference_points, memory, levels, attention_mask


def test_points_and_boxes_scale_with_the_valid_ratios() -> None:
    valid_ratios = torch.tensor([[[0.5, 1.0], [0.25, 0.5]]])
    points = scale_to_levels(torch.tensor([[[0.4, 0.8]]]), valid_ratios)
    torch.testing.assert_close(points, torch.tensor([[[[0.2, 0.8], [0.1, 0.4]]]]))
    boxes = scale_to_levels(torch.tensor([[[0.4, 0.8, 0.2, 0.4]]]), valid_ratios)
    torch.testing.assert_close(boxes, torch.tensor([[[[0.2, 0.8, 0.1, 0.4], [0.1, 0.4, 0.05, 0.2]]]]))


def test_a_point_moves_only_the_centre() -> None:
    hidden = torch.zeros(1, 4)
    boxes = predict_boxes(nn.Identity(), hidden, torch.tensor([[0.2, 0.7]]), BoxRefinement(1e-5))
    torch.testing.assert_close(boxes, torch.tensor([[0.2, 0.7, 0.5, 0.5]]))
    boxes = predict_boxes(nn.Identity(), hidden, torch.tensor([[0.2, 0.7, 0.1, 0.3]]), BoxRefinement(1e-5))
    torch.testing.assert_close(boxes, torch.tensor([[0.2, 0.7, 0.1, 0.3]]))


def test_box_head_runs_in_float32_under_autocast() -> None:
    head = nn.Linear(4, 4)
    hidden, reference = torch.randn(3, 4), torch.rand(3, 4)
    expected = predict_boxes(head, hidden, reference, BoxRefinement(1e-5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(predict_boxes(head, hidden, reference, BoxRefinement(1e-5)), expected)


def test_without_box_heads_all_layers_look_at_the_same_points() -> None:
    decoder = build().eval()
    seen = []
    for layer in decoder.layers:
        layer.cross_attn.register_forward_hook(lambda module, inputs, output: seen.append(inputs[1]))
    output = decoder(*make_inputs())
    assert output.hidden.shape == (3, 1, 5, 16)
    assert output.boxes_cxcywh is None
    assert all(torch.equal(points, seen[0]) for points in seen)


def test_refinement_hands_detached_boxes_to_the_next_layer() -> None:
    decoder = build().eval()
    decoder.bbox_embed = nn.ModuleList(nn.Linear(16, 4) for _ in range(3))
    seen = []
    for layer in decoder.layers:
        layer.cross_attn.register_forward_hook(lambda module, inputs, output: seen.append(inputs[1]))
    boxes = decoder(*make_inputs()).boxes_cxcywh
    assert boxes is not None
    assert [points.shape[-1] for points in seen] == [2, 4, 4]
    torch.testing.assert_close(seen[1][:, :, 0], boxes[0])
    boxes[2].sum().backward()
    gradients = [head.weight.grad for head in decoder.bbox_embed]
    assert [gradient.abs().max() > 0 for gradient in gradients] == [False, False, True]


def test_looking_forward_twice_trains_each_head_by_the_next_layer_too() -> None:
    decoder = build(norm=nn.LayerNorm(16), look_forward_twice=True).eval()
    decoder.bbox_embed = nn.ModuleList(nn.Linear(16, 4) for _ in range(3))
    boxes = decoder(*make_inputs(coordinates=4)).boxes_cxcywh
    assert boxes is not None
    boxes[2].sum().backward()
    gradients = [head.weight.grad for head in decoder.bbox_embed]
    assert [gradient is not None and gradient.abs().max() > 0 for gradient in gradients] == [False, True, True]


def test_heads_read_normalised_states_and_the_refinement_raw_ones() -> None:
    decoder = build(norm=nn.LayerNorm(16), look_forward_twice=True).eval()
    nn.init.normal_(decoder.norm.weight)
    decoder.bbox_embed = nn.ModuleList(nn.Linear(16, 4) for _ in range(3))
    inputs = make_inputs(coordinates=4)
    raw, seen = [], []
    for layer in decoder.layers:
        layer.register_forward_hook(lambda module, inputs, output: raw.append(output))
        layer.cross_attn.register_forward_hook(lambda module, inputs, output: seen.append(inputs[1][:, :, 0]))
    output = decoder(*inputs)
    reference_points = inputs[2]
    for index, head in enumerate(decoder.bbox_embed):
        torch.testing.assert_close(seen[index], reference_points)
        torch.testing.assert_close(output.hidden[index], decoder.norm(raw[index]))
        expected = predict_boxes(head, output.hidden[index], reference_points, BoxRefinement(1e-5))
        torch.testing.assert_close(output.boxes_cxcywh[index], expected)
        reference_points = predict_boxes(head, raw[index], reference_points, BoxRefinement(1e-5))
        assert not torch.allclose(expected, reference_points)


def test_positions_come_from_the_boxes_on_the_finest_level() -> None:
    decoder = build(ref_point_head=nn.Linear(32, 16)).eval()
    query, _, boxes, memory, levels, _ = make_inputs(coordinates=4)
    levels = replace(levels, valid_ratios=torch.tensor([[[0.5, 0.25], [1.0, 1.0]]]))
    positions = []
    for layer in decoder.layers:
        layer.register_forward_hook(lambda module, inputs, output: positions.append(inputs[1]))
    decoder(query, None, boxes, memory, levels, None)
    scaled = boxes * torch.tensor([0.5, 0.25, 0.5, 0.25])
    expected = decoder.ref_point_head(embed_boxes(scaled[..., [1, 0, 2, 3]], 8))
    assert all(torch.equal(position, expected) for position in positions)
    swapped = decoder.ref_point_head(embed_boxes(scaled, 8))
    assert not torch.allclose(positions[0], swapped)


def test_the_attention_mask_hides_queries() -> None:
    decoder = build().eval()
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[:2, 2:] = True
    query, *others = make_inputs(attention_mask=mask)
    changed = query.clone()
    changed[:, 2:] += 1
    expected, actual = decoder(query, *others).hidden, decoder(changed, *others).hidden
    torch.testing.assert_close(actual[:, :, :2], expected[:, :, :2])
    assert not torch.allclose(actual[:, :, 2:], expected[:, :, 2:])
    unmasked = decoder(changed, *others[:-1], None).hidden
    assert not torch.allclose(unmasked[:, :, :2], expected[:, :, :2])


@pytest.mark.parametrize("refine", [False, True])
def test_checkpointing_changes_nothing_but_memory(refine: bool) -> None:
    results = []
    for gradient_checkpointing in (False, True):
        decoder = build(gradient_checkpointing)
        if refine:
            decoder.bbox_embed = nn.ModuleList(nn.Linear(16, 4) for _ in range(3))
        torch.manual_seed(1)
        decoder(*make_inputs()).hidden.square().sum().backward()
        results.append([parameter.grad for parameter in decoder.layers.parameters()])
    assert all(torch.equal(plain, recomputed) for plain, recomputed in zip(*results, strict=True))
