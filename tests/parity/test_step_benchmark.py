import pytest
import torch

from parity.step_benchmark import (
    PHASES,
    StepCase,
    SyntheticStep,
    format_step,
    largest_batch,
    measure_step,
    merged_length,
)

CASE = StepCase(("model=deformable_detr_tiny", "backbone=resnet18", "op=reference"), 2, 96, 128, 3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_row_holds_every_phase(precision: str) -> None:
    case = StepCase((*CASE.overrides, f"precision={precision}"), 2, 96, 128, 3)
    row = measure_step(case, torch.device("cpu"), warmup=0, repeats=2)
    assert tuple(row["phases_ms"]) == PHASES
    assert min(row["phases_ms"].values()) > 0
    assert sum(row["phases_ms"].values()) <= 1.5 * row["step_ms"]["p80"]
    assert row["images_per_s"] == pytest.approx(2000 / row["step_ms"]["median"])
    assert f"precision={precision} batch 2 96x128" in format_step(row)


def test_steps_learn_the_batch() -> None:
    step = SyntheticStep(CASE, torch.device("cpu"))
    entered = []

    def span(phase: str) -> torch.profiler.record_function:
        entered.append(phase)
        return torch.profiler.record_function(phase)

    losses = [float(step.run(span)) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert entered == [*PHASES] * 4


def test_busy_time_is_the_union_of_the_kernels() -> None:
    assert merged_length([]) == 0
    assert merged_length([(0, 2), (1, 3), (1, 2), (5, 6)]) == 4


def test_largest_batch_leaves_the_reserve() -> None:
    # 1 GiB of weights and 2 GiB an image: 24 - 1.5 - 1 holds 10 images.
    assert largest_batch((2, 5.0), (4, 9.0), 24) == 10
    assert largest_batch((2, 5.0), (4, 9.0), 80) == 38
