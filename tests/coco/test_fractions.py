"""Shares of a data set: the same everywhere, nested, and as large as they say."""

import numpy as np
import pytest

from coco.annotations import read_table
from coco.errors import DataError
from coco.fractions import is_in_fraction, take_fraction

IDS = np.arange(20_000, dtype=np.int64)


def test_the_choice_is_written_down():
    """Numbers computed once: another hash, or a machine that computes it in another way, changes them."""
    assert np.flatnonzero(is_in_fraction(IDS[:400], 0.02)).tolist() == [115, 143, 360, 380]


def test_shares_are_nested_and_of_their_size():
    smaller = np.zeros(len(IDS), dtype=bool)
    for fraction in (0.001, 0.01, 0.1, 0.5, 1.0):
        larger = is_in_fraction(IDS, fraction)
        assert not (smaller & ~larger).any()
        assert abs(larger.sum() - fraction * len(IDS)) <= 4 * np.sqrt(fraction * (1 - fraction) * len(IDS))
        smaller = larger
    assert smaller.all()


def test_order_and_company_do_not_matter():
    shuffled = np.random.default_rng(0).permutation(IDS)
    assert (is_in_fraction(shuffled, 0.1) == is_in_fraction(IDS, 0.1)[shuffled]).all()
    assert (is_in_fraction(IDS[5:9], 0.1) == is_in_fraction(IDS, 0.1)[5:9]).all()


@pytest.mark.parametrize("fraction", [0, -0.1, 1.01, float("nan")])
def test_other_shares_are_refused(fraction):
    with pytest.raises(DataError, match="fraction must be above 0 and at most 1"):
        is_in_fraction(IDS, fraction)


def test_a_table_keeps_the_boxes_of_its_images(synthetic_folder):
    table = read_table(synthetic_folder / "annotations" / "instances_train.json", None)
    assert take_fraction(table, 1.0) is table
    part = take_fraction(table, 0.5)
    assert 0 < len(part.file_names) < len(table.file_names)
    for place, image_id in enumerate(part.image_ids.tolist()):
        whole = int(np.searchsorted(table.image_ids, image_id))
        mine, theirs = (slice(*t.first_box[i : i + 2]) for t, i in ((part, place), (table, whole)))
        assert part.file_names[place] == table.file_names[whole]
        assert (part.sizes_hw[place] == table.sizes_hw[whole]).all()
        for name in ("boxes_xywh", "areas", "labels", "is_crowd"):
            np.testing.assert_array_equal(getattr(part, name)[mine], getattr(table, name)[theirs])
    assert part.first_box[-1] == len(part.labels)
