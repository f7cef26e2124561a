"""Ranges of the numbers that a person types, checked before anything is built."""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from models.checkpoint_io import read_checkpoint


@dataclass(frozen=True)
class Range:
    """What a setting may be; null passes only where `optional`.

    Args:
        kind: int, or float, which takes integers too.
        minimum: least value.
        exclusive: whether the least value itself is too small.
        optional: whether null is allowed.
    """

    kind: type[int] | type[float]
    minimum: float
    exclusive: bool = False
    optional: bool = False

    def holds(self, value: object) -> bool:
        """Whether a value is allowed."""
        if value is None:
            return self.optional
        fits = isinstance(value, int if self.kind is int else int | float) and not isinstance(value, bool)
        return fits and (value > self.minimum if self.exclusive else value >= self.minimum)  # type: ignore[operator]

    def __str__(self) -> str:
        noun = "an integer" if self.kind is int else "a number"
        bound = f"above {self.minimum}" if self.exclusive else f"of at least {self.minimum}"
        return f"{noun} {bound}{' or null' if self.optional else ''}"


RANGES = {
    "seed": Range(int, 0),
    "data.batch_size": Range(int, 1),
    "data.eval_batch_size": Range(int, 1),
    "data.num_workers": Range(int, 0),
    "data.size_divisor": Range(int, 1),
    "data.repeat_train": Range(int, 1),
    "data.limit_train": Range(int, 1, optional=True),
    "data.limit_val": Range(int, 1, optional=True),
    "data.fraction": Range(float, 0, exclusive=True),
    "data.eval_transform.size": Range(int, 1),
    "data.eval_transform.max_size": Range(int, 1),
    "detector.top_k": Range(int, 1),
    "model.transformer.num_queries": Range(int, 1),
    "optimizer.lr": Range(float, 0, exclusive=True),
    "optimizer.backbone_lr": Range(float, 0),
    "optimizer.weight_decay": Range(float, 0),
    "trainer.accumulate_grad_batches": Range(int, 1),
    "trainer.check_val_every_n_epoch": Range(int, 1, optional=True),
    "trainer.gradient_clip_val": Range(float, 0, optional=True),
    "trainer.log_every_n_steps": Range(int, 1),
    "trainer.max_epochs": Range(int, -1, optional=True),
    "trainer.max_steps": Range(int, -1),
    "trainer.num_nodes": Range(int, 1),
}


def check_numbers(cfg: DictConfig) -> None:
    """Refuses numbers out of their range, and a training without an end.

    Args:
        cfg: The composed configuration of `configs/train.yaml`.

    Raises:
        ValueError: With the setting, its value and what to do.
    """
    for key, allowed in RANGES.items():
        value = OmegaConf.select(cfg, key)
        if not allowed.holds(value):
            raise ValueError(f"{key} must be {allowed}, got {value}; correct the override")
    if cfg.trainer.max_epochs in (None, -1) and cfg.trainer.max_steps == -1:
        raise ValueError(
            f"trainer.max_epochs must be set unless trainer.max_steps is, got {cfg.trainer.max_epochs} and -1; the "
            "learning-rate schedule needs to know where the training ends"
        )


SHAPING = (
    "model._target_",
    "model.box_refine",
    "model.transformer.d_model",
    "model.transformer.num_heads",
    "model.transformer.num_encoder_layers",
    "model.transformer.num_decoder_layers",
    "model.transformer.num_feature_levels",
    "model.transformer.num_queries",
    "model.transformer.dim_feedforward",
    "model.transformer.two_stage",
    "backbone.name",
    "backbone.norm",
    "optimizer.slow_modules",
)
"""Settings that decide which weights and groups of the optimiser there are."""


def check_resumed_settings(cfg: DictConfig) -> None:
    """Refuses to resume a run with another network or other groups of its optimiser.

    Args:
        cfg: The composed configuration; its checkpoint, if any, exists.

    Raises:
        ValueError: With the first setting that differs and both values; also if the checkpoint cannot be read.
    """
    if cfg.ckpt_path is None:
        return
    stored = OmegaConf.create(read_checkpoint(Path(cfg.ckpt_path), lazy=True).get("config", {}))
    for key in SHAPING if stored else ():
        before, now = OmegaConf.select(stored, key), OmegaConf.select(cfg, key)
        if before != now:
            raise ValueError(
                f"{key} must be {before} as in {cfg.ckpt_path}, got {now}; repeat the settings of that run, or start "
                "from its weights with model.weights=..."
            )
