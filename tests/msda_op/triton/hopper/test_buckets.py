"""Buckets: the plan covers each pixel, and records, read back, give every sample in the image exactly once."""

from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from msda_op.levels import may_be_thin
from msda_op.triton.hopper import buckets, launch
from msda_op.triton.hopper.buckets import WINDOW_FIELDS, bound_buckets, expect_buckets
from msda_op.triton.hopper.call import Call, prepare_call
from parity.cases import Case, OpInputs, make_inputs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# NaN coordinates are cast to int and masked out, which numpy remarks on.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")


class Table(NamedTuple):
    """Level sizes, first rows and length of a value that holds them."""

    shapes: tuple[tuple[int, int], ...]
    starts: tuple[int, ...]
    length: int


def packed(*shapes: tuple[int, int]) -> Table:
    rows = [h * w for h, w in shapes]
    return Table(shapes, tuple(accumulate(rows[:-1], initial=0)), sum(rows))


TABLES = {
    "uneven": packed((9, 17), (5, 8), (2, 2)),
    "thin": packed((1, 30), (31, 1), (1, 1), (2, 100)),
    "columns": packed((40, 1), (17, 1)),
    "one row short of a tile": packed((3, 7), (4, 8), (5, 9)),
    "last level first": Table(((9, 17), (5, 8), (2, 2)), (44, 4, 0), 197),
    "gaps": Table(((5, 8), (9, 17)), (11, 60), 220),
}


def empty_call(table: Table, num_queries: int, num_points: int) -> Call:
    """Returns a call whose level table has reached the device, all samples at the upper left corner."""
    num_levels = len(table.shapes)
    locations = torch.zeros(1, num_queries, 1, num_levels, num_points, 2, device=DEVICE)
    value = torch.zeros(1, table.length, 1, 32, dtype=torch.bfloat16, device=DEVICE)
    tables = (torch.tensor(table.shapes, device=DEVICE), torch.tensor(table.starts, device=DEVICE))
    return prepare_call(value, tables, locations, None, locations[..., 0].bfloat16(), "BLNC", True)


def plan(call: Call) -> launch.Buckets:
    """Returns filled tables; what the kernels do not write stays -1."""
    planned, counters = launch.allocate_buckets(call), launch.allocate_counters(call)
    for tensor in (*planned, counters):
        tensor.fill_(-1)
    launch.plan_launch(call, planned, counters).run(call.value)
    return planned


@pytest.mark.parametrize("num_queries", [1, 40, 700])
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_windows_hold_every_upper_left_pixel_of_their_tile(
    table: Table, num_queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "BUCKET_LIMIT", 8)  # so that tiles are split
    call = empty_call(table, num_queries, 2)
    planned = plan(call)
    bins, windows = planned.bins.tolist(), planned.windows.tolist()
    total = bins[-1][2]
    assert 0 < total <= call.bucket_sizes.bound
    assert all(row == [-1] * WINDOW_FIELDS.value for row in windows[total:])
    seen, parts = set(), []
    for (height, width), start, (tiles, split_mask, first), (_, _, end) in zip(
        table.shapes, table.starts, bins[:-1], bins[1:], strict=True
    ):
        num_tiles = (end - first) // (split_mask + 1)
        assert (split_mask + 1) & split_mask == 0
        assert 2 * num_queries <= num_tiles * (split_mask + 1) * 8 + num_tiles  # an even spread fits
        for top in range(max(height - 1, 1)):
            for left in range(max(width - 1, 1)):
                bucket = first + (top // 3 * tiles + left // 7) * (split_mask + 1)
                for split in range(split_mask + 1):
                    assert bucket + split < end
                    corner, row, columns, rows, colour, splits, part = windows[bucket + split]
                    window_top, window_left = divmod(corner - start, width)
                    assert row == width
                    assert (window_top, window_left) == (top // 3 * 3, left // 7 * 7)
                    assert (columns, rows) == (width - window_left, height - window_top)
                    assert colour == top // 3 % 2 * 2 + left // 7 % 2
                    assert splits == (split_mask + 1 if split == 0 else 0)
                    if split_mask and bucket + split not in seen:
                        parts.append(part)
                    assert (part >= 0) == (split_mask > 0)
                    seen.add(bucket + split)
    assert seen == set(range(total))
    assert sorted(parts) == list(range(len(parts)))
    assert len(parts) <= buckets.bound_split_buckets(num_queries * len(table.shapes) * 2)


@pytest.mark.parametrize("num_samples", [0, 1, 10**3, 10**5])
def test_no_shape_has_more_buckets_than_the_bound(num_samples: int) -> None:
    def count(height: int, width: int) -> int:
        tiles = max(-(-(height - 1) // 3), 1) * max(-(-(width - 1) // 7), 1)
        splits = 1
        while -(-num_samples // tiles) > splits * buckets.BUCKET_LIMIT:
            splits *= 2
        return tiles * splits

    for height in (*range(1, 30), 500):
        for width in (*range(1, 30), 500):
            assert count(height, width) <= bound_buckets(height * width, 1, num_samples), (height, width)
    encoder = ((100, 167), (50, 84), (25, 42), (13, 21))
    ordinary = sum(count(*shape) for shape in encoder)
    expected = expect_buckets(22223, 4, 4 * num_samples)
    assert ordinary / 2 <= expected <= 2 * ordinary


def test_splits_of_an_encoder() -> None:
    table = packed((100, 167), (50, 84), (25, 42), (13, 21))
    call = empty_call(table, 1, 4)
    call = call._replace(sizes=call.sizes._replace(num_queries=22223))
    planned, counters = launch.allocate_buckets(call), launch.allocate_counters(call)
    launch.plan_launch(call, planned, counters).run(call.value)
    assert planned.bins[:, 1].tolist()[:4] == [0, 0, 3, 15]
    assert planned.bins[-1, 2] == 33 * 24 + 17 * 12 + 8 * 6 * 4 + 4 * 3 * 16
    assert planned.bins[-1, 2] <= counters.shape[1]  # a sector to each
    assert 4 * call.bucket_sizes.bound + counters[0].nbytes < 2**17  # starts and counters of an item and head


@pytest.mark.parametrize(
    ("placement", "programs"), [("around", 1), ("around", 1000), ("far", 1000), ("edges", 1000), ("broken", 1000)]
)
@pytest.mark.parametrize("name", ["uneven", "thin", "last level first", "gaps"])
def test_records_give_back_every_sample_in_the_image_once(
    name: str, placement: str, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = TABLES[name]
    monkeypatch.setattr(buckets, "BUCKET_LIMIT", 4)  # so that tiles are split
    monkeypatch.setattr(buckets, "expect_buckets", lambda *sizes: programs)
    case = Case("round trip", table.shapes, num_queries=7, head_dim=32, num_points=3, placement=placement)
    inputs = make_inputs(case, torch.bfloat16, DEVICE, seed=0)
    value = inputs.value.new_zeros(case.batch, table.length, case.num_heads, 32)
    tables = (torch.tensor(table.shapes, device=DEVICE), torch.tensor(table.starts, device=DEVICE))
    samples = (inputs.sampling_locations, None, inputs.attention_weights)
    call = prepare_call(value, tables, *samples, "BLNC", may_be_thin(table.shapes))
    filled, counters = launch.count_samples(call)
    records = launch.allocate_records(call)
    nothing = launch.Wanted(None, None, None)
    launch.main_launch(call, inputs.grad_output, nothing, None, filled, counters, records).run(value)
    total = int(filled.bins[-1, 2])
    # No gap, and none runs into the next.
    assert torch.equal(filled.starts[:, 1 : total + 1], counters.transpose(1, 2).flatten(1)[:, :total])
    for plane in range(case.batch * case.num_heads):
        found = read_records(filled, records, plane, table)
        expected = expected_samples(inputs, *divmod(plane, case.num_heads))
        assert [sample[:3] for sample in found] == [sample[:3] for sample in expected]
        places = torch.tensor([sample[3:] for sample in found]), torch.tensor([sample[3:] for sample in expected])
        torch.testing.assert_close(*places, rtol=0, atol=1 / 2000)  # records round to 1/2048 of a pixel


@pytest.mark.parametrize("num_coordinates", [0, 2, 4])
@pytest.mark.parametrize(
    "case",
    [
        Case("around", ((9, 17), (5, 8), (2, 2)), num_queries=7, head_dim=32, num_points=3),
        Case("two passes", ((9, 17), (5, 8)), num_queries=5, head_dim=32, num_points=9, placement="edges"),
        Case("wide", ((9, 17), (5, 8)), num_queries=9, head_dim=64, num_points=2, placement="broken"),
        Case("thin", ((1, 30), (31, 1), (2, 100)), num_queries=4, head_dim=32, placement="far"),
    ],
    ids=lambda case: case.name,
)
def test_forward_counts_what_the_count_kernel_does(
    case: Case, num_coordinates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "BUCKET_LIMIT", 4)  # so that tiles are split
    if num_coordinates and len(case.spatial_shapes) * -(-case.num_points // 4) > 4:
        pytest.skip("more than a softmax of 16 lanes holds")
    inputs = make_inputs(case, torch.bfloat16, DEVICE, seed=0)
    table = packed(*case.spatial_shapes)
    tables = (torch.tensor(table.shapes, device=DEVICE), torch.tensor(table.starts, device=DEVICE))
    samples: tuple = (inputs.sampling_locations, None)
    if num_coordinates:
        points = torch.rand(case.batch, case.num_queries, len(table.shapes), num_coordinates).to(DEVICE)
        samples = (points, inputs.sampling_locations * 3)
    thin = may_be_thin(table.shapes)
    call = prepare_call(inputs.value, tables, *samples, inputs.attention_weights, "BLNC", thin)
    output, counted = launch.run_counting_forward(call)
    torch.testing.assert_close(output, launch.run_forward(call), rtol=0, atol=0, equal_nan=True)
    expected, counters = launch.count_samples(call)
    total = int(expected.bins[-1, 2])
    assert torch.equal(counted.bins[:-1], expected.bins[:-1])
    assert total == counted.bins[-1, 2]
    assert torch.equal(counted.windows[:total], expected.windows[:total])
    assert torch.equal(counted.starts[:, : total + 1], expected.starts[:, : total + 1])
    assert total > 0
    seats = launch.take_seats(call, counted)
    assert torch.equal(*(seat.transpose(1, 2).flatten(1)[:, :total] for seat in (seats, counters)))


Sample = tuple[int, int, int, float, float]


def read_records(filled: launch.Buckets, records: Tensor, plane: int, table: Table) -> list[Sample]:
    """Returns (level, query, bits of the weight, x, y in pixels) of the records of an item and head, sorted."""
    found = []
    firsts = filled.bins[:, 2].tolist()
    for bucket in range(firsts[-1]):
        level = sum(bucket >= first for first in firsts) - 1
        first_row, width, *_ = filled.windows[bucket].tolist()
        top, left = divmod(first_row - table.starts[level], width)
        for place in range(filled.starts[plane, bucket], filled.starts[plane, bucket + 1]):
            word0, word1 = (word & 0xFFFFFFFF for word in records[plane, place].tolist())
            x, y = (word0 >> 16) / 2048 - 1, (word1 & 0x7FFF) / 2048 - 1
            found.append((level, word1 >> 15, word0 & 0xFFFF, left + x, top + y))
    return sorted(found)


def expected_samples(inputs: OpInputs, item: int, head: int) -> list[Sample]:
    """Returns the same of the samples that reach the image."""
    expected = []
    for level, (height, width) in enumerate(inputs.spatial_shapes):
        for query in range(inputs.sampling_locations.shape[1]):
            for point in range(inputs.sampling_locations.shape[4]):
                x, y = inputs.sampling_locations[item, query, head, level, point].double().tolist()
                x, y = x * width - 0.5, y * height - 0.5
                if -1 < x < width and -1 < y < height:
                    weight: Tensor = inputs.attention_weights[item, query, head, level, point]
                    bits = weight.half().view(torch.int16).item() & 0xFFFF
                    expected.append((level, query, bits, x, y))
    return sorted(expected)
