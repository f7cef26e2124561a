"""The sort of records: buckets of any size, also beyond a block, come out in order and complete."""

import pytest
import torch

from msda_op.triton.hopper.deterministic import sort_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def sort_buckets(records: torch.Tensor, sizes: list[int], block: int, programs: int) -> None:
    """Sorts the records of two items and heads in place, their buckets having the same sizes."""
    starts = torch.tensor([0, *sizes], device=DEVICE).cumsum(0).int().expand(2, -1).contiguous()
    bins = torch.tensor([[0, 0, 0], [0, 0, len(sizes)]], dtype=torch.int32, device=DEVICE)
    sort_kernel[(2 * programs,)](
        bins, starts, records, len(sizes), records.shape[1], programs, L=1, BLOCK=block, num_warps=1
    )


@pytest.mark.parametrize("programs", [1, 3, 20])
@pytest.mark.parametrize("block", [8, 16])
def test_buckets_of_any_size_are_sorted(block: int, programs: int) -> None:
    sizes = [0, 1, 2, block // 4 + 1, block // 2, block // 2 + 1, block, block + 1, 3 * block, 0, 2 * block + 3, 19]
    generator = torch.Generator().manual_seed(0)
    records = torch.randint(-(2**62), 2**62, (2, sum(sizes)), generator=generator).to(DEVICE)
    expected = torch.cat([part.sort(dim=1).values for part in records.split(sizes, dim=1)], dim=1)
    sort_buckets(records, sizes, block, programs)
    assert torch.equal(records, expected)


@pytest.mark.parametrize("halves", [3, 4, 5, 6])
def test_reversed_records_need_all_rounds(halves: int) -> None:
    records = torch.arange(4 * halves, device=DEVICE).flip(0).expand(2, -1).contiguous()
    sort_buckets(records, [4 * halves], 8, 1)
    assert torch.equal(records, torch.arange(4 * halves, device=DEVICE).expand(2, -1))
