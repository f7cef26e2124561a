"""What a person reads: one panel when a run starts, a line on how long it takes, and one panel when it ends."""

import math
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import msda_op
from models.callbacks import closes_log_window
from models.environment import relative_path
from models.resuming import STARTING, command_to_go_on

METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl")
FILES = {
    "checkpoints/best.ckpt": "weights of the best AP",
    "checkpoints/last.ckpt": "to resume from",
    "summary.json": "speed, memory, curves, AP",
    "per_class_ap.csv": "AP of every category",
    "predictions": "pictures beside the ground truth",
    "detections_val.json": "COCO results of the last evaluation",
    "plots/curves.png": "losses and AP over steps",
    "plots/precision_recall.png": "precision against recall",
    "plots/sampling.png": "where a query samples",
    "plots/worst.jpg": "images with the worst detections",
    "csv": "all logged values",
    "tensorboard": "the same for tensorboard --logdir",
    "manifest.json": "versions, hardware, commit, configuration",
}
"""What a run may leave in its folder, in the order in which a person wants it."""

ESTIMATE_AFTER_S = 20.0
"""Seconds after which the time to go is told where no log window has closed yet."""

RESUMING = (*STARTING, "trainer.max_epochs=", "trainer.max_steps=")
"""Words of a command that the one that trains on has anew."""


class RunPanels(Callback):
    """Prints what runs and where it goes; after the first log window, or some seconds, how long it will take; at the
    end what came out.

    Args:
        run_dir: The run's folder.
        backbone: Name of the backbone.
        op: Backend of the op as the configuration names it; what "auto" stands for is said beside it.
        precision: Lightning's name of the precision.
    """

    def __init__(self, run_dir: str, *, backbone: str, op: str, precision: str) -> None:
        self.run_dir = Path(run_dir)
        self.backbone = backbone
        self.op = op
        self.precision = precision
        self._began = 0.0
        self._first_step = 0
        self._first_batch_ended: float | None = None
        self._batches = 0
        self._has_estimated = False

    @rank_zero_only
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the first panel."""
        self._began, self._first_step = time.perf_counter(), trainer.global_step
        epochs = "" if trainer.max_epochs in (None, -1) else f"{_counted(trainer.max_epochs, 'epoch')}, "
        steps = trainer.estimated_stepping_batches
        rows = {
            "training": f"{_images(trainer.train_dataloader)} an epoch, {epochs}{_counted(steps, 'step')}",
            "batch": _batch(trainer, trainer.train_dataloader.batch_size),  # type: ignore[union-attr]  # set by now
            "validation": _images(trainer.val_dataloaders),
        }
        if trainer.global_step:
            rows["resumed"] = f"after {_counted(trainer.global_step, 'step')}"
        _print_panel(
            "training", {**self._describe(trainer, pl_module), **rows, "run folder": relative_path(self.run_dir)}
        )

    @rank_zero_only
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the panel of a run that only validates; otherwise stops an estimate that it would disturb."""
        self._first_batch_ended = None
        if trainer.state.fn == "validate":
            rows = {
                "validation": _images(trainer.val_dataloaders),
                "run folder": relative_path(self.run_dir),
            }
            _print_panel("validation", {**self._describe(trainer, pl_module), **rows})

    @rank_zero_only
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Says once how long the rest takes; the first batch, which compiles and starts workers, is not counted."""
        if self._has_estimated:
            return
        if self._first_batch_ended is None:
            self._first_batch_ended, self._batches = time.perf_counter(), 0
            return
        self._batches += 1
        elapsed_s = time.perf_counter() - self._first_batch_ended
        if closes_log_window(trainer, batch_idx) or elapsed_s > ESTIMATE_AFTER_S:
            self._has_estimated = True
            step_s = elapsed_s / self._batches * trainer.accumulate_grad_batches
            left = trainer.estimated_stepping_batches - trainer.global_step
            if math.isfinite(left):
                Console().print(
                    f"about {_duration(step_s * left)} of training to go ({1000 * step_s:.0f} ms a step; evaluations "
                    "come on top)"
                )

    @rank_zero_only
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the last panel: AP, files, and what to type next."""
        rows = {
            "steps": self._describe_steps(trainer),
            **_speed(trainer, pl_module),
            **_scores(trainer),
            **self._files(),
        }
        _print_panel("done", rows)
        for line in self._next_commands(trainer):
            Console().print(Text(line), soft_wrap=True)  # never broken, to be copied

    @rank_zero_only
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the last panel of a run that only validates."""
        if trainer.state.fn == "validate":
            _print_panel("done", {**_scores(trainer), **self._files()})

    def _describe(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, str]:
        """The rows on model, op and machine."""
        parameters = sum(parameter.numel() for parameter in pl_module.parameters())
        trainable = sum(parameter.numel() for parameter in pl_module.parameters() if parameter.requires_grad)
        device = pl_module.device
        name = (
            torch.cuda.get_device_name(device) if device.type == "cuda" else _counted(torch.get_num_threads(), "thread")
        )
        op = self.op
        if op == "auto":
            op = f"auto: {msda_op.choose_backend(device, torch.float32)}"
        return {
            "model": f"{type(pl_module.model).__name__} on {self.backbone}",
            "parameters": f"{parameters / 1e6:.1f} M, {trainable / 1e6:.1f} M of them train",
            "op": op,
            "precision": self.precision,
            "device": f"{trainer.world_size} x {device.type} ({name})",
        }

    def _describe_steps(self, trainer: Trainer) -> str:
        """How many steps, and of a resumed run how many of them here, in which time."""
        time_taken = _duration(time.perf_counter() - self._began)
        if self._first_step == 0:
            return f"{trainer.global_step} in {time_taken}"
        return f"{trainer.global_step}, {trainer.global_step - self._first_step} of them in {time_taken}"

    def _next_commands(self, trainer: Trainer) -> list[str]:
        """Commands that a person may want next."""
        last = self.run_dir / "checkpoints" / "last.ckpt"
        best = self.run_dir / "checkpoints" / "best.ckpt"
        shown = best if best.is_file() else last
        if not shown.is_file():
            return []
        epochs = trainer.max_epochs or -1
        more = f"trainer.max_epochs={2 * epochs}" if epochs > 0 else f"trainer.max_steps={2 * trainer.max_steps}"
        return [
            f"predict:   python -m scripts.predict IMAGES --model {relative_path(shown)}",
            f"export:    python -m scripts.export ckpt={relative_path(shown)} format=onnx out=detector",
            f"train on:  {command_to_go_on(last, RESUMING)} {more}",
        ]

    def _files(self) -> dict[str, str]:
        """The rows on what is in the run folder by now."""
        rows = {"run folder": relative_path(self.run_dir)}
        return rows | {f"  {name}": what for name, what in FILES.items() if (self.run_dir / name).exists()}


def _scores(trainer: Trainer) -> dict[str, str]:
    """The rows on AP, in percent: of the last evaluation, and the best one."""
    values = {name: float(trainer.callback_metrics.get(f"val/{name}", math.nan)) for name in METRICS}
    told = [f"{name}\N{NO-BREAK SPACE}{100 * value:.1f}" for name, value in values.items() if not math.isnan(value)]
    rows = {"AP": "  ".join(told)}
    if not rows["AP"]:
        return {}
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.best_model_score is not None and callback.monitor:
            rows["best AP"] = f"{100 * float(callback.best_model_score):.1f}"
    return rows


def _speed(trainer: Trainer, pl_module: LightningModule) -> dict[str, str]:
    """The rows on speed and memory."""
    rows = {}
    if "train/img_per_s" in trainer.callback_metrics:
        rows["speed"] = f"{float(trainer.callback_metrics['train/img_per_s']):.1f} images/s in the last log window"
    if pl_module.device.type == "cuda":
        rows["memory"] = f"{torch.cuda.max_memory_allocated(pl_module.device) / 2**30:.1f} GiB at most"
    return rows


def _batch(trainer: Trainer, size: int) -> str:
    """A step's images: of a process, processes, and batches that are accumulated."""
    factors = [_counted(size, "image")]
    factors += [f"{trainer.world_size} processes"] if trainer.world_size > 1 else []
    factors += [f"{trainer.accumulate_grad_batches} batches"] if trainer.accumulate_grad_batches > 1 else []
    total = size * trainer.world_size * trainer.accumulate_grad_batches
    return factors[0] if len(factors) == 1 else f"{' x '.join(factors)} = {total} images a step"


def _images(loader: Any) -> str:
    """How many images a loader has, 0 without one."""
    return _counted(0 if loader is None else len(loader.dataset), "image")


def _counted(number: float, noun: str) -> str:
    """A number of things."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _duration(seconds: float) -> str:
    """Words for a time: seconds, minutes, or hours and minutes."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def _print_panel(title: str, rows: dict[str, str]) -> None:
    """Prints names and values; long values wrap rather than being cut."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(value))
    Console().print(Panel(table, title=title, title_align="left", expand=False))
