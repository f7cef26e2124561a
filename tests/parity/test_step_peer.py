"""The official code beside ours; what runs it needs OFFICIAL_DEFORMABLE_DETR_DIR, a checkout of it."""

import os
from pathlib import Path

import pytest
import torch

from parity.step_benchmark import PHASES, StepCase, format_step
from parity.step_peer import OfficialProcess, compare_steps, make_job

CHECKOUT = os.environ.get("OFFICIAL_DEFORMABLE_DETR_DIR")
WIDTH = "model.transformer.d_model=256"  # the official two-stage code knows no other
TINY = ("model=deformable_detr_tiny", WIDTH, "backbone=resnet50", "backbone.norm=frozen", "op=reference")
CASE = StepCase(TINY, 2, 64, 96, 3)
CPU = torch.device("cpu")


def test_a_job_says_the_same_in_the_official_words() -> None:
    job = make_job(StepCase((*TINY, "precision=bf16"), 2, 64, 96, 3), CPU)
    assert job["settings"]["with_box_refine"]
    assert job["settings"]["two_stage"]
    assert (job["settings"]["hidden_dim"], job["settings"]["num_queries"]) == (256, 50)
    assert (job["dtype"], job["allow_tf32"]) == (torch.bfloat16, True)
    assert job["images"].dtype == torch.float32
    assert [len(target["labels"]) for target in job["targets"]] == [3, 3]


@pytest.mark.parametrize(
    "overrides",
    [
        ("model=dino_4scale", "backbone=resnet50", "backbone.norm=frozen"),
        ("backbone=resnet18", "backbone.norm=frozen"),
        ("backbone=resnet50",),
    ],
)
def test_what_the_official_code_has_not_is_refused(overrides: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="overrides must choose a Deformable-DETR on ResNet-50"):
        make_job(StepCase(overrides, 2, 64, 96, 3), CPU)


def test_a_folder_without_the_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="checkout must be a folder with the official Deformable-DETR code, got"):
        OfficialProcess(CASE, CPU, tmp_path)


@pytest.mark.skipif(CHECKOUT is None, reason="OFFICIAL_DEFORMABLE_DETR_DIR names no official checkout")
def test_both_are_timed_in_turn() -> None:
    assert CHECKOUT is not None
    ours, theirs = compare_steps(CASE, CPU, Path(CHECKOUT), warmup=1, repeats=3, blocks=2)
    assert (ours["who"], theirs["who"]) == ("triton-detr", "official")
    assert min(theirs["phases_ms"].values()) > 0
    assert tuple(theirs["phases_ms"]) == PHASES
    assert theirs["times_ours"] == pytest.approx(theirs["step_ms"]["median"] / ours["step_ms"]["median"])
    assert format_step(theirs).startswith("official model=deformable_detr_tiny")
