import logging
from typing import Any

import pytest
import torch

from models.denoising import ContrastiveDenoising, DenoisingQueries
from models.structures import Targets

NUM_CLASSES = 7


def build(**overrides: Any) -> ContrastiveDenoising:
    settings = {"num_queries": 4, "max_queries": 40, "label_noise_ratio": 0.5, "box_noise_scale": 1.0}
    return ContrastiveDenoising(**settings | overrides)


def make_targets(*counts: int) -> Targets:
    """Boxes small and central enough to be noised without reaching the border."""
    generator = torch.Generator().manual_seed(0)
    total = sum(counts)
    centers = torch.rand(total, 2, generator=generator) * 0.2 + 0.4
    sizes = torch.rand(total, 2, generator=generator) * 0.2 + 0.05
    labels = torch.randint(NUM_CLASSES, (total,), generator=generator)
    return Targets(labels, torch.cat((centers, sizes), dim=1), counts)


def queries(targets: Targets, seed: int = 0, **overrides: Any) -> DenoisingQueries:
    return build(**overrides).make_queries(targets, NUM_CLASSES, torch.Generator().manual_seed(seed))


def test_layout_by_hand() -> None:
    made = queries(make_targets(1, 0, 2))
    assert made.num_groups == 2  # 4 positives aimed at, 2 targets in the fullest image
    empty = [True] * 8
    one = [False, True, False, True, False, True, False, True]
    assert made.padding_mask.tolist() == [one, empty, [False] * 8]
    positives = list(zip(made.batch.tolist(), made.query.tolist(), made.target.tolist(), strict=True))
    assert positives == [(0, 0, 0), (2, 0, 1), (2, 1, 2), (0, 4, 0), (2, 4, 1), (2, 5, 2)]


@pytest.mark.parametrize(
    ("counts", "num_groups", "slots"),
    [((1,), 4, 1), ((3, 1), 1, 3), ((9, 2), 1, 9), ((0, 0), 4, 0), ((50,), 1, 20)],
)
def test_groups_and_slots(counts: tuple[int, ...], num_groups: int, slots: int) -> None:
    made = queries(make_targets(*counts))
    assert made.num_groups == num_groups
    assert made.labels.shape == made.padding_mask.shape == (len(counts), 2 * num_groups * slots)
    assert made.boxes_cxcywh.shape == (len(counts), 2 * num_groups * slots, 4)
    assert len(made.batch) == len(made.query) == len(made.target) == num_groups * sum(min(n, slots) for n in counts)


def test_the_cap_also_bounds_the_groups() -> None:
    made = queries(make_targets(1), num_queries=100, max_queries=40)
    assert (made.num_groups, made.labels.shape[1]) == (20, 40)


def test_without_noise_queries_are_the_targets() -> None:
    targets = make_targets(2, 3)
    made = queries(targets, num_queries=6, label_noise_ratio=0.0, box_noise_scale=0.0)
    for offset in (0, 3):  # positives, then negatives of the same group
        place = (made.batch, made.query + offset)
        assert torch.equal(made.labels[place], targets.labels[made.target])
        torch.testing.assert_close(made.boxes_cxcywh[place], targets.boxes_cxcywh[made.target])
    assert (made.boxes_cxcywh[made.padding_mask] == 0.5).all()


def test_positives_move_up_to_half_a_size_and_negatives_up_to_twice_as_much() -> None:
    targets, scale, slots = make_targets(5), 0.8, 5
    made = queries(targets, num_queries=1000, max_queries=2000, box_noise_scale=scale)
    shifts = []
    for offset in (0, slots):
        noised, original = made.boxes_cxcywh[made.batch, made.query + offset], targets.boxes_cxcywh[made.target]
        sides = [
            torch.cat((box[:, :2] - box[:, 2:] / 2, box[:, :2] + box[:, 2:] / 2), dim=1) for box in (noised, original)
        ]
        shifts.append((sides[0] - sides[1]) / (original[:, 2:].repeat(1, 2) / 2 * scale))
    positive, negative = (shift.abs() for shift in shifts)
    assert positive.max() <= 1 + 1e-4
    assert negative.min() >= 1 - 1e-4
    assert negative.max() <= 2 + 1e-4
    for shift, mean in ((positive, 0.5), (negative, 1.5)):
        torch.testing.assert_close(shift.mean(0), torch.full((4,), mean), atol=0.05, rtol=0)
    for shift in shifts:
        torch.testing.assert_close((shift > 0).float().mean(0), torch.full((4,), 0.5), atol=0.08, rtol=0)
        assert (shift[:, 0] * shift[:, 2]).mean().abs() < 0.15, "both sides move together"


def test_boxes_stay_inside_the_image() -> None:
    targets = Targets(torch.zeros(1, dtype=torch.int64), torch.tensor([[0.1, 0.9, 0.4, 0.3]]), (1,))
    made = queries(targets, num_queries=500, max_queries=1000)
    center, size = made.boxes_cxcywh.split(2, dim=-1)
    sides = torch.cat((center - size / 2, center + size / 2), dim=-1)
    assert sides.min() == pytest.approx(0, abs=1e-6)
    assert sides.max() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(("ratio", "changed"), [(0.0, 0.0), (0.5, 0.25), (2.0, 1.0)])
def test_labels_are_replaced_with_half_the_ratio(ratio: float, changed: float) -> None:
    targets = make_targets(4)
    made = queries(targets, num_queries=4000, max_queries=8000, label_noise_ratio=ratio)
    labels = made.labels[made.batch, made.query]
    rate = (labels != targets.labels[made.target]).float().mean()
    assert rate == pytest.approx(changed * (1 - 1 / NUM_CLASSES), abs=0.03)
    assert labels.min() >= 0
    assert labels.max() < NUM_CLASSES


def test_the_generator_decides() -> None:
    targets = make_targets(3, 1)
    first, again, other = (queries(targets, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.boxes_cxcywh, again.boxes_cxcywh)
    assert torch.equal(first.labels, again.labels)
    assert not torch.equal(first.boxes_cxcywh, other.boxes_cxcywh)


def test_attention_mask_by_plain_loops() -> None:
    made, num_matching = queries(make_targets(1, 2)), 3
    known = made.labels.shape[1]
    mask = made.attention_mask(num_matching)
    assert mask.shape == (known + num_matching, known + num_matching)
    group_size = known // made.num_groups
    for row in range(known + num_matching):
        for column in range(known + num_matching):
            same_group = row < known and row // group_size == column // group_size
            assert mask[row, column] == (column < known and not same_group), (row, column)


def test_dense_images_are_noised_in_part_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    denoising, targets = build(label_noise_ratio=0.0, box_noise_scale=0.0), make_targets(3, 100)
    with caplog.at_level(logging.WARNING):
        parts = [denoising.make_queries(targets, NUM_CLASSES, torch.Generator().manual_seed(seed)) for seed in range(2)]
    assert [record.getMessage() for record in caplog.records] == [
        "an image has 100 targets, but max_queries=40 leaves room for 20: denser images are noised in part "
        "(raise model.denoising.max_queries if memory allows)"
    ]
    for made in parts:
        assert made.labels.shape == (2, 40)
        dense = made.target[made.batch == 1]
        assert len(dense.unique()) == len(dense) == 20
        assert dense.min() >= 3
        assert made.target[made.batch == 0].tolist() == [0, 1, 2]
        torch.testing.assert_close(made.boxes_cxcywh[made.batch, made.query], targets.boxes_cxcywh[made.target])
    assert not torch.equal(parts[0].target, parts[1].target)


def test_no_report_below_the_cap(caplog: pytest.LogCaptureFixture) -> None:
    queries(make_targets(20, 0))
    assert not caplog.records


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_queries": 0}, "num_queries must be at least 1, got 0"),
        ({"max_queries": 1}, "max_queries must be at least 2, got 1"),
        ({"label_noise_ratio": 2.5}, r"label_noise_ratio must lie in 0\.\.2, got 2\.5"),
        ({"box_noise_scale": -0.1}, r"box_noise_scale must be at least 0, got -0\.1"),
    ],
)
def test_wrong_settings_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**overrides)
