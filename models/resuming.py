"""Callbacks that make a resumed run equal to one that was never stopped, and save where a run stops."""

import hashlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console
from rich.text import Text

from models.csv_logger import AppendingCSVLogger
from models.environment import relative_path, running_command
from models.stop_agreement import StopAgreement

STARTING = ("ckpt_path=", "model.weights=")
"""Words of a command that say where a run starts, and that one which goes on has anew."""

SHOW_CURSOR = "\x1b[?25h"
"""What a terminal is told by a process that ends without taking down its progress bar."""

_INTERRUPTED = "\nstopping after this step and saving; Ctrl-C again ends at once\n"


class StepSeeds(Callback):
    """Seeds PyTorch's generators before each training batch from the run's seed, the process and the batch.

    Dropout and the noise of denoising queries then follow from the place in the training alone: no generator has to be
    saved, whatever number of processes and whatever drew from them in between. A run that goes on leaves out rows of
    the CSV log that the stopped one wrote after its last checkpoint, for they come again.

    Args:
        seed: The run's seed.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Cuts the CSV log at the step that comes next."""
        for logger in trainer.loggers:
            if isinstance(logger, AppendingCSVLogger):
                logger.drop_from(trainer.global_step)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Seeds the generators of all devices."""
        place = f"{self.seed},{trainer.global_rank},{trainer.current_epoch},{batch_idx}"
        torch.manual_seed(int.from_bytes(hashlib.blake2b(place.encode(), digest_size=4).digest(), "little"))


class StopCheckpoint(Callback):
    """Saves where a training stops: by SIGTERM, by Ctrl-C, or at its end if no checkpoint has been saved since.

    Either signal is obeyed after the batch at hand; an evaluation that it cuts short begins anew in the resumed run.
    Within a window of accumulated gradients, which no checkpoint holds, Ctrl-C waits for its end, while at SIGTERM
    nothing is saved: the checkpoint before stands. A second Ctrl-C ends the process at once.

    Several processes stop together one batch later, also when one of them alone has heard, and wait for the end of a
    window at SIGTERM, too. For that they do not have Lightning ask the GPU about SIGTERM before every batch.

    Stands before the averaging of weights among the callbacks, which ends by giving the trained weights up.

    Args:
        path: The file to save.

    Attributes:
        is_interrupted: Whether it is Ctrl-C that stops the run.
        heard: Number of the signal that came to this process, 0 for none; alone, a process leaves SIGTERM to Lightning.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.is_interrupted = False
        self.heard = 0
        self._saved_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the signals over from here on: before, there is nothing to save. The trainer gives them back.

        A run that ignores Ctrl-C, as a shell's jobs in the background do, goes on ignoring it, and so does one that is
        not in Python's main thread, which alone hears of signals.
        """
        self._saved_step = trainer.global_step
        self._agreement = StopAgreement()
        if self._agreement.is_shared:
            self._take_over_sigterm(trainer)
        if not _hears_interrupts():
            return
        message = f"{SHOW_CURSOR if sys.stderr.isatty() else ''}{_INTERRUPTED}" if trainer.is_global_zero else ""

        def interrupt(number: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            self.heard = number
            os.write(2, message.encode())  # print could meet itself here

        signal.signal(signal.SIGINT, interrupt)

    def _take_over_sigterm(self, trainer: Trainer) -> None:
        """Keeps Lightning from its own agreement, by GPU, in which a process that alone hears SIGTERM waits forever."""
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        launcher = trainer.strategy.launcher

        def terminate(number: int, frame: FrameType | None) -> None:
            if self.heard != number and launcher is not None:
                launcher.kill(signal.Signals(number))  # as Lightning does, to the processes that it has started
            self.heard = number

        if hears_signals():
            signal.signal(signal.SIGTERM, terminate)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Obeys Ctrl-C."""
        if _has_stepped(trainer):
            self._obey(trainer)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *place: int
    ) -> None:
        """Obeys Ctrl-C."""
        if trainer.validating and trainer.state.fn == "fit":
            self._obey(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lets a training end where nothing is left to go on with: a signal that came so late stops nothing."""
        if _is_done(trainer):
            trainer._signal_connector.received_sigterm = False

    def _obey(self, trainer: Trainer) -> None:
        """Has the trainer raise what it raises at SIGTERM, at its next safe place, in all processes."""
        agreed = self._agreement.ask(self.heard)
        if agreed:
            self.is_interrupted = agreed == signal.SIGINT
            trainer._signal_connector.received_sigterm = True

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves after a signal; the trainer raises the exception in all processes at the same batch."""
        if not isinstance(exception, SIGTERMException) or trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        if not _has_stepped(trainer):
            return
        if trainer.validating:
            _reopen_evaluation(trainer, pl_module)
        trainer.save_checkpoint(self.path)
        if trainer.is_global_zero:
            text = f"stopped and saved after {trainer.global_step} steps; to go on: {command_to_go_on(self.path)}"
            Console(stderr=True).print(Text(text), soft_wrap=True)  # never broken, to be copied

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Notes that the state after this step is saved, by whichever callback."""
        self._saved_step = trainer.global_step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the last state unless that is done, as after an evaluation; Ctrl-C is Python's again."""
        self._agreement.close()
        if self._saved_step != trainer.global_step:
            with _reopened_epoch(trainer):
                trainer.save_checkpoint(self.path)
        if _hears_interrupts():
            signal.signal(signal.SIGINT, signal.default_int_handler)


def stop_checkpoints(trainer: Trainer) -> list[StopCheckpoint]:
    """Returns what saves where a training stops; none with callbacks.stop_checkpoint=null."""
    return [callback for callback in trainer.callbacks if isinstance(callback, StopCheckpoint)]  # type: ignore[attr-defined]


def stopping_signal(trainer: Trainer) -> signal.Signals:
    """Returns the signal that has stopped a training: SIGINT or SIGTERM."""
    is_interrupted = any(callback.is_interrupted for callback in stop_checkpoints(trainer))
    return signal.SIGINT if is_interrupted else signal.SIGTERM


def has_heard_sigterm(trainer: Trainer) -> bool:
    """Whether SIGTERM has come to this process, obeyed or not."""
    return trainer.received_sigterm or any(callback.heard == signal.SIGTERM for callback in stop_checkpoints(trainer))


def command_to_go_on(path: Path, replaced: Sequence[str] = STARTING) -> str:
    """Returns the command of this run, or in a sweep of this job alone, that goes on from a checkpoint.

    Args:
        path: The checkpoint.
        replaced: How words begin that the command leaves out.
    """
    without, words = list(replaced), [f"ckpt_path={relative_path(path)}"]
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        job = list(HydraConfig.get().overrides.task)
        without += ["-m", "--multirun", *("".join(word.partition("=")[:2]) for word in job)]  # all values of the sweep
        words = [*(word for word in job if not word.startswith(tuple(replaced))), *words]
    return f"{running_command(without=tuple(without))} {shlex.join(words)}"


def hears_signals() -> bool:
    """Whether this thread is told of signals, as Python's main thread alone is."""
    return threading.current_thread() is threading.main_thread()


def _hears_interrupts() -> bool:
    return hears_signals() and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def _has_stepped(trainer: Trainer) -> bool:
    """Whether the last batch closed a window of accumulated gradients."""
    return (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch


def _is_done(trainer: Trainer) -> bool:
    """Whether the epoch that ends is the last one."""
    done = trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]  # of a class that has it
    has_all_epochs = 0 <= (trainer.max_epochs or -1) <= done
    has_all_steps = 0 <= trainer.max_steps <= trainer.global_step
    return has_all_epochs or has_all_steps or trainer.should_stop


def _reopen_evaluation(trainer: Trainer, pl_module: LightningModule) -> None:
    """Undoes the beginning of an evaluation: trained weights come back, and a resumed run repeats it."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by Lightning, undeclared
        if isinstance(callback, WeightAveraging):
            callback.on_validation_epoch_end(trainer, pl_module)  # exchanges averaged and trained weights
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    progress.current.reset()
    total = progress.total
    total.processed = total.completed = total.started - 1  # type: ignore[attr-defined]  # marks it as cut short


@contextmanager
def _reopened_epoch(trainer: Trainer) -> Iterator[None]:
    """Counts an epoch that was left before its last batch as under way, so that a resumed run goes on within it."""
    left_over = int(not trainer.is_last_batch)
    progress = trainer.fit_loop.epoch_progress
    for count in (progress.total, progress.current):
        count.processed -= left_over  # type: ignore[attr-defined]  # of a class that has it
        count.completed -= left_over
    try:
        yield
    finally:
        for count in (progress.total, progress.current):
            count.processed += left_over  # type: ignore[attr-defined]
            count.completed += left_over
