"""Buckets: the plan covers each pixel, and records, read back, give every sample in the image exactly once."""

from collections import Counter

import pytest
import torch

from msda_op.triton.hopper import buckets, launch
from msda_op.triton.hopper.buckets import BUCKET_TARGET, choose_splits, count_tiles, plan_buckets
from parity.cases import Case, make_inputs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = ((9, 17), (5, 8), (2, 2))


def test_windows_hold_every_two_by_two_block_of_their_tile() -> None:
    plan = plan_buckets(SHAPES, (1, 2, 1), DEVICE)
    windows, bins = plan.windows.tolist(), plan.bins.tolist()
    assert plan.num_buckets == len(windows)
    start = 0
    for (height, width), (tiles, split_mask, first) in zip(SHAPES, bins, strict=True):
        for top in range(height - 1):
            for left in range(width - 1):
                bucket = first + (top // 3 * tiles + left // 7) * (split_mask + 1)
                for split in range(split_mask + 1):
                    corner, row, columns, rows = windows[bucket + split]
                    assert row == width
                    window_top, window_left = divmod(corner - start, width)
                    assert 0 <= top - window_top <= 2
                    assert 0 <= left - window_left <= 6
                    assert (columns, rows) == (width - window_left, height - window_top)
        start += height * width


def test_tiles_and_splits() -> None:
    assert count_tiles(100, 167) == (33, 24)
    assert count_tiles(2, 2) == (1, 1)
    levels = ((100, 167), (50, 84), (25, 42), (13, 21))
    assert choose_splits(levels, 22223, 4) == (1, 1, 4, 16)
    assert choose_splits(((2, 2),), BUCKET_TARGET, 1) == (1,)
    assert choose_splits(((2, 2),), 2 * BUCKET_TARGET, 1) == (2,)


# NaN coordinates are cast to int and masked out, which numpy remarks on.
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("placement", ["around", "far", "edges", "broken"])
def test_records_give_back_every_sample_in_the_image_once(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_TARGET", 4)  # so that tiles are split
    case = Case("round trip", SHAPES, num_queries=7, head_dim=32, num_points=3, placement=placement)
    inputs = make_inputs(case, torch.bfloat16, DEVICE, seed=0)
    call = launch.prepare_call(inputs.value, SHAPES, inputs.sampling_locations, None, inputs.attention_weights, "BLNC")
    filled = launch._fill_starts(call)
    assert max(choose_splits(SHAPES, 7, 3)) > 1
    launch._run_main(call, inputs.grad_output, launch.Wanted(None, None, None), None, filled)

    ends = filled.counters[..., 0]
    assert torch.equal(filled.starts[:, 1:], ends[:, :-1])  # no gap, and no bucket runs into the next
    for plane in range(case.batch * case.num_heads):
        item, head = divmod(plane, case.num_heads)
        actual = Counter()
        for bucket in range(filled.plan.num_buckets):
            first_row, width, _, _ = filled.plan.windows[bucket].tolist()
            for place in range(filled.starts[plane, bucket], ends[plane, bucket]):
                word0, word1 = (word & 0xFFFFFFFF for word in filled.records[plane, place].tolist())
                x, y = (word0 >> 16) / 2048 - 1, (word1 & 0x7FFF) / 2048 - 1
                level = sum(first_row >= start for start in (0, 153, 193)) - 1
                top, left = divmod(first_row - (0, 153, 193)[level], width)
                actual[level, word1 >> 15, round(8 * (left + x)), round(8 * (top + y)), word0 & 0xFFFF] += 1
        assert actual == expected_samples(inputs, item, head)


def expected_samples(inputs, item: int, head: int) -> Counter:
    """Counts (level, query, x and y in eighths of a pixel, bits of the weight) of the samples that reach the image."""
    expected = Counter()
    for level, (height, width) in enumerate(SHAPES):
        for query in range(inputs.sampling_locations.shape[1]):
            for point in range(inputs.sampling_locations.shape[4]):
                x, y = inputs.sampling_locations[item, query, head, level, point].double().tolist()
                x, y = x * width - 0.5, y * height - 0.5
                if -1 < x < width and -1 < y < height:
                    weight = inputs.attention_weights[item, query, head, level, point].half().view(torch.int16).item()
                    expected[level, query, round(8 * x), round(8 * y), weight & 0xFFFF] += 1
    return expected
