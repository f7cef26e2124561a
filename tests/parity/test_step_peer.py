"""Other code beside ours; what runs the official one needs OFFICIAL_DEFORMABLE_DETR_DIR, a checkout of it."""

import os
import re
from pathlib import Path

import pytest
import torch

from msda_op.hugging_face import MultiScaleDeformableAttention
from parity.hugging_face_step import HuggingFaceStep
from parity.step_benchmark import PHASES, StepCase, format_step
from parity.step_peer import HUGGING_FACE, OFFICIAL, PEERS, SWAPPED, compare_steps, make_job, start_peers
from parity.step_process import Stepper

CHECKOUT = os.environ.get("OFFICIAL_DEFORMABLE_DETR_DIR")
WIDTH = "model.transformer.d_model=256"  # the official two-stage code knows no other
TINY = ("model=deformable_detr_tiny", WIDTH, "backbone=resnet50", "backbone.norm=frozen", "op=reference")
CASE = StepCase(TINY, 2, 64, 96, 3)
CPU = torch.device("cpu")


def test_a_job_says_the_same_in_the_official_words() -> None:
    job = make_job(OFFICIAL, StepCase((*TINY, "precision=bf16"), 2, 64, 96, 3), CPU)
    assert job["settings"]["with_box_refine"]
    assert job["settings"]["two_stage"]
    assert (job["settings"]["hidden_dim"], job["settings"]["num_queries"]) == (256, 50)
    assert (job["dtype"], job["allow_tf32"]) == (torch.bfloat16, True)
    assert job["images"].dtype == torch.float32
    assert [len(target["labels"]) for target in job["targets"]] == [3, 3]


def test_a_job_says_the_same_in_the_words_of_transformers() -> None:
    job, official = (make_job(who, CASE, CPU) for who in (HUGGING_FACE, OFFICIAL))
    settings = job["settings"]
    assert settings["backbone_config"] == {"depths": [3, 4, 6, 3], "out_features": ["stage2", "stage3", "stage4"]}
    assert (settings["d_model"], settings["num_labels"], settings["two_stage_num_proposals"]) == (256, 80, 50)
    assert torch.equal(job["images"], official["images"])


@pytest.mark.parametrize("who", PEERS)
@pytest.mark.parametrize(
    "overrides",
    [
        ("model=dino_4scale", "backbone=resnet50", "backbone.norm=frozen"),
        ("backbone=resnet18", "backbone.norm=frozen"),
        ("backbone=resnet50",),
    ],
)
def test_what_the_others_have_not_is_refused(overrides: tuple[str, ...], who: str) -> None:
    with pytest.raises(ValueError, match="overrides must choose a Deformable-DETR on ResNet-50"):
        make_job(who, StepCase(overrides, 2, 64, 96, 3), CPU)


def test_a_folder_without_the_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="checkout must be a folder with the official Deformable-DETR code, got"):
        start_peers(OFFICIAL, CASE, CPU, tmp_path)


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parity.step_peer.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--against hf must find the package transformers, got none; install it"):
        start_peers(HUGGING_FACE, CASE, CPU, None)


def check_rows(names: list[str], checkout: Path | None, overrides: tuple[str, ...]) -> None:
    case = StepCase((*CASE.overrides, *overrides, "compile=false"), 2, 64, 96, 3)
    peers = start_peers(names[0], case, CPU, checkout)
    ours, *others = compare_steps(peers, case, CPU, warmup=1, repeats=3, blocks=2)
    assert [row["who"] for row in (ours, *others)] == ["triton-detr", *names]
    assert ours["overrides"] == list(case.overrides)
    for theirs in others:
        assert theirs["overrides"] == [*(word for word in TINY if word != "op=reference"), *overrides]
        assert min(theirs["phases_ms"].values()) > 0
        assert tuple(theirs["phases_ms"]) == PHASES
        assert sum(theirs["phases_ms"].values()) <= 1.5 * theirs["step_ms"]["p80"]
        assert theirs["times_ours"] == pytest.approx(theirs["step_ms"]["median"] / ours["step_ms"]["median"])
        assert format_step(theirs).startswith(f"{theirs['who']} model=deformable_detr_tiny")


@pytest.mark.skipif(CHECKOUT is None, reason="OFFICIAL_DEFORMABLE_DETR_DIR names no official checkout")
def test_ours_and_the_official_code_are_timed_in_turn() -> None:
    assert CHECKOUT is not None
    check_rows([OFFICIAL], Path(CHECKOUT), ())


def test_ours_and_transformers_are_timed_in_turn() -> None:
    pytest.importorskip("transformers")
    check_rows([HUGGING_FACE, SWAPPED], None, ("precision=bf16",))


def test_transformers_with_our_op_takes_the_same_steps() -> None:
    pytest.importorskip("transformers")
    job, losses = make_job(HUGGING_FACE, StepCase((*TINY, "model.transformer.dropout=0"), 2, 64, 96, 3), CPU), []
    for swapped in (False, True):
        torch.manual_seed(0)
        trained = HuggingFaceStep(job, swapped)
        calls_ours = any(isinstance(module, MultiScaleDeformableAttention) for module in trained.model.modules())
        assert calls_ours == swapped
        Stepper(trained, {"device": "cpu", "dtype": None}).run()
        losses.append(trained.compute_loss(lambda: None).item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_transformers_learns_with_its_own_loss_and_published_stages() -> None:
    pytest.importorskip("transformers")
    one_stage = ("model.box_refine=false", "model.transformer.two_stage=false")
    trained = HuggingFaceStep(make_job(HUGGING_FACE, StepCase((*TINY, *one_stage), 2, 64, 96, 3), CPU), swapped=False)
    stepper = Stepper(trained, {"device": "cpu", "dtype": None})
    losses = []
    for _ in range(3):
        done: list[bool] = []
        losses.append(trained.compute_loss(lambda done=done: done.append(True)).item())
        assert done == [True]
        stepper.run()
    assert losses[-1] < losses[0]
    learning = {name for name, parameter in trained.model.named_parameters() if parameter.requires_grad}
    stages = {int(part) for name in learning for part in re.findall(r"encoder\.stages\.(\d)\.", name)}
    assert stages == {1, 2, 3}
    assert not any("embedder" in name for name in learning)
