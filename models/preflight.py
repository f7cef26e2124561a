"""Checks of a run's settings against each other and against the machine, before data is read."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_class
from lightning.pytorch.strategies import FSDPStrategy
from omegaconf import DictConfig

import msda_op
from models import checkpoints
from models.checkpoint_io import read_checkpoint
from models.gradient_averaging import GradientAveragingStrategy

MODES = ("train", "validate")
_NAMED = 5

logger = logging.getLogger(__name__)


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


def check_resumption(cfg: DictConfig, categories: Sequence[Mapping[str, Any]]) -> None:
    """Refuses to go on with a training that has ended, or on data of other categories.

    Args:
        cfg: The composed configuration.
        categories: One `{"id": ..., "name": ...}` a class of the data, in the order of the class indices.

    Raises:
        ValueError: With what to do; also if the checkpoint is damaged, would run code, or is not of a run.
    """
    if cfg.ckpt_path is None or cfg.mode != "train":
        return
    checkpoint = read_checkpoint(Path(cfg.ckpt_path), lazy=True)
    stored = checkpoint.get("categories", categories)
    if stored != categories:
        raise ValueError(
            f"the data must have the {len(stored)} categories of {cfg.ckpt_path}, got "
            f"{describe_difference(stored, categories)}; repeat the words of that run on its data (data=..., "
            "data.root=...), or train on this data from its weights with model.weights=..."
        )
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


def match_validation(cfg: DictConfig, categories: Sequence[Mapping[str, Any]]) -> list[int]:
    """Finds the classes of the weights that are validated among the categories of the data, see `match_categories`.

    Weights that do not say their categories, as published ones, are taken to have those of the data.

    Args:
        cfg: The composed configuration, with `ckpt_path` or `model.weights`.
        categories: One `{"id": ..., "name": ...}` a class of the data.

    Raises:
        ValueError: If the categories differ, or the file cannot be read.
    """
    path = cfg.ckpt_path or cfg.model.weights
    stored: Any = checkpoints.read_checkpoint(path).get("categories", categories)
    advice = "validate on the data of its training (data=..., data.root=...) or on data with categories of these names"
    return match_categories(stored, categories, source=path, advice=advice)


def match_categories(
    stored: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]], *, source: str, advice: str
) -> list[int]:
    """Finds the classes of a detector among the categories of data, by their names; says so if ids or order differ.

    Args:
        stored: One `{"id": ..., "name": ...}` a class of the detector, in the order of the class indices.
        found: The same of the data.
        source: What the detector was read from, for messages.
        advice: What to do if they do not match.

    Returns:
        For each class the place of its category in `found`.

    Raises:
        ValueError: If one has a name that the other has not, or a name stands for several categories.
    """
    if stored == found:
        return list(range(len(stored)))
    names, names_stored = ([category["name"] for category in each] for each in (found, stored))
    if sorted(names) != sorted(names_stored) or len(set(names)) < len(names):
        raise ValueError(
            f"the data must have the {len(stored)} categories of {source}, got {describe_difference(stored, found)}; "
            f"{advice}"
        )
    logger.warning("categories are matched to the classes of %s by name, since their ids or order differ", source)
    return [names.index(name) for name in names_stored]


def describe_difference(stored: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> str:
    """Says in words how categories that were found differ from those that were stored."""
    names, names_stored = ([category["name"] for category in each] for each in (found, stored))
    lacking = [name for name in names_stored if name not in names]
    new = [name for name in names if name not in names_stored]
    repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    ids = {category["name"]: category["id"] for category in stored}
    moved = [
        f"{category['name']} with id {category['id']} instead of {ids[category['name']]}"
        for category in found
        if category["name"] in ids and category["id"] != ids[category["name"]]
    ]
    kinds = {"without": lacking, "with the new": new, "with the repeated": repeated}
    said = [f"{words} {_shorten(which)}" for words, which in kinds.items() if which]
    return f"{len(found)} {', '.join(said) or _shorten(moved) or 'in another order'}"


def _shorten(words: Sequence[str]) -> str:
    rest = len(words) - _NAMED
    return ", ".join(words[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


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
    if cfg.mode == "train" and cfg.backbone.get("norm") == "batch" and not _is_alone(cfg.trainer):
        _check_shared_statistics(cfg.trainer.strategy)
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
    strategy, is_alone = cfg.trainer.strategy, _is_alone(cfg.trainer)
    averages = isinstance(strategy, DictConfig) and issubclass(get_class(strategy._target_), GradientAveragingStrategy)
    if not averages and not (is_alone and strategy == "auto"):
        raise ValueError(
            "cuda_graphs must be false unless one process trains or trainer=ddp_graphs, got true with trainer.devices="
            f"{cfg.trainer.devices}: other strategies do not exchange the gradients of a graph; set cuda_graphs=false, "
            "trainer=ddp_graphs or trainer=gpu"
        )
    if not is_alone and cfg.backbone.get("norm") == "sync":
        raise ValueError(
            "backbone.norm must not be sync with cuda_graphs=true on several processes, got sync: a capture would "
            "wait for statistics of processes that capture nothing then; use backbone.norm=frozen, group or batch"
        )


def _check_shared_statistics(strategy: str | DictConfig) -> None:
    """Refuses FSDP, which leaves buffers to each process; DDP hands out those of rank 0 before every forward pass."""
    if isinstance(strategy, str):
        is_sharded = strategy.startswith("fsdp")
    else:
        is_sharded = issubclass(get_class(strategy._target_), FSDPStrategy)
    if is_sharded:
        raise ValueError(
            "backbone.norm must be frozen, sync or group with trainer=fsdp, got batch: each process would evaluate by "
            "statistics of its own, and those of one would be saved; use backbone.norm=sync"
        )


def _is_alone(trainer: DictConfig) -> bool:
    """Whether one process trains."""
    devices = trainer.devices if isinstance(trainer.devices, int) else len(trainer.devices)
    return devices == 1 and trainer.num_nodes == 1
