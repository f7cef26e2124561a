from dataclasses import replace

import pytest
import torch

from models.boxes import generalized_box_iou
from models.criterion import Criterion
from models.matcher import HungarianMatcher
from models.structures import DenoisingOutput, DetectorOutput, EncoderProposals, Targets


def make_output(num_layers: int, with_proposals: bool = False, class_agnostic: bool = True) -> DetectorOutput:
    torch.manual_seed(0)
    proposals = EncoderProposals(torch.randn(2, 9, 3), torch.rand(2, 9, 4) * 0.5 + 0.1, class_agnostic)
    logits, boxes_cxcywh = torch.randn(num_layers, 2, 4, 3), torch.rand(num_layers, 2, 4, 4) * 0.5 + 0.1
    return DetectorOutput(logits, boxes_cxcywh, proposals if with_proposals else None)


def make_denoising(num_layers: int) -> DenoisingOutput:
    """Two groups for targets of (1, 2): two slots a group, positives in the first half of each group."""
    torch.manual_seed(1)
    return DenoisingOutput(
        logits=torch.randn(num_layers, 2, 8, 3),
        boxes_cxcywh=torch.rand(num_layers, 2, 8, 4) * 0.5 + 0.1,
        batch=torch.tensor([0, 1, 1, 0, 1, 1]),
        query=torch.tensor([0, 0, 1, 4, 4, 5]),
        target=torch.tensor([0, 1, 2, 0, 1, 2]),
        num_groups=2,
    )


def make_targets(*counts: int) -> Targets:
    total = sum(counts)
    return Targets(torch.arange(total) % 3, torch.rand(total, 4) * 0.4 + 0.2, counts)


def unchanged(count: torch.Tensor) -> torch.Tensor:
    return count


def test_terms_of_one_layer_by_plain_loops(criterion: Criterion) -> None:
    output, targets = make_output(1), make_targets(1, 2)
    matches, _ = criterion.matcher(output, targets)
    class_targets = torch.zeros(2, 4, 3)
    l1 = giou = 0.0
    for image, query, target in zip(matches.batch[0], matches.query[0], matches.target[0], strict=True):
        class_targets[image, query, targets.labels[target]] = 1
        box, target_box = output.boxes_cxcywh[0, image, query], targets.boxes_cxcywh[target]
        l1 += (box - target_box).abs().sum()
        giou += 1 - generalized_box_iou(box, target_box)
    p = output.logits[0].sigmoid()
    focal = -0.25 * (1 - p) ** 2 * p.log() * class_targets - 0.75 * p**2 * (1 - p).log() * (1 - class_targets)
    losses = criterion(output, targets, unchanged)
    torch.testing.assert_close(losses.terms["loss_ce"], focal.sum() / 3)
    torch.testing.assert_close(losses.terms["loss_bbox"], l1 / 3)
    torch.testing.assert_close(losses.terms["loss_giou"], giou / 3)


def test_names_and_weighted_total(criterion: Criterion) -> None:
    losses = criterion(make_output(3, with_proposals=True), make_targets(1, 2), unchanged)
    suffixes = ("_0", "_1", "", "_enc")
    assert set(losses.terms) == {f"loss_{name}{s}" for name in ("ce", "bbox", "giou") for s in suffixes}
    weights = {"loss_ce": 2, "loss_bbox": 5, "loss_giou": 2}
    total = sum(w * losses.terms[name + s] for name, w in weights.items() for s in suffixes)
    torch.testing.assert_close(losses.total, total)


def test_layers_do_not_mix(criterion: Criterion) -> None:
    output, targets = make_output(3, with_proposals=True), make_targets(1, 2)
    losses = criterion(output, targets, unchanged)
    for layer, suffix in enumerate(("_0", "_1", "")):
        alone = DetectorOutput(output.logits[layer : layer + 1], output.boxes_cxcywh[layer : layer + 1], None)
        for name, value in criterion(alone, targets, unchanged).terms.items():
            torch.testing.assert_close(losses.terms[name + suffix], value)


@pytest.mark.parametrize("class_agnostic", [True, False])
def test_encoder_losses_have_binary_labels_or_those_of_the_targets(class_agnostic: bool, criterion: Criterion) -> None:
    output = make_output(1, with_proposals=True, class_agnostic=class_agnostic)
    targets, proposals = make_targets(1, 2), output.proposals
    assert proposals is not None
    losses = criterion(output, targets, unchanged)
    objects = Targets(torch.zeros(3, dtype=torch.int64), targets.boxes_cxcywh, targets.counts)
    alone = DetectorOutput(proposals.logits[None], proposals.boxes_cxcywh[None], None)
    expected = criterion(alone, objects if class_agnostic else targets, unchanged).terms
    other = criterion(alone, targets if class_agnostic else objects, unchanged).terms
    for name, value in expected.items():
        torch.testing.assert_close(losses.terms[f"{name}_enc"], value)
    assert (losses.terms["loss_ce_enc"] - other["loss_ce"]).abs() > 1e-2


def test_denoising_losses_by_plain_loops(criterion: Criterion) -> None:
    output, targets, denoising = make_output(2), make_targets(1, 2), make_denoising(2)
    losses = criterion(replace(output, denoising=denoising), targets, unchanged)
    for layer, suffix in enumerate(("_dn_0", "_dn")):
        class_targets = torch.zeros(2, 8, 3)
        l1 = giou = 0.0
        for image, query, target in zip(denoising.batch, denoising.query, denoising.target, strict=True):
            class_targets[image, query, targets.labels[target]] = 1
            box, target_box = denoising.boxes_cxcywh[layer, image, query], targets.boxes_cxcywh[target]
            l1 += (box - target_box).abs().sum()
            giou += 1 - generalized_box_iou(box, target_box)
        p = denoising.logits[layer].sigmoid()
        focal = -0.25 * (1 - p) ** 2 * p.log() * class_targets - 0.75 * p**2 * (1 - p).log() * (1 - class_targets)
        torch.testing.assert_close(losses.terms[f"loss_ce{suffix}"], focal.sum() / (3 * 2))
        torch.testing.assert_close(losses.terms[f"loss_bbox{suffix}"], l1 / (3 * 2))
        torch.testing.assert_close(losses.terms[f"loss_giou{suffix}"], giou / (3 * 2))
    plain = criterion(output, targets, unchanged)
    assert plain.terms.items() <= losses.terms.items()
    weights = {"loss_ce": 2, "loss_bbox": 5, "loss_giou": 2}
    added = sum(weight * losses.terms[name + s] for name, weight in weights.items() for s in ("_dn_0", "_dn"))
    torch.testing.assert_close(losses.total, plain.total + added)


def test_normaliser_is_the_mean_over_ranks_and_at_least_one(criterion: Criterion) -> None:
    output, targets = make_output(1), make_targets(1, 2)
    counts = []

    def mean(count: torch.Tensor) -> torch.Tensor:
        counts.append(count.clone())
        return count * 2

    halved = criterion(output, targets, mean).total
    assert len(counts) == 1
    assert counts[0] == 3
    torch.testing.assert_close(halved * 2, criterion(output, targets, unchanged).total)
    floored = criterion(output, targets, lambda count: count * 0).total
    torch.testing.assert_close(floored, criterion(output, targets, unchanged).total * 3)


def test_no_targets_train_as_background(criterion: Criterion) -> None:
    output = make_output(2, with_proposals=True)
    output.logits.requires_grad_()
    output.boxes_cxcywh.requires_grad_()
    losses = criterion(output, make_targets(0, 0), unchanged)
    losses.total.backward()
    assert losses.total.isfinite()
    assert losses.terms["loss_bbox"] == losses.terms["loss_giou_enc"] == 0
    assert (output.logits.grad > 0).all()
    assert output.boxes_cxcywh.grad is not None
    assert output.boxes_cxcywh.grad.abs().max() == 0


def test_is_float32_under_autocast(criterion: Criterion) -> None:
    output, targets = make_output(2, with_proposals=True), make_targets(1, 2)
    expected = criterion(output, targets, unchanged).total
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(criterion(output, targets, unchanged).total, expected)


@pytest.mark.parametrize(
    "loss_weights",
    [{"loss_ce": 2, "loss_bbox": 5}, {"loss_ce": 2, "loss_bbox": 5, "loss_giou": 2, "loss_gious": 2}],
)
def test_missing_and_unknown_weights_are_refused(loss_weights: dict[str, float], criterion: Criterion) -> None:
    matcher: HungarianMatcher = criterion.matcher
    with pytest.raises(ValueError, match="loss_weights must hold exactly loss_ce, loss_bbox, loss_giou"):
        Criterion(matcher=matcher, loss_weights=loss_weights, focal_alpha=0.25, focal_gamma=2)
