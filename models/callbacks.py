"""Lightning callbacks about the run itself: speed, progress bar, manifest and summary."""

import json
import logging
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.utilities import rank_zero_only

from models.environment import cut_folders, describe_environment

logger = logging.getLogger(__name__)


def closes_log_window(trainer: Trainer, batch_idx: int) -> bool:
    """Whether values are logged after this batch: every `log_every_n_steps` batches, and after an epoch's last."""
    window: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by Lightning's logger connector
    return (batch_idx + 1) % window == 0 or trainer.is_last_batch


class Throughput(Callback):
    """Logs `train/img_per_s` over all processes (data loading counts, evaluation does not) and the peak GPU memory.

    The clock is the host's. A step waits for the device once (the matcher's copy), so the host cannot run more than
    one step ahead and no synchronisation is added here.
    """

    def __init__(self) -> None:
        self._images = 0
        self._seconds = 0.0
        self._since: float | None = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        self._since = time.perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops the clock."""
        self._stop()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock again if training goes on."""
        if trainer.training or trainer.state.fn == "fit":
            self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: dict[str, Any], batch_idx: int
    ) -> None:
        """Counts the batch's images; logs and starts a new window every `log_every_n_steps` batches."""
        self._images += batch["images"].shape[0] * trainer.world_size
        if not closes_log_window(trainer, batch_idx):
            return
        self._stop()
        pl_module.log("train/img_per_s", self._images / max(self._seconds, 1e-9), prog_bar=True)
        if pl_module.device.type == "cuda":
            pl_module.log("train/peak_memory_mib", torch.cuda.max_memory_allocated(pl_module.device) / 2**20)
        self._images, self._seconds, self._since = 0, 0.0, time.perf_counter()

    def _stop(self) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
        self._since = None


class LoaderHint(Callback):
    """Warns once if the training waits for data, with what to do about it.

    Args:
        num_workers: Loader processes of one training process.
        largest_share: Share of the time between two steps, 0..1, above which the loader is the bottleneck.
    """

    def __init__(self, *, num_workers: int, largest_share: float) -> None:
        self.num_workers = num_workers
        self.largest_share = largest_share
        self._waited = 0.0
        self._window_began: float | None = None
        self._batch_ended: float | None = None
        self._has_warned = False

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins anew: an epoch's first batch is waited for while its workers start."""
        self._window_began = self._batch_ended = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins anew after an evaluation."""
        self._window_began = self._batch_ended = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Counts the time since the batch before."""
        if self._batch_ended is not None:
            self._waited += time.perf_counter() - self._batch_ended

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Judges a window of `log_every_n_steps` batches."""
        now = time.perf_counter()
        if closes_log_window(trainer, batch_idx) or self._window_began is None:
            elapsed = 0.0 if self._window_began is None else now - self._window_began
            if self._waited > self.largest_share * elapsed > 0 and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%.0f %% of the training time is spent waiting for data with data.num_workers=%d: raise it, or see "
                    "what limits the loader with python -m scripts.benchmark loader",
                    *(100 * self._waited / elapsed, self.num_workers),
                )
            self._waited, self._window_began = 0.0, now
        self._batch_ended = now


class ProgressBar(RichProgressBar):
    """Rich progress bar that reads device values where they are logged only.

    Lightning's own bar reads every metric after each step, which makes the host wait for the device.
    """

    def __init__(self, refresh_rate: int) -> None:
        super().__init__(refresh_rate=refresh_rate)
        self._shown: dict[str, int | str | float | dict[str, float]] = {}

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Returns the values beside the bar, without their `train/` and without Lightning's version number."""
        if not self._shown or closes_log_window(trainer, trainer.fit_loop.batch_idx):
            metrics = super().get_metrics(trainer, pl_module)
            metrics.pop("v_num", None)
            self._shown = {name.removeprefix("train/"): value for name, value in metrics.items()}
        return self._shown


class RunManifest(Callback):
    """Writes `manifest.json` into the run folder, and config and categories into every checkpoint.

    Args:
        run_dir: The run's folder.
        config: The resolved configuration.
        categories: One `{"id": ..., "name": ...}` a class, in the order of the class indices.
    """

    def __init__(self, run_dir: str, config: dict[str, Any], categories: list[dict[str, Any]]) -> None:
        self.run_dir = Path(run_dir)
        self.config = config
        self.categories = categories

    @rank_zero_only
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Writes the manifest before the first step, so that a run that dies has one too."""
        parameters = sum(parameter.numel() for parameter in pl_module.parameters())
        trainable = sum(parameter.numel() for parameter in pl_module.parameters() if parameter.requires_grad)
        manifest = {
            "environment": describe_environment(),
            "world_size": trainer.world_size,
            "parameters": parameters,
            "trainable_parameters": trainable,
            "categories": self.categories,
            "config": self.config,
        }
        self.run_dir.mkdir(parents=True, exist_ok=True)
        (self.run_dir / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds `config` and `categories` to the checkpoint, as plain Python values."""
        checkpoint["config"] = self.config
        checkpoint["categories"] = self.categories


def _without_folders(record: dict[str, Any]) -> dict[str, Any]:
    return {name: cut_folders([value])[0] if isinstance(value, str) else value for name, value in record.items()}


class RunSummary(Callback):
    """Writes a JSON file when training ends: speed, memory, loss curve, AP, and the manifest.

    Args:
        run_dir: The run's folder, with the `manifest.json` of `RunManifest`.
        path: The file to write.
    """

    def __init__(self, run_dir: str, path: str) -> None:
        self.run_dir = Path(run_dir)
        self.path = Path(path)
        self._curve: list[dict[str, float]] = []
        self._started = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock of the whole training, evaluations included."""
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: dict[str, Any], batch_idx: int
    ) -> None:
        """Keeps a point of the curves where `Throughput` has closed a window."""
        if not closes_log_window(trainer, batch_idx):
            return
        values = {
            name.removeprefix("train/"): float(trainer.callback_metrics[name])
            for name in ("train/loss", "train/img_per_s", "train/peak_memory_mib")
            if name in trainer.callback_metrics
        }
        self._curve.append({"step": trainer.global_step, **values})

    def _manifest(self) -> dict[str, Any]:
        """Returns the run's manifest without this machine's folders, since a summary is passed on."""
        text = (self.run_dir / "manifest.json").read_text().replace(f"{Path.cwd()}/", "")
        return json.loads(text, object_hook=_without_folders)

    @rank_zero_only
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the summary; NaN stands for what was never logged."""
        metrics = trainer.callback_metrics
        summary = {
            "train_seconds": round(time.perf_counter() - self._started, 1),
            "steps": trainer.global_step,
            "img_per_s_median": statistics.median(self._values("img_per_s") or [math.nan]),
            "peak_memory_mib": max(self._values("peak_memory_mib"), default=math.nan),
            "loss_first": next(iter(self._values("loss")), math.nan),
            "loss_last": next(iter(reversed(self._values("loss"))), math.nan),
            "validation": {name: round(float(value), 4) for name, value in metrics.items() if name.startswith("val/")},
            "curve": self._curve,
            "manifest": self._manifest(),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(summary, indent=1) + "\n")

    def _values(self, name: str) -> list[float]:
        return [point[name] for point in self._curve if name in point]
