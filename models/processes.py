"""Several processes that train together: a start that says where it stands, errors that leave none of them behind."""

import faulthandler
import os
import signal
import sys
import traceback
from types import TracebackType
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

START_SECONDS = 180.0
"""Seconds to the end of the first batch after which each of several processes prints where its threads are."""


class SharedFate(Callback):
    """Entered around what a trainer does; where one process trains, nothing happens.

    Processes that wait for each other wait in silence, up to the half hour after which NCCL gives up. So until the
    first batch is done, each prints the stacks of its threads every `START_SECONDS`. And an error ends all processes
    at once: the one that meets it kills those that it has started, in an earlier job of a sweep too, which may be in an
    exchange that nobody will complete, and leaves without Python's way out, on which NCCL waits for the others too.
    What has started the process itself (the first process, torchrun, srun) sees its status and ends the rest.

    Signals, which all processes obey after the same batch, take their usual way.

    Args:
        trainer: The run's trainer; the watch of the start becomes its last callback.
    """

    _launchers: ClassVar[list[Any]] = []
    """Lightning's, of this process: of several jobs the first has started the other processes."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __enter__(self) -> "SharedFate":
        """Begins to watch the start."""
        if self._trainer.world_size > 1:
            faulthandler.dump_traceback_later(START_SECONDS, repeat=True)
            self._trainer.callbacks.append(self)  # type: ignore[attr-defined]  # set by Lightning, undeclared
            self._launchers.append(self._trainer.strategy.launcher)
        return self

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """The start is over."""
        faulthandler.cancel_dump_traceback_later()

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """The start is over."""
        faulthandler.cancel_dump_traceback_later()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Prints an error and ends the process with its status, and those that it has started."""
        if self._trainer.world_size == 1:
            return
        faulthandler.cancel_dump_traceback_later()
        if error is None or isinstance(error.__context__, SIGTERMException | KeyboardInterrupt):
            return
        status = 1
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
        elif isinstance(error.code, int):
            status = error.code
        else:
            print(error.code, file=sys.stderr)
        for launcher in self._launchers:
            launcher.kill(signal.SIGKILL)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
