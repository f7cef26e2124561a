from pathlib import Path

import pytest
import torch

from parity.step_benchmark import (
    PHASES,
    SWITCHES,
    StepCase,
    SyntheticStep,
    compose_case,
    draw_batch,
    format_step,
    list_variants,
    measure_step,
    merged_length,
    plot_steps,
)

CASE = StepCase(("model=deformable_detr_tiny", "backbone=resnet18", "op=reference"), 2, 96, 128, 3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_row_holds_every_phase(precision: str) -> None:
    case = StepCase((*CASE.overrides, f"precision={precision}"), 2, 96, 128, 3)
    row = measure_step(SyntheticStep(case, torch.device("cpu")), case, warmup=0, repeats=2)
    assert tuple(row["phases_ms"]) == PHASES
    assert min(row["phases_ms"].values()) > 0
    assert sum(row["phases_ms"].values()) <= 1.5 * row["step_ms"]["p80"]
    assert row["images_per_s"] == pytest.approx(2000 / row["step_ms"]["median"])
    assert row["who"] == "triton-detr"
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


def test_one_image_may_be_crowded() -> None:
    *_, targets = draw_batch(StepCase((), 3, 8, 8, boxes=2, dense=5))
    assert targets.counts == (5, 2, 2)
    assert len(targets.labels) == len(targets.boxes_cxcywh) == 9


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch_changes_a_setting(switch: str) -> None:
    on = (*CASE.overrides, "precision=bf16", "cuda_graphs=true", "compile=true")
    configs = [compose_case(StepCase(overrides, 2, 96, 128, 3)) for overrides in (on, (*on, *SWITCHES[switch]))]
    assert configs[0] != configs[1]


def test_rows_without_each_switch_and_with_checkpointing() -> None:
    assert list_variants(switches=False, checkpointing=False) == [()]
    *others, last = list_variants(switches=True, checkpointing=True)
    plain, *without, without_all = others
    assert plain == ()
    assert without == list(SWITCHES.values())
    assert set(without_all) == {override for overrides in without for override in overrides}
    keys = [override.split("=")[0] for override in without_all]
    assert len(keys) == len(set(keys))
    plain, saving = (compose_case(StepCase((*CASE.overrides, *extra), 2, 96, 128, 3)) for extra in ((), last))
    assert not plain.model.transformer.gradient_checkpointing
    assert saving.model.transformer.gradient_checkpointing


def test_a_line_says_what_a_card_holds() -> None:
    row = {"who": "a", "overrides": [], "batch": 4, "size_hw": (8, 9), "step_ms": {"median": 1.0}}
    row |= {"phases_ms": dict.fromkeys(PHASES, 0.1), "largest_batch": {"24": 12, "80": 40}}
    row |= {"largest_batch_found": {"24": 13}}
    assert format_step(row).endswith("24 GiB hold a batch of about 12 (tried: 13), 80 GiB hold a batch of about 40")


def test_bars_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {"who": "triton-detr", "overrides": ["precision=bf16"], "batch": 4, "phases_ms": dict.fromkeys(PHASES, 2.0)}
    plot_steps([row, row | {"who": "official"}], tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
