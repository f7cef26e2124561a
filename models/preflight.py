"""Checks of a run's settings against each other and against the machine, before data is read."""

from pathlib import Path

import torch
from omegaconf import DictConfig

import msda_op

MODES = ("train", "validate")


def device_type(accelerator: str) -> str:
    """Returns the torch device type ("cuda" or "cpu") that a Trainer with this `accelerator` runs on."""
    if accelerator == "cpu":
        return "cpu"
    if accelerator == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if accelerator in ("gpu", "cuda"):
        if not torch.cuda.is_available():
            raise ValueError(
                f"trainer.accelerator must fit the machine, got {accelerator} without a GPU; use trainer=cpu"
            )
        return "cuda"
    raise ValueError(f"trainer.accelerator must be one of auto, cpu, gpu, cuda, got {accelerator}")


def check_run(cfg: DictConfig) -> None:
    """Refuses settings that cannot work together.

    Args:
        cfg: The composed configuration of `configs/train.yaml`.

    Raises:
        ValueError: With the setting, its value and what to do.
        FileNotFoundError: If a checkpoint that is named does not exist.
    """
    if cfg.mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {cfg.mode}")
    if cfg.mode == "validate" and cfg.ckpt_path is None and cfg.model.weights is None:
        raise ValueError("mode=validate must have weights, got none; set ckpt_path=... or model.weights=...")
    if cfg.ckpt_path is not None and cfg.model.weights is not None:
        raise ValueError("ckpt_path must not be combined with model.weights; the checkpoint brings its own weights")
    for key, path in (("ckpt_path", cfg.ckpt_path), ("model.weights", cfg.model.weights)):
        if path is not None and not Path(path).is_file():
            raise FileNotFoundError(f"{key} must name a file, got {path}")
    device = device_type(cfg.trainer.accelerator)
    if device == "cpu" and cfg.precision.lightning == "16-mixed":
        raise ValueError("precision=fp16 must run on a GPU, got a CPU; use precision=bf16 or precision=fp32")
    try:
        msda_op.require_backend(cfg.op.backend, device)
    except RuntimeError as error:
        raise ValueError(f"op={cfg.op.backend} cannot run here: {error}") from error
    untrained = cfg.backbone.weights == "none" and cfg.ckpt_path is None and cfg.model.weights is None
    if "norm" in cfg.backbone and cfg.backbone.norm == "frozen" and untrained:
        raise ValueError(
            "backbone.norm=frozen must come with trained statistics, got backbone.weights=none; "
            "use backbone.norm=batch, or backbone.weights=imagenet or a path"
        )
