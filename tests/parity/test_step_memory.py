import pytest
import torch

from parity.step_benchmark import StepCase, SyntheticStep
from parity.step_memory import (
    bisect_largest,
    estimate_largest_batch,
    find_largest_batch,
    fitting_cards,
    measure_dense,
    measure_memory,
)


def test_the_estimate_leaves_the_reserve() -> None:
    # 1 GiB of weights and 2 GiB an image: 24 - 1.5 - 1 holds 10 images.
    assert estimate_largest_batch((2, 5.0), (4, 9.0), 24) == 10
    assert estimate_largest_batch((2, 5.0), (4, 9.0), 80) == 38
    assert estimate_largest_batch((1, 30.0), (2, 31.0), 24) == 0  # the weights alone do not fit


def test_a_gpu_stands_in_for_no_larger_card() -> None:
    assert fitting_cards(139.8) == [24, 80]
    assert fitting_cards(79.1) == [24, 80]
    assert fitting_cards(44.4) == [24]
    assert fitting_cards(15.7) == []


@pytest.mark.parametrize("largest", [0, 1, 5, 16, 40])
def test_bisection_finds_the_largest_that_fits(largest: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= largest

    assert bisect_largest(fits, 16) == min(largest, 16)
    assert len(tried) <= 5


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", ["true", "false"])
def test_memory_is_measured_and_the_batch_put_back(cuda_graphs: str) -> None:
    overrides = ("model=deformable_detr_tiny", "backbone=resnet18", "op=triton", f"cuda_graphs={cuda_graphs}")
    case = StepCase(overrides, 2, 256, 256, 3)
    step = SyntheticStep(case, torch.device("cuda"))
    row = measure_memory(case, step)
    assert 0 < row["peak_gib"] < 8
    assert ("largest_batch" in row) == (cuda_graphs == "false")
    assert measure_dense(case, step, 40)["dense_ratio"] > 0.5
    if step.graphed:
        with pytest.raises(ValueError, match="cuda_graphs must be false to find the largest batch"):
            find_largest_batch(case, step, 8, limit=4)
    else:
        assert find_largest_batch(case, step, 8, limit=4) == 4
        assert find_largest_batch(case, step, 0.75, limit=4) == 0
        with pytest.raises(ValueError, match="card_gib must be at most"):
            find_largest_batch(case, step, 10_000, limit=4)
    step.warm_up(1)
