import logging
from typing import Any

import pytest
import torch

from models.denoising import ContrastiveDenoising, NoisedTargets
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


def queries(targets: Targets, seed: int = 0, **overrides: Any) -> NoisedTargets:
    return build(**overrides).make_queries(targets, NUM_CLASSES, torch.Generator().manual_seed(seed))


def test_layout_by_hand() -> None:
    made = queries(make_targets(1, 0, 2))
    assert made.num_groups == 2  # 4 positives aimed at, 2 targets in the fullest image
    assert made.num_queries == 8
    one = [False, True, False, True, False, True, False, True]
    assert made.queries.padding_mask.tolist() == [one, [True] * 8, [False] * 8]
    positives = list(zip(made.batch.tolist(), made.query.tolist(), made.target.tolist(), strict=True))
    assert positives == [(0, 0, 0), (2, 0, 1), (2, 1, 2), (0, 4, 0), (2, 4, 1), (2, 5, 2)]


@pytest.mark.parametrize(
    ("counts", "num_groups", "slots", "padded"),
    [
        ((1,), 4, 1, 8),
        ((3, 1), 1, 3, 8),
        ((9, 2), 1, 9, 24),
        ((0, 0), 4, 0, 8),
        ((17,), 1, 17, 38),
        ((50,), 1, 19, 38),
    ],
)
def test_groups_slots_and_padding(counts: tuple[int, ...], num_groups: int, slots: int, padded: int) -> None:
    made = queries(make_targets(*counts), max_queries=38)
    known = 2 * num_groups * slots
    assert (made.num_groups, made.num_queries) == (num_groups, known)
    assert made.queries.labels.shape == made.queries.padding_mask.shape == (len(counts), padded)
    assert made.queries.boxes_cxcywh.shape == (len(counts), padded, 4)
    assert made.queries.group.shape == (padded,)
    assert made.queries.padding_mask[:, known:].all()
    assert (~made.queries.padding_mask).sum() == 2 * num_groups * sum(min(n, slots) for n in counts)
    assert len(made.batch) == len(made.query) == len(made.target) == num_groups * sum(min(n, slots) for n in counts)


def test_numbers_of_targets_share_few_numbers_of_queries() -> None:
    sizes = {
        count: queries(make_targets(count), num_queries=100, max_queries=400).queries.labels.shape[1]
        for count in range(251)
    }
    assert {size for count, size in sizes.items() if count <= 100} == {200}
    assert {size for count, size in sizes.items() if count > 100} == {400}


def test_the_cap_also_bounds_the_groups() -> None:
    made = queries(make_targets(1), num_queries=100, max_queries=40)
    assert (made.num_groups, made.num_queries, made.queries.labels.shape[1]) == (20, 40, 40)


def test_without_noise_queries_are_the_targets() -> None:
    targets = make_targets(2, 3)
    made = queries(targets, num_queries=6, label_noise_ratio=0.0, box_noise_scale=0.0)
    for offset in (0, 3):  # positives, then negatives of the same group
        place = (made.batch, made.query + offset)
        assert torch.equal(made.queries.labels[place], targets.labels[made.target])
        torch.testing.assert_close(made.queries.boxes_cxcywh[place], targets.boxes_cxcywh[made.target])
    assert (made.queries.boxes_cxcywh[made.queries.padding_mask] == 0.5).all()
    assert (made.queries.labels[made.queries.padding_mask] == 0).all()


def test_positives_move_up_to_half_a_size_and_negatives_up_to_twice_as_much() -> None:
    targets, scale, slots = make_targets(5), 0.8, 5
    made = queries(targets, num_queries=1000, max_queries=2000, box_noise_scale=scale)
    shifts = []
    for offset in (0, slots):
        place = (made.batch, made.query + offset)
        noised, original = made.queries.boxes_cxcywh[place], targets.boxes_cxcywh[made.target]
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
    center, size = made.queries.boxes_cxcywh.split(2, dim=-1)
    sides = torch.cat((center - size / 2, center + size / 2), dim=-1)
    assert sides.min() == pytest.approx(0, abs=1e-6)
    assert sides.max() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(("ratio", "changed"), [(0.0, 0.0), (0.5, 0.25), (2.0, 1.0)])
def test_labels_are_replaced_with_half_the_ratio(ratio: float, changed: float) -> None:
    targets = make_targets(4)
    made = queries(targets, num_queries=4000, max_queries=8000, label_noise_ratio=ratio)
    labels = made.queries.labels[made.batch, made.query]
    rate = (labels != targets.labels[made.target]).float().mean()
    assert rate == pytest.approx(changed * (1 - 1 / NUM_CLASSES), abs=0.03)
    assert labels.min() >= 0
    assert labels.max() < NUM_CLASSES


def test_the_generator_decides() -> None:
    targets = make_targets(3, 1)
    first, again, other = (queries(targets, seed=seed).queries for seed in (1, 1, 2))
    assert torch.equal(first.boxes_cxcywh, again.boxes_cxcywh)
    assert torch.equal(first.labels, again.labels)
    assert not torch.equal(first.boxes_cxcywh, other.boxes_cxcywh)


def test_attention_mask_by_plain_loops() -> None:
    made, num_matching = queries(make_targets(1, 3)), 3
    known, padded = made.num_queries, made.queries.labels.shape[1]
    assert (known, padded) == (6, 8)
    mask = made.queries.attention_mask(num_matching)
    assert mask.shape == (padded + num_matching, padded + num_matching)
    group_size = known // made.num_groups

    def group_of(query: int) -> int | str:
        return query // group_size if query < known else "padding" if query < padded else "matching"

    for row in range(padded + num_matching):
        for column in range(padded + num_matching):
            same_group = group_of(row) == group_of(column)
            assert mask[row, column] == (column < padded and not same_group), (row, column)


@pytest.mark.parametrize("counts", [(1, 2), (3, 0), (0, 0), (50,)])
def test_padding_is_seen_by_no_other_query_and_sees_some(counts: tuple[int, ...]) -> None:
    made = queries(make_targets(*counts))
    padded = made.queries.labels.shape[1]
    mask = made.queries.attention_mask(num_matching_queries=3)
    assert mask[: made.num_queries, made.num_queries : padded].all()
    assert mask[padded:, :padded].all()
    assert not mask.all(1).any(), "a softmax over nothing is not a number"


def test_dense_images_are_noised_in_part_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    denoising, targets = build(label_noise_ratio=0.0, box_noise_scale=0.0), make_targets(3, 100)
    with caplog.at_level(logging.WARNING):
        parts = [denoising.make_queries(targets, NUM_CLASSES, torch.Generator().manual_seed(seed)) for seed in range(2)]
    assert [record.getMessage() for record in caplog.records] == [
        "an image has 100 targets, but max_queries=40 leaves room for 20: denser images are noised in part "
        "(raise model.denoising.max_queries if memory allows)"
    ]
    for made in parts:
        assert made.queries.labels.shape == (2, 40)
        dense = made.target[made.batch == 1]
        assert len(dense.unique()) == len(dense) == 20
        assert dense.min() >= 3
        assert made.target[made.batch == 0].tolist() == [0, 1, 2]
        boxes_cxcywh = made.queries.boxes_cxcywh[made.batch, made.query]
        torch.testing.assert_close(boxes_cxcywh, targets.boxes_cxcywh[made.target])
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
