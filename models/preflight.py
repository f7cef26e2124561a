"""Checks of a run's settings against each other and against the machine, before data is read."""

from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

import msda_op
from models.checkpoint_io import read_checkpoint

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


def resolve_checkpoint(cfg: DictConfig) -> None:
    """Replaces `ckpt_path=auto` by the last checkpoint of the run folder, or by none where there is none yet."""
    if cfg.ckpt_path == "auto":
        last = Path(cfg.run_dir) / "checkpoints" / "last.ckpt"
        cfg.ckpt_path = str(last) if last.is_file() else None


def check_resumption(cfg: DictConfig, categories: list[dict[str, Any]]) -> None:
    """Refuses to resume a run that has ended, or one of other categories.

    Args:
        cfg: The composed configuration.
        categories: One `{"id": ..., "name": ...}` a class of the data, in the order of the class indices.

    Raises:
        ValueError: With what to do; also if the checkpoint is damaged, would run code, or is not of a run.
    """
    if cfg.ckpt_path is None:
        return
    checkpoint = read_checkpoint(Path(cfg.ckpt_path), lazy=True)
    stored = checkpoint.get("categories", categories)
    if stored != categories:
        raise ValueError(
            f"data must have the categories of the checkpoint, got {len(categories)} where {cfg.ckpt_path} has "
            f"{len(stored)}, or other ids or names; start from its weights with model.weights=..."
        )
    if cfg.mode != "train":
        return
    epochs, steps, limits = checkpoint["epoch"], checkpoint["global_step"], cfg.trainer
    epochs += checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"]
    if limits.max_steps == -1 and limits.max_epochs not in (None, -1) and epochs >= limits.max_epochs:
        raise ValueError(
            f"trainer.max_epochs must be above the {epochs} epochs of {cfg.ckpt_path}, got {limits.max_epochs}: this "
            "run has ended; raise it to train on"
        )
    if limits.max_steps != -1 and steps >= limits.max_steps:
        raise ValueError(
            f"trainer.max_steps must be above the {steps} steps of {cfg.ckpt_path}, got {limits.max_steps}: this run "
            "has ended; raise it to train on"
        )


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
    if cfg.cuda_graphs:
        _check_cuda_graphs(cfg, device)
    if cfg.compile and cfg.deterministic:
        raise ValueError(
            "compile must be false with deterministic=true, got true: which of several kernels sums up is decided by "
            "timing them; set one of them to false"
        )
    untrained = cfg.backbone.weights == "none" and cfg.ckpt_path is None and cfg.model.weights is None
    if "norm" in cfg.backbone and cfg.backbone.norm == "frozen" and untrained:
        raise ValueError(
            "backbone.norm=frozen must come with trained statistics, got backbone.weights=none; "
            "use backbone.norm=batch, or backbone.weights=imagenet or a path"
        )


def _check_cuda_graphs(cfg: DictConfig, device: str) -> None:
    if device != "cuda":
        raise ValueError("cuda_graphs must be false without an NVIDIA GPU, got true; set cuda_graphs=false")
    if cfg.model.transformer.gradient_checkpointing:
        raise ValueError(
            "cuda_graphs must be false with model.transformer.gradient_checkpointing=true, got true: what is computed "
            "twice draws its random numbers anew; set one of them to false"
        )
    devices = cfg.trainer.devices
    num_devices = devices if isinstance(devices, int) else len(devices)
    if num_devices != 1 or cfg.trainer.num_nodes != 1 or cfg.trainer.strategy != "auto":
        raise ValueError(
            f"cuda_graphs must be false unless one process trains, got true with trainer.devices={devices}: gradients "
            "of a graph are not exchanged between processes; set cuda_graphs=false or trainer=gpu"
        )
