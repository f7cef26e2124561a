"""The sort of records: buckets of any size, also beyond a block, come out in order and complete."""

import pytest
import torch

from msda_op.triton.hopper.buckets import COUNTER_STRIDE
from msda_op.triton.hopper.deterministic import sort_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("block", [4, 8])
def test_buckets_of_any_size_are_sorted(block: int) -> None:
    sizes = [0, 1, 2, block // 2, block, block + 1, 3 * block, 0, 2 * block + 3, 19]
    generator = torch.Generator().manual_seed(0)
    records = torch.randint(-(2**62), 2**62, (1, sum(sizes)), generator=generator).to(DEVICE)
    expected = torch.cat([part.sort().values for part in records[0].split(sizes)])
    ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0).int()
    counters = torch.zeros(1, len(sizes), COUNTER_STRIDE.value, dtype=torch.int32)
    counters[0, :, 0] = ends
    starts = (ends - torch.tensor(sizes, dtype=torch.int32))[None].int()
    sort_kernel[(len(sizes),)](
        counters.to(DEVICE), starts.to(DEVICE), records, len(sizes), records.shape[1], BLOCK=block, num_warps=1
    )
    assert torch.equal(records[0], expected)


@pytest.mark.parametrize("halves", [3, 4, 5, 6])
def test_reversed_records_need_all_rounds(halves: int) -> None:
    records = torch.arange(4 * halves, device=DEVICE).flip(0)[None].contiguous()
    counters = torch.full((1, 1, COUNTER_STRIDE.value), 4 * halves, dtype=torch.int32, device=DEVICE)
    starts = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    sort_kernel[(1,)](counters, starts, records, 1, 4 * halves, BLOCK=8, num_warps=1)
    assert torch.equal(records[0], torch.arange(4 * halves, device=DEVICE))
