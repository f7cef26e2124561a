"""Trains or validates a detector: `python train.py [group=option] [key=value] ...`; `--help` lists both."""

import signal
import sys
from typing import Any, cast

import hydra
import lightning.pytorch as pl
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from omegaconf import DictConfig, OmegaConf

from coco.callbacks import CocoEvaluation
from coco.datamodule import CocoDataModule
from coco.errors import DataError, NonFiniteDetectionsError, explain_dead_worker
from models.callbacks import RunManifest
from models.compilation import compile_regions
from models.detector import Detector
from models.divergence import TrainingDiverged
from models.environment import allow_tf32, silence_dependencies
from models.errors import UnfitSettingError, explain_full_memory
from models.preflight import check_resumption, check_run, match_validation, resolve_checkpoint
from models.processes import SharedFate, explain_lost_process
from models.resuming import has_heard_sigterm, stopping_signal
from models.settings import check_numbers, check_resumed_settings

USER_ERRORS = (ValueError, FileNotFoundError, ModuleNotFoundError, MisconfigurationException)
SIGTERM_TO_WORKERS = (
    "stopped by SIGTERM, which loader workers got too; nothing is saved here, the last checkpoint stands"
)


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(cfg: DictConfig) -> float | None:
    """Runs one job; returns the last validation AP, which a sweep can optimise."""
    try:
        return run(cfg)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # the trainer's way to pass it on
            sys.exit(128 + signal.SIGINT)
        raise


def run(cfg: DictConfig) -> float | None:
    """Trains or validates; what a person can mend ends the process with one line."""
    try:
        detector, datamodule, trainer = build(cfg)
    except USER_ERRORS as error:
        sys.exit(f"error: {error}")
    except InstantiationException as error:
        if not isinstance(error.__cause__, USER_ERRORS):
            raise
        sys.exit(f"error: {error.__cause__}")
    with SharedFate(trainer):
        work(cfg, detector, datamodule, trainer)
    ap = trainer.callback_metrics.get("val/AP")
    return None if ap is None else float(ap)


def work(cfg: DictConfig, detector: Detector, datamodule: CocoDataModule, trainer: pl.Trainer) -> None:
    """Trains or validates what was built; faults of the data and the settings, and signals, end the process."""
    try:
        if cfg.mode == "validate":
            trainer.validate(detector, datamodule, ckpt_path=cfg.ckpt_path, verbose=False)
        else:
            trainer.fit(detector, datamodule, ckpt_path=cfg.ckpt_path)
    except (DataError, NonFiniteDetectionsError, TrainingDiverged, UnfitSettingError) as error:
        sys.exit(f"error: {error}")
    except torch.OutOfMemoryError as error:
        sys.exit(f"error: {explain_full_memory(error)}")
    except RuntimeError as error:
        lost = explain_lost_process(error)
        if lost is not None:
            sys.exit(f"error: {lost}")
        explanation = explain_dead_worker(error)
        if explanation is None:
            raise
        if has_heard_sigterm(trainer):
            print(SIGTERM_TO_WORKERS, file=sys.stderr)
            sys.exit(128 + signal.SIGTERM)
        sys.exit(f"error: {explanation}")
    except SIGTERMException:
        sys.exit(128 + stopping_signal(trainer))


def build(cfg: DictConfig) -> tuple[Detector, CocoDataModule, pl.Trainer]:
    """Checks the settings, then makes what a run needs."""
    resolve_checkpoint(cfg)
    check_numbers(cfg)
    check_run(cfg)
    check_resumed_settings(cfg)
    silence_dependencies()
    allow_tf32(cfg.precision.allow_tf32)
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
    datamodule = instantiate(cfg.data)
    datamodule.check()
    check_resumption(cfg, datamodule.category_rows)
    if cfg.mode == "validate":
        datamodule.order_categories(match_validation(cfg, datamodule.category_rows))
    cfg.num_classes = datamodule.num_classes
    detector = Detector(
        model=instantiate(cfg.model),
        criterion=instantiate(cfg.criterion),
        normalizer=instantiate(cfg.normalizer),
        optimizer=instantiate(cfg.optimizer),
        schedule=instantiate(cfg.schedule),
        top_k=cfg.detector.top_k,
    )
    if cfg.compile:
        compile_regions(detector)
    return detector, datamodule, build_trainer(cfg, datamodule.category_rows)


def build_trainer(cfg: DictConfig, categories: list[dict[str, Any]]) -> pl.Trainer:
    """Makes the Trainer with its loggers and callbacks."""
    config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    callbacks = [instantiate(callback) for callback in cfg.callbacks.values() if callback is not None]
    callbacks.append(CocoEvaluation(run_dir=cfg.run_dir))
    callbacks.append(RunManifest(cfg.run_dir, config, categories))
    loggers = [instantiate(logger) for logger in cfg.logger.values()]
    show_progress = cfg.callbacks.progress is not None
    return instantiate(cfg.trainer, callbacks=callbacks, logger=loggers, enable_progress_bar=show_progress)


if __name__ == "__main__":
    main()
