"""Another code base beside ours: the same images and targets, blocks of steps in turn."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from omegaconf import DictConfig

from models.backbone import DILATABLE_RESNETS
from models.environment import child_variables
from models.normalization import ImageNormalizer
from parity.hugging_face_step import SWAP
from parity.step_benchmark import Samples, StepCase, SyntheticStep, compose_case, describe_samples, draw_batch
from parity.step_memory import measure_peak
from parity.training import autocast_dtype

OFFICIAL = "official"
HUGGING_FACE = "hf"
SWAPPED = "hf with msda_op"
PEERS = (OFFICIAL, HUGGING_FACE)
_OURS = "triton-detr"
_OURS_ALONE = ("op=", "op.", "cuda_graphs=", "compile=", "model.transformer.fused_norm=", "backbone.f")
"""How words of `configs/train.yaml` begin that say nothing to other code: how ours is made fast."""
_DEPTHS = {"resnet50": [3, 4, 6, 3], "resnet101": [3, 4, 23, 3]}


class Timed(Protocol):
    """What takes steps."""

    def time(self, repeats: int) -> Samples:
        """Times so many steps."""


class PeerProcess:
    """Another code base in a process of its own, which lives as long as this context.

    Args:
        who: name of the code, as rows have it.
        runner: module of this package that trains it.
        job: see `make_job`.
        arguments: further arguments of the runner.
    """

    def __init__(self, who: str, runner: str, job: dict[str, Any], arguments: Sequence[str | Path] = ()) -> None:
        self.who = who
        self.peak_gib: float | None = None
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / "job.pt"
        torch.save(job, path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"parity.{runner}", path, *arguments],
            env=child_variables(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None,
            text=True,
        )

    def __enter__(self) -> "PeerProcess":
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
            raise RuntimeError(f"the code of {self.who} must answer, got the end of its process; see its error above")
        answer = json.loads(line)
        self.peak_gib = answer["peak_gib"]
        return answer["walls_ms"], answer["phases_ms"]


def start_peers(who: str, case: StepCase, device: torch.device, checkout: Path | None) -> list[PeerProcess]:
    """Starts the processes of another code base: of transformers two, the second with its op swapped for ours.

    Args:
        who: one of `PEERS`.
        case: what to train on; precision and variant of the detector are those of its overrides.
        device: where.
        checkout: folder of the official code, fundamentalvision/Deformable-DETR; not read for the others.

    Raises:
        ValueError: if the folder does not hold the code, the package is not installed, or the detector is no
            Deformable-DETR.
    """
    if who == HUGGING_FACE:
        if find_spec("transformers") is None:
            raise ValueError("--against hf must find the package transformers, got none; install it with pip")
        job = make_job(who, case, device)
        return [
            PeerProcess(HUGGING_FACE, "hugging_face_step", job),
            PeerProcess(SWAPPED, "hugging_face_step", job, [SWAP]),
        ]
    if checkout is None or not (checkout / "models" / "deformable_detr.py").is_file():
        raise ValueError(
            f"checkout must be a folder with the official Deformable-DETR code, got {checkout}; clone it there"
        )
    return [PeerProcess(who, "official_step", make_job(who, case, device), [checkout])]


def compare_steps(
    peers: Sequence[PeerProcess], case: StepCase, device: torch.device, warmup: int, repeats: int, blocks: int
) -> list[dict[str, Any]]:
    """Times our steps and those of other code in turn, and ends its processes.

    Args:
        peers: the other code, with this case.
        case: what all train on.
        device: where.
        warmup: steps of each before.
        repeats: measured steps of each.
        blocks: turns that they are spread over, at most `repeats`.

    Returns:
        A row for ours and one for each of theirs, see `describe_samples`, all with `peak_gib` on a GPU; theirs in the
        words of the case that count for it and with `times_ours`, the ratio of the medians.
    """
    step = SyntheticStep(case, device)
    with ExitStack() as processes:
        contenders: dict[str, Timed] = {_OURS: step}
        contenders |= {peer.who: processes.enter_context(peer) for peer in peers}
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
        words = tuple(word for word in case.overrides if not word.startswith(_OURS_ALONE))
        rows = [describe_samples(case, _OURS, samples[_OURS])]
        if device.type == "cuda":
            rows[0] |= measure_peak(step)
        for peer in peers:
            row = describe_samples(replace(case, overrides=words), peer.who, samples[peer.who])
            row["times_ours"] = row["step_ms"]["median"] / rows[0]["step_ms"]["median"]
            rows.append(row if peer.peak_gib is None else row | {"peak_gib": peer.peak_gib})
    return rows


def make_job(who: str, case: StepCase, device: torch.device) -> dict[str, Any]:
    """Returns what the process of a code base is to train: the case in its words.

    Returns:
        `settings` (see its runner), `device`, `dtype` of autocast or None, `allow_tf32`, `images` float32 [B, 3, H, W],
        `padding_mask` bool [B, H, W], and `targets`, a dict with `labels` and `boxes` (cx, cy, w, h) for each image.

    Raises:
        ValueError: if the detector is no Deformable-DETR, or its backbone no ResNet-50 or -101 with frozen norms, which
            is what the others have.
    """
    config = compose_case(case)
    has_backbone = config.backbone.name in DILATABLE_RESNETS and config.backbone.norm == "frozen"
    if "box_refine" not in config.model or not has_backbone:
        raise ValueError(
            "overrides must choose a Deformable-DETR on ResNet-50 or -101 with backbone.norm=frozen to be compared "
            f"with the official code or transformers, got {' '.join(case.overrides)}; correct them"
        )
    images, padding_mask, targets = draw_batch(case)
    normalizer = ImageNormalizer(mean=config.normalizer.mean, std=config.normalizer.std)
    parts = zip(targets.labels.split(targets.counts), targets.boxes_cxcywh.split(targets.counts), strict=True)
    return {
        "settings": _official_settings(config) if who == OFFICIAL else _hugging_face_settings(config),
        "device": str(device),
        "dtype": autocast_dtype(config),
        "allow_tf32": config.precision.allow_tf32,
        "images": normalizer(images, padding_mask).images,
        "padding_mask": padding_mask,
        "targets": [{"labels": labels, "boxes": boxes_cxcywh} for labels, boxes_cxcywh in parts],
    }


def _official_settings(config: DictConfig) -> dict[str, Any]:
    network = config.model.transformer
    return {
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
    }


def _hugging_face_settings(config: DictConfig) -> dict[str, Any]:
    network = config.model.transformer
    stages = ["stage2", "stage3", "stage4"][-min(3, network.num_feature_levels) :]
    return {
        "backbone_config": {"depths": _DEPTHS[config.backbone.name], "out_features": stages},
        "num_labels": config.num_classes,
        "auxiliary_loss": True,
        "with_box_refine": config.model.box_refine,
        "two_stage": network.two_stage,
        "encoder_layers": network.num_encoder_layers,
        "decoder_layers": network.num_decoder_layers,
        "num_queries": network.num_queries,
        "two_stage_num_proposals": network.num_queries,
        "num_feature_levels": network.num_feature_levels,
        "encoder_ffn_dim": network.dim_feedforward,
        "decoder_ffn_dim": network.dim_feedforward,
        "d_model": network.d_model,
        "encoder_attention_heads": network.num_heads,
        "decoder_attention_heads": network.num_heads,
        "encoder_n_points": network.num_encoder_points,
        "decoder_n_points": network.num_decoder_points,
        "dropout": network.dropout,
    }
