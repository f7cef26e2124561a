import itertools
import warnings
from typing import Any

import pytest
import torch

from models import matcher
from models.matcher import HungarianMatcher
from models.structures import DetectorOutput, EncoderProposals, Targets

NUM_LAYERS, NUM_QUERIES, NUM_CLASSES = 2, 4, 3


def build(**overrides: Any) -> HungarianMatcher:
    settings = {"cost_class": 2, "cost_bbox": 5, "cost_giou": 2, "focal_alpha": 0.25, "focal_gamma": 2}
    return HungarianMatcher(**settings | overrides)


def random_boxes(*shape: int) -> torch.Tensor:
    return torch.cat((torch.rand(*shape, 2) * 0.5 + 0.25, torch.rand(*shape, 2) * 0.3 + 0.05), dim=-1)


def make_output(with_proposals: bool = False, class_agnostic: bool = True) -> DetectorOutput:
    torch.manual_seed(0)
    proposals = EncoderProposals(torch.randn(2, 9, NUM_CLASSES), random_boxes(2, 9), class_agnostic)
    logits = torch.randn(NUM_LAYERS, 2, NUM_QUERIES, NUM_CLASSES)
    boxes_cxcywh = random_boxes(NUM_LAYERS, 2, NUM_QUERIES)
    return DetectorOutput(logits, boxes_cxcywh, proposals if with_proposals else None)


def make_targets(*counts: int) -> Targets:
    total = sum(counts)
    return Targets(torch.randint(NUM_CLASSES, (total,)), random_boxes(total), counts)


def pair_cost(logit: torch.Tensor, box: torch.Tensor, target_box: torch.Tensor) -> float:
    p = logit.double().sigmoid()
    focal = 0.25 * (1 - p) ** 2 * -p.log() - 0.75 * p**2 * -(1 - p).log()
    corners = [(b[:2] - b[2:] / 2, b[:2] + b[2:] / 2) for b in (box.double(), target_box.double())]
    (a0, a1), (b0, b1) = corners
    intersection = (torch.minimum(a1, b1) - torch.maximum(a0, b0)).clamp(min=0).prod()
    union = (a1 - a0).prod() + (b1 - b0).prod() - intersection
    hull = (torch.maximum(a1, b1) - torch.minimum(a0, b0)).prod()
    giou = intersection / union - (hull - union) / hull
    return float(2 * focal + 5 * (box - target_box).abs().sum() - 2 * giou)


def test_finds_the_cheapest_assignment_of_every_layer_and_image() -> None:
    output, targets = make_output(), make_targets(1, 3)
    matches, none = build()(output, targets)
    assert none is None
    assert matches.query.shape == (NUM_LAYERS, 4)
    for layer, (image, first, count) in itertools.product(range(NUM_LAYERS), ((0, 0, 1), (1, 1, 3))):
        costs = {
            queries: sum(
                pair_cost(
                    output.logits[layer, image, query, targets.labels[first + target]],
                    output.boxes_cxcywh[layer, image, query],
                    targets.boxes_cxcywh[first + target],
                )
                for target, query in enumerate(queries)
            )
            for queries in itertools.permutations(range(NUM_QUERIES), count)
        }
        mine = matches.batch[layer] == image
        found = sorted(zip(matches.target[layer, mine].tolist(), matches.query[layer, mine].tolist(), strict=True))
        assert tuple(query for _, query in found) == min(costs, key=costs.__getitem__)
        assert [target for target, _ in found] == list(range(first, first + count))
        assert (matches.layer[layer] == layer).all()


@pytest.mark.parametrize("class_agnostic", [True, False])
def test_proposals_are_matched_by_their_first_class_or_by_all(class_agnostic: bool) -> None:
    output, targets = make_output(with_proposals=True, class_agnostic=class_agnostic), make_targets(2, 3)
    proposals = output.proposals
    assert proposals is not None
    _, matches = build(cost_class=20)(output, targets)
    assert matches is not None
    alone = DetectorOutput(proposals.logits[None], proposals.boxes_cxcywh[None], None)
    objects = Targets(torch.zeros_like(targets.labels), targets.boxes_cxcywh, targets.counts)
    expected, _ = build(cost_class=20)(alone, objects if class_agnostic else targets)
    other, _ = build(cost_class=20)(alone, targets if class_agnostic else objects)
    assert torch.equal(matches.query, expected.query)
    assert torch.equal(matches.target, expected.target)
    assert not torch.equal(matches.query, other.query)


@pytest.mark.parametrize(
    ("counts", "num_matches"), [((0, 0), 0), ((0, 2), 2), ((7, 1), NUM_QUERIES + 1), ((NUM_QUERIES, 0), NUM_QUERIES)]
)
def test_any_number_of_targets(counts: tuple[int, int], num_matches: int) -> None:
    matches, proposals = build()(make_output(with_proposals=True), make_targets(*counts))
    assert matches.query.shape == matches.target.shape == (NUM_LAYERS, num_matches)
    assert proposals is not None
    assert proposals.query.shape == (1, sum(counts))
    for layer in range(NUM_LAYERS):
        pairs = set(zip(matches.batch[layer].tolist(), matches.query[layer].tolist(), strict=True))
        assert len(pairs) == len(set(matches.target[layer].tolist())) == num_matches


def test_copies_once_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    original = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: (copies.append(tensor.shape), original(tensor))[1])
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: pytest.fail("the matcher waits for the device"))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: pytest.fail("the matcher waits for the device"))
    build()(make_output(with_proposals=True), make_targets(2, 3))
    assert copies == [(NUM_LAYERS * 2 * NUM_QUERIES * 3 + 2 * 9 * 3,)]


@pytest.mark.parametrize("counts", [(5, 0), (3, 7), (0, 0), (12, 1)])
def test_the_cheapest_queries_of_each_target_hold_the_best_assignment(
    counts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    output, targets = make_output(with_proposals=True), make_targets(*counts)
    copied = []
    original = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: (copied.append(tensor.numel()), original(tensor))[1])
    (dense, dense_proposals), (few, few_proposals) = (
        (monkeypatch.setattr(matcher, "MAX_DENSE_QUERIES", limit), build()(output, targets))[1] for limit in (1024, 1)
    )
    for expected, actual in ((dense, few), (dense_proposals, few_proposals)):
        assert torch.equal(actual.batch, expected.batch)
        assert torch.equal(actual.query, expected.query)
        assert torch.equal(actual.target, expected.target)
    assert copied[1] == sum(2 * n * 2 * max(counts) * min(max(counts), q) for n, q in ((NUM_LAYERS, 4), (1, 9)))


def test_non_finite_costs_are_replaced_and_named_once() -> None:
    output, targets = make_output(), make_targets(2, 3)
    output.logits[1, 0] = torch.nan
    output.boxes_cxcywh[0, 1, 2] = torch.inf
    with pytest.warns(UserWarning, match="decoder layer 0, image 1; decoder layer 1, image 0") as caught:
        matches, _ = build()(output, targets)
    assert len(caught) == 1
    assert matches.query.shape == (NUM_LAYERS, 5)
    assert 2 not in matches.query[0, matches.batch[0] == 1].tolist()


def test_is_float32_under_autocast() -> None:
    output, targets = make_output(), make_targets(2, 3)
    expected, _ = build()(output, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error")
        matches, _ = build()(output, targets)
    assert torch.equal(matches.query, expected.query)


@pytest.mark.parametrize("overrides", [{"cost_class": -1}, {"cost_class": 0, "cost_bbox": 0, "cost_giou": 0}])
def test_wrong_costs_are_refused(overrides: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be >= 0 and not all 0"):
        build(**overrides)
