"""The official Deformable-DETR beside ours: the same images and targets, blocks of steps in turn."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from models.backbone import DILATABLE_RESNETS
from models.normalization import ImageNormalizer
from parity.step_benchmark import Samples, StepCase, SyntheticStep, compose_case, describe_samples, draw_batch
from parity.training import autocast_dtype

RUNNER = Path(__file__).with_name("official_step.py")
WHO = "official"
_OURS = "triton-detr"


class Timed(Protocol):
    """What takes steps."""

    def time(self, repeats: int) -> Samples:
        """Times so many steps."""


class OfficialProcess:
    """The official code in a process of its own, which lives as long as this context.

    Args:
        case: what to train on; precision and variant of the detector are those of its overrides.
        device: where.
        checkout: folder of the official code, fundamentalvision/Deformable-DETR.

    Raises:
        ValueError: if the folder does not hold the code, or the detector is no Deformable-DETR.
    """

    def __init__(self, case: StepCase, device: torch.device, checkout: Path) -> None:
        if not (checkout / "models" / "deformable_detr.py").is_file():
            raise ValueError(
                f"checkout must be a folder with the official Deformable-DETR code, got {checkout}; clone it there"
            )
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / "job.pt"
        torch.save(make_job(case, device), path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", RUNNER, checkout, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None,
            text=True,
        )
        self.peak_gib: float | None = None

    def __enter__(self) -> "OfficialProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()

    def time(self, repeats: int) -> Samples:
        """Times steps.

        Raises:
            RuntimeError: if the process has ended; its error stands on the standard error.
        """
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        print(repeats, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the official code must answer, got the end of its process; see its error above")
        answer = json.loads(line)
        self.peak_gib = answer["peak_gib"]
        return answer["walls_ms"], answer["phases_ms"]


def compare_steps(
    case: StepCase, device: torch.device, checkout: Path, warmup: int, repeats: int, blocks: int
) -> list[dict[str, Any]]:
    """Times our steps and the official ones in turn.

    Args:
        case: what both train on.
        device: where.
        checkout: see `OfficialProcess`.
        warmup: steps of each before.
        repeats: measured steps of each.
        blocks: turns that they are spread over, at most `repeats`.

    Returns:
        A row for ours and one for theirs, see `describe_samples`; theirs with `times_ours`, the ratio of the medians.
    """
    with OfficialProcess(case, device, checkout) as official:
        contenders: dict[str, Timed] = {_OURS: SyntheticStep(case, device), WHO: official}
        samples: dict[str, Samples] = {}
        for who, contender in contenders.items():
            contender.time(warmup)
            samples[who] = ([], [])
        for block in range(blocks):
            steps = (repeats * (block + 1)) // blocks - (repeats * block) // blocks
            for who, contender in contenders.items():
                walls, phases = contender.time(steps)
                samples[who][0].extend(walls)
                samples[who][1].extend(phases)
        ours, theirs = (describe_samples(case, who, samples[who]) for who in contenders)
        if official.peak_gib is not None:
            theirs["peak_gib"] = official.peak_gib
    theirs["times_ours"] = theirs["step_ms"]["median"] / ours["step_ms"]["median"]
    return [ours, theirs]


def make_job(case: StepCase, device: torch.device) -> dict[str, Any]:
    """Returns what `official_step.py` is to train: the case in the official code's words.

    Raises:
        ValueError: if the detector is no Deformable-DETR, or its backbone no ResNet-50 or -101 with frozen norms, which
            is what the official code has.
    """
    config = compose_case(case)
    has_backbone = config.backbone.name in DILATABLE_RESNETS and config.backbone.norm == "frozen"
    if "box_refine" not in config.model or not has_backbone:
        raise ValueError(
            "overrides must choose a Deformable-DETR on ResNet-50 or -101 with backbone.norm=frozen to be compared "
            f"with the official code, got {' '.join(case.overrides)}; correct them"
        )
    network = config.model.transformer
    images, padding_mask, targets = draw_batch(case)
    normalizer = ImageNormalizer(mean=config.normalizer.mean, std=config.normalizer.std)
    parts = zip(targets.labels.split(targets.counts), targets.boxes_cxcywh.split(targets.counts), strict=True)
    return {
        "settings": {
            "backbone": config.backbone.name,
            "with_box_refine": config.model.box_refine,
            "two_stage": network.two_stage,
            "enc_layers": network.num_encoder_layers,
            "dec_layers": network.num_decoder_layers,
            "num_queries": network.num_queries,
            "num_feature_levels": network.num_feature_levels,
            "dim_feedforward": network.dim_feedforward,
            "hidden_dim": network.d_model,
            "nheads": network.num_heads,
            "enc_n_points": network.num_encoder_points,
            "dec_n_points": network.num_decoder_points,
            "dropout": network.dropout,
        },
        "device": str(device),
        "dtype": autocast_dtype(config),
        "allow_tf32": config.precision.allow_tf32,
        "images": normalizer(images, padding_mask).images,
        "padding_mask": padding_mask,
        "targets": [{"labels": labels, "boxes": boxes_cxcywh} for labels, boxes_cxcywh in parts],
    }
