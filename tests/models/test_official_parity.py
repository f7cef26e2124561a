"""The official code and ours on the same weights and inputs; runs where OFFICIAL_DEFORMABLE_DETR_DIR is set.

The variable names a checkout of fundamentalvision/Deformable-DETR (commit 11169a6).
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from models.backbone import ResNetBackbone
from models.checkpoints import load_weights
from models.criterion import Criterion, Losses
from models.cuda_graphs import TrainingGraphs
from models.deformable_detr import DeformableDetr
from models.deformable_transformer import DeformableTransformer
from models.matcher import HungarianMatcher, Matches
from models.position_encoding import SinePositionEncoding
from models.structures import DetectorOutput, ImageBatch, Targets

CHECKOUT = os.environ.get("OFFICIAL_DEFORMABLE_DETR_DIR")
RUNNER = Path(__file__).with_name("run_official_deformable_detr.py")
SMALL = {"enc_layers": 2, "dec_layers": 3, "num_queries": 40, "num_feature_levels": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "refine": {"with_box_refine": True},
    "two_stage": {"with_box_refine": True, "two_stage": True},
    "single_scale": {"num_feature_levels": 1},
    "single_scale_dc5": {"num_feature_levels": 1, "dilation": True},
}
# Float32 sums of some thousand terms in another order; logits and boxes are of order one.
MAX_OUTPUT_DIFFERENCE = 1e-5
MAX_RELATIVE_LOSS_DIFFERENCE = 1e-5
MAX_RELATIVE_GRADIENT_DIFFERENCE = 1e-4

if CHECKOUT is None:
    pytest.skip("OFFICIAL_DEFORMABLE_DETR_DIR names no official checkout", allow_module_level=True)


@dataclass(frozen=True)
class Comparison:
    """What the official code computed, and ours from the same weights and inputs."""

    expected: dict[str, Any]
    model: DeformableDetr
    output: DetectorOutput
    losses: Losses
    matches: tuple[Matches, Matches | None]
    targets: Targets


def build_model(settings: dict[str, Any]) -> DeformableDetr:
    levels = settings["num_feature_levels"]
    return DeformableDetr(
        backbone=ResNetBackbone(
            name="resnet50",
            weights="none",
            norm="frozen",
            dilation=settings.get("dilation", False),
            finest_stride=8,
            channels_last=False,
            fold_norms=False,  # as the official code computes: the same bits, and so the same sides of every ReLU
            fused_norm=True,
            num_feature_levels=levels,
        ),
        position_encoding=SinePositionEncoding(channels=256, temperature=10000, offset=-0.5),
        transformer=DeformableTransformer(
            d_model=256,
            num_heads=8,
            num_encoder_layers=settings["enc_layers"],
            num_decoder_layers=settings["dec_layers"],
            num_feature_levels=levels,
            num_encoder_points=4,
            num_decoder_points=4,
            num_queries=settings["num_queries"],
            dim_feedforward=1024,
            dropout=0.0,
            two_stage=settings.get("two_stage", False),
            inverse_sigmoid_eps=1e-5,
            gradient_checkpointing=False,
            backend="reference",
            fused=True,
            fused_norm=True,
        ),
        graphs=TrainingGraphs(enabled=False, max_sizes=1),
        num_classes=91,
        box_refine=settings.get("with_box_refine", False),
        weights=None,
    )


def build_criterion() -> Criterion:
    matcher = HungarianMatcher(cost_class=2, cost_bbox=5, cost_giou=2, focal_alpha=0.25, focal_gamma=2)
    weights = {"loss_ce": 2, "loss_bbox": 5, "loss_giou": 2}
    return Criterion(matcher=matcher, loss_weights=weights, focal_alpha=0.25, focal_gamma=2)


@pytest.fixture(scope="module", params=VARIANTS)
def comparison(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp(request.param)
    settings = SMALL | VARIANTS[request.param]
    (folder / "settings.json").write_text(json.dumps(settings))
    command = [sys.executable, RUNNER, CHECKOUT, folder / "settings.json", folder / "result.pt"]
    subprocess.run(command, check=True, cwd=folder)
    expected = torch.load(folder / "result.pt", weights_only=False)
    torch.save(expected["checkpoint"], folder / "checkpoint.pth")

    model = build_model(settings).train()
    load_weights(model, folder / "checkpoint.pth")
    targets = Targets(
        labels=torch.cat([target["labels"] for target in expected["targets"]]),
        boxes_cxcywh=torch.cat([target["boxes"] for target in expected["targets"]]),
        counts=tuple(len(target["labels"]) for target in expected["targets"]),
    )
    criterion = build_criterion()
    output = model(ImageBatch(expected["images"], expected["padding_mask"]))
    matches = criterion.matcher(output, targets)
    losses = criterion(output, targets, lambda count: count)
    losses.total.backward()
    return Comparison(expected, model, output, losses, matches, targets)


def test_state_dict_keys_are_the_official_ones(comparison: Comparison) -> None:
    official = comparison.expected["checkpoint"]["model"]
    ours = comparison.model.state_dict()
    assert set(ours) == set(official)
    assert all(torch.equal(ours[key], official[key]) for key in ours)


def test_logits_and_boxes_equal(comparison: Comparison) -> None:
    expected, output = comparison.expected, comparison.output
    assert (output.logits - expected["logits"]).abs().max() <= MAX_OUTPUT_DIFFERENCE
    assert (output.boxes_cxcywh - expected["boxes"]).abs().max() <= MAX_OUTPUT_DIFFERENCE


def test_another_position_offset_is_noticed(comparison: Comparison) -> None:
    expected, position_encoding = comparison.expected, comparison.model.backbone[1]
    position_encoding.offset = -0.4
    with torch.no_grad():
        output = comparison.model(ImageBatch(expected["images"], expected["padding_mask"]))
    position_encoding.offset = -0.5
    assert (output.logits - expected["logits"]).abs().max() > MAX_OUTPUT_DIFFERENCE


def test_proposals_equal(comparison: Comparison) -> None:
    expected, proposals = comparison.expected["proposals"], comparison.output.proposals
    assert (proposals is None) == (expected is None)
    if proposals is not None:
        assert (proposals.logits - expected["pred_logits"]).abs().max() <= MAX_OUTPUT_DIFFERENCE
        assert (proposals.boxes_cxcywh - expected["pred_boxes"]).abs().max() <= MAX_OUTPUT_DIFFERENCE


def test_assignments_equal(comparison: Comparison) -> None:
    last, *auxiliary = comparison.expected["assignments"]
    layers, proposals = comparison.matches
    num_layers = len(comparison.output.logits)
    expected_layers = [*auxiliary[: num_layers - 1], last]
    starts = torch.tensor((0, *comparison.targets.counts)).cumsum(0)

    def flatten(assignment: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[int, int, int]]:
        return [
            (image, int(query), int(target + starts[image]))
            for image, pairs in enumerate(assignment)
            for query, target in zip(*pairs, strict=True)
        ]

    def rows(matches: Matches, layer: int) -> list[tuple[int, int, int]]:
        columns = (matches.batch[layer], matches.query[layer], matches.target[layer])
        return [tuple(row) for row in torch.stack(columns, dim=1).tolist()]

    for layer, assignment in enumerate(expected_layers):
        assert rows(layers, layer) == flatten(assignment)
    assert (proposals is None) == (len(auxiliary) == num_layers - 1)
    if proposals is not None:
        assert rows(proposals, 0) == flatten(auxiliary[-1])


def test_losses_equal(comparison: Comparison) -> None:
    expected, losses = comparison.expected, comparison.losses
    assert set(losses.terms) == set(expected["losses"])
    for name, value in losses.terms.items():
        difference = (value - expected["losses"][name]).abs() / expected["losses"][name].abs()
        assert difference <= MAX_RELATIVE_LOSS_DIFFERENCE, name
    assert (losses.total - expected["total"]).abs() / expected["total"] <= MAX_RELATIVE_LOSS_DIFFERENCE


def test_gradients_equal(comparison: Comparison) -> None:
    expected = comparison.expected["gradients"]
    actual = {
        name: parameter.grad
        for name, parameter in comparison.model.named_parameters(remove_duplicate=False)
        if parameter.grad is not None
    }
    assert set(actual) == set(expected)
    for name, gradient in actual.items():
        difference = (gradient - expected[name]).norm() / expected[name].norm()
        assert difference <= MAX_RELATIVE_GRADIENT_DIFFERENCE, name
