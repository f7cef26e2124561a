"""The instructive gather computes the same with every switch."""

import pytest
import torch

from parity.gather_kernel import gather_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("unrolled", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "hidden", "apart"])
def test_every_switch_gives_the_sum_of_weighted_rows(layout: str, unrolled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(20, 8, generator=generator).to(DEVICE)
    rows = torch.randint(20, (19, 3), generator=generator, dtype=torch.int32).to(DEVICE)
    weights = torch.rand(19, 3, generator=generator).to(DEVICE)
    expected = (table[rows.long()] * weights[..., None]).sum(1)
    given = table.t().contiguous().t() if layout == "apart" else table
    actual = gather_rows(given, rows, weights, contiguous=layout == "contiguous", unrolled=unrolled)
    torch.testing.assert_close(actual, expected)


def test_strided_rows_cannot_be_declared_contiguous() -> None:
    table = torch.zeros(8, 20, device=DEVICE).t()
    rows, weights = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), torch.ones(1, 1, device=DEVICE)
    with pytest.raises(ValueError, match=r"table must be contiguous where contiguous=True, got strides \(1, 20\)"):
        gather_rows(table, rows, weights, contiguous=True, unrolled=True)
