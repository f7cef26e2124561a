"""The official DINO code and ours on the same weights, inputs and noise; runs where OFFICIAL_DINO_DIR is set.

The variable names a checkout of IDEA-Research/DINO (commit faa8520).
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

from models import denoising
from models.backbone import ResNetBackbone
from models.checkpoints import load_weights
from models.criterion import Criterion, Losses
from models.cuda_graphs import TrainingGraphs
from models.denoising import ContrastiveDenoising, DenoisingNoise
from models.dino import Dino, DinoTransformer
from models.matcher import HungarianMatcher
from models.position_encoding import SinePositionEncoding
from models.structures import DetectorOutput, ImageBatch, Targets

CHECKOUT = os.environ.get("OFFICIAL_DINO_DIR")
RUNNER = Path(__file__).with_name("run_official_dino.py")
SMALL = {"enc_layers": 2, "dec_layers": 3, "num_queries": 40, "dn_box_noise_scale": 1.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "4scale": {"counts": (0, 9)},
    "5scale": {"counts": (4, 9), "num_feature_levels": 5, "return_interm_indices": (0, 1, 2, 3)},
    "no_targets": {"counts": (0, 0)},
}
# Float32 sums of some thousand terms in another order; logits and boxes are of order one.
MAX_OUTPUT_DIFFERENCE = 1e-5
MAX_RELATIVE_LOSS_DIFFERENCE = 1e-5
# A sample that rounding moves across the middle between two pixels has another gradient of its location.
MAX_RELATIVE_GRADIENT_DIFFERENCE = 3e-4

if CHECKOUT is None:
    pytest.skip("OFFICIAL_DINO_DIR names no official checkout", allow_module_level=True)


@dataclass(frozen=True)
class Comparison:
    """What the official code computed, and ours from the same weights, inputs and noise."""

    expected: dict[str, Any]
    model: Dino
    trained: DetectorOutput
    evaluated: DetectorOutput
    losses: Losses
    batch: ImageBatch
    targets: Targets


def build_model(settings: dict[str, Any]) -> Dino:
    levels = settings.get("num_feature_levels", 4)
    return Dino(
        backbone=ResNetBackbone(
            name="resnet50",
            weights="none",
            norm="frozen",
            dilation=False,
            finest_stride=4 if levels == 5 else 8,
            channels_last=False,
            fold_norms=False,  # as the official code computes: the same bits, and so the same sides of every ReLU
            fused_norm=True,
            num_feature_levels=levels,
        ),
        position_encoding=SinePositionEncoding(channels=256, temperature=20, offset=0.0),
        transformer=DinoTransformer(
            d_model=256,
            num_heads=8,
            num_encoder_layers=settings["enc_layers"],
            num_decoder_layers=settings["dec_layers"],
            num_feature_levels=levels,
            num_encoder_points=4,
            num_decoder_points=4,
            num_queries=settings["num_queries"],
            dim_feedforward=2048,
            dropout=0.0,
            inverse_sigmoid_eps=1e-3,
            gradient_checkpointing=False,
            backend="reference",
            fused=False,
            fused_norm=True,
        ),
        denoising=ContrastiveDenoising(num_queries=100, max_queries=200, label_noise_ratio=0.5, box_noise_scale=1.0),
        graphs=TrainingGraphs(enabled=False, max_sizes=1),
        num_classes=91,
        weights=None,
    )


def build_criterion() -> Criterion:
    matcher = HungarianMatcher(cost_class=2, cost_bbox=5, cost_giou=2, focal_alpha=0.25, focal_gamma=2)
    weights = {"loss_ce": 1, "loss_bbox": 5, "loss_giou": 2}
    return Criterion(matcher=matcher, loss_weights=weights, focal_alpha=0.25, focal_gamma=2)


def replay(draws: dict[str, list[torch.Tensor]], shape: tuple[int, ...]) -> DenoisingNoise:
    """Brings the official draws (a label for each chosen one only, signs apart from sizes) into the shape of ours."""
    (relabel, sizes), (new_labels, signs) = draws["rand_like"], draws["randint_like"]
    labels = torch.full_like(relabel, -1, dtype=torch.int64)
    labels[relabel < 0.25] = new_labels
    shifts = sizes * (signs * 2 - 1)
    return DenoisingNoise(relabel.view(shape), labels.view(shape), shifts.view(*shape, 4))


@pytest.fixture(scope="module", params=VARIANTS)
def comparison(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp(request.param)
    settings = SMALL | VARIANTS[request.param]
    (folder / "settings.json").write_text(json.dumps(settings))
    command = [sys.executable, RUNNER, CHECKOUT, folder / "settings.json", folder / "result.pt"]
    subprocess.run(command, check=True, cwd=folder)
    expected = torch.load(folder / "result.pt", weights_only=False)
    torch.save(expected["checkpoint"], folder / "checkpoint.pth")

    model = build_model(settings)
    load_weights(model, folder / "checkpoint.pth")
    batch = ImageBatch(expected["images"], expected["padding_mask"])
    targets = Targets(
        labels=torch.cat([target["labels"] for target in expected["targets"]]),
        boxes_cxcywh=torch.cat([target["boxes"] for target in expected["targets"]]),
        counts=tuple(len(target["labels"]) for target in expected["targets"]),
    )
    with torch.no_grad():
        evaluated = model.eval()(batch, targets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(denoising, "draw_noise", lambda shape, *_: replay(expected["draws"], shape))
        trained = model.train()(batch, targets)
    losses = build_criterion()(trained, targets, lambda count: count)
    losses.total.backward()
    return Comparison(expected, model, trained, evaluated, losses, batch, targets)


def named_predictions(output: DetectorOutput) -> dict[str, torch.Tensor]:
    assert output.proposals is not None
    named = {
        "logits": output.logits,
        "boxes": output.boxes_cxcywh,
        "proposal_pred_logits": output.proposals.logits,
        "proposal_pred_boxes": output.proposals.boxes_cxcywh,
    }
    if output.denoising is not None and output.denoising.logits.shape[2]:
        named |= {"denoising_logits": output.denoising.logits, "denoising_boxes": output.denoising.boxes_cxcywh}
    return named


def largest_differences(output: DetectorOutput, expected: dict[str, torch.Tensor]) -> dict[str, float]:
    actual = named_predictions(output)
    assert {name: value.shape for name, value in actual.items()} == {
        name: value.shape for name, value in expected.items()
    }
    return {name: float((value - expected[name]).detach().abs().max()) for name, value in actual.items()}


def test_state_dict_keys_are_the_official_ones(comparison: Comparison) -> None:
    official = comparison.expected["checkpoint"]["model"]
    ours = comparison.model.state_dict()
    assert set(ours) == set(official)
    assert all(torch.equal(ours[key], official[key]) for key in ours)


@pytest.mark.parametrize("mode", ["evaluated", "trained"])
def test_predictions_equal(mode: str, comparison: Comparison) -> None:
    differences = largest_differences(getattr(comparison, mode), comparison.expected[mode])
    assert max(differences.values()) <= MAX_OUTPUT_DIFFERENCE, differences


def test_another_temperature_is_noticed(comparison: Comparison) -> None:
    position_encoding = comparison.model.backbone[1]
    position_encoding.temperature = 21
    with torch.no_grad():
        output = comparison.model.eval()(comparison.batch)
    position_encoding.temperature = 20
    differences = largest_differences(output, comparison.expected["evaluated"])
    assert max(differences.values()) > MAX_OUTPUT_DIFFERENCE


def test_another_epsilon_is_noticed_in_the_decoder(comparison: Comparison) -> None:
    decoder = comparison.model.transformer.decoder
    decoder.refine.inverse_sigmoid_eps = 0.1  # the random proposals are seldom smaller
    with torch.no_grad():
        output = comparison.model.eval()(comparison.batch)
    decoder.refine.inverse_sigmoid_eps = 1e-3
    differences = largest_differences(output, comparison.expected["evaluated"])
    assert differences["proposal_pred_boxes"] <= MAX_OUTPUT_DIFFERENCE
    assert differences["boxes"] > MAX_OUTPUT_DIFFERENCE


def test_losses_equal(comparison: Comparison) -> None:
    expected, losses = comparison.expected["losses"], comparison.losses
    terms = {name.replace("_enc", "_interm"): value for name, value in losses.terms.items()}
    official_names = {name: name for name in expected}
    for name, value in terms.items():
        reference = expected[official_names.pop(name)]
        assert (value - reference).abs() <= MAX_RELATIVE_LOSS_DIFFERENCE * reference.abs(), name
    assert not official_names
    total = comparison.expected["total"]
    assert (losses.total - total).abs() / total <= MAX_RELATIVE_LOSS_DIFFERENCE


def test_gradients_equal(comparison: Comparison) -> None:
    expected = comparison.expected["gradients"]
    actual = {
        name: parameter.grad
        for name, parameter in comparison.model.named_parameters(remove_duplicate=False)
        if parameter.grad is not None
    }
    assert set(actual) == set(expected)
    for name, gradient in actual.items():
        limit = MAX_RELATIVE_GRADIENT_DIFFERENCE * expected[name].norm()
        assert (gradient - expected[name]).norm() <= limit, name
