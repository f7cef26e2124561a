"""Several processes that train together: a start that says where it stands, ends that leave none of them behind."""

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, ClassVar

from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from models.resuming import SHOW_CURSOR, hears_signals, stop_checkpoints

START_SECONDS = 180.0
"""Seconds to the end of the first batch after which each of several processes prints where its threads are."""

LOST_PROCESS = "another process of this run has ended, and this one with it; what the other printed says why"

_RELEASED = 0  # the number of no signal


class SignalWatch:
    """Calls a function at SIGTERM and at Ctrl-C, also while the main thread waits for another process.

    signal -> Python's handler in C -> its number, into a pipe -> thread -> function

    Python's own handlers run in the main thread alone, between two of its operations, and within an exchange that
    nobody completes it comes to none. What ignores Ctrl-C goes on doing so.

    Args:
        end: Called in a thread of its own with the number of the signal; ends the process.
    """

    def __init__(self, end: Callable[[int], None]) -> None:
        self._end = end
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._handler_before = signal.signal(signal.SIGTERM, _leave)  # of Python: none is told without one
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._read, name="signal-watch", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Leaves signals to whatever handles them, from now on; twice is as once."""
        if self._thread.is_alive():
            signal.set_wakeup_fd(-1)
            os.write(self._writer, bytes([_RELEASED]))
            self._thread.join()
            os.close(self._reader)
            os.close(self._writer)

    def close(self) -> None:
        """Releases signals, and has SIGTERM handled as before."""
        self.release()
        signal.signal(signal.SIGTERM, self._handler_before)

    def _read(self) -> None:
        while (number := os.read(self._reader, 1)[0]) != _RELEASED:
            if number in (signal.SIGTERM, signal.SIGINT):
                self._end(number)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def explain_lost_process(error: RuntimeError) -> str | None:
    """Says in a line that an exchange failed because another process has ended; None for any other error."""
    is_lost = "gloo/transport" in str(error) and "by peer" in str(error)  # connection closed, or reset
    return LOST_PROCESS if is_lost else None


class SharedFate(Callback):
    """Entered around what a trainer does; where one process trains, nothing happens.

    Processes that wait for each other wait in silence, up to the half hour after which NCCL gives up. So until the
    first batch is done, each prints the stacks of its threads every `START_SECONDS`. And an error ends all processes
    at once: the one that meets it kills those that it has started, in an earlier job of a sweep too, which may be in an
    exchange that nobody will complete, and leaves without Python's way out, on which NCCL waits for the others too.
    What has started the process itself (the first process, torchrun, srun) sees its status and ends the rest.

    Signals end all at once, too, with nothing saved, until a training with a `StopCheckpoint` begins. From then on all
    processes obey them after the same batch, and take their usual way.

    Args:
        trainer: The run's trainer; the watch of the start becomes its last callback.
    """

    _launchers: ClassVar[list[Any]] = []
    """Lightning's, of this process: of several jobs the first has started the other processes."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._watch: SignalWatch | None = None

    def __enter__(self) -> "SharedFate":
        """Begins to watch the start."""
        if self._trainer.world_size > 1:
            faulthandler.dump_traceback_later(START_SECONDS, repeat=True)
            self._trainer.callbacks.append(self)  # type: ignore[attr-defined]  # set by Lightning, undeclared
            self._launchers.append(self._trainer.strategy.launcher)
            if hears_signals():
                self._watch = SignalWatch(self._end_at_signal)
        return self

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves signals to the callback that saves, which has taken them over by now."""
        if self._watch is not None and stop_checkpoints(trainer):
            self._watch.release()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """The start is over."""
        faulthandler.cancel_dump_traceback_later()

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """The start is over."""
        faulthandler.cancel_dump_traceback_later()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Lets the other processes end before this one, for all have stopped and saved by now.

        Lightning looks every five seconds for one that it has started and that has ended with a status, as a signal has
        them do, and would kill this one.
        """
        if isinstance(exception, SIGTERMException):
            for launcher in self._launchers:
                launcher.procs.clear()

    def _end_at_signal(self, number: int) -> None:
        """Ends this process, those that it has started and the one that has started it."""
        if self._trainer.is_global_zero:
            shown = SHOW_CURSOR if sys.stderr.isatty() else ""
            print(f"{shown}\nstopped by {signal.Signals(number).name}; nothing is saved here", file=sys.stderr)
        environment = self._trainer.strategy.cluster_environment  # type: ignore[attr-defined]  # of several processes
        if isinstance(environment, LightningEnvironment) and environment.local_rank() > 0:
            os.kill(os.getppid(), number)
        self._end(128 + number)

    def _end(self, status: int) -> None:
        """Ends this process and those that it has started, without Python's way out."""
        for launcher in self._launchers:
            launcher.kill(signal.SIGKILL)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Prints an error and ends the process with its status, and those that it has started."""
        if self._trainer.world_size == 1:
            return
        faulthandler.cancel_dump_traceback_later()
        if self._watch is not None:
            self._watch.close()
        if error is None or isinstance(error.__context__, SIGTERMException | KeyboardInterrupt):
            return
        status = 1
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
        elif isinstance(error.code, int):
            status = error.code
        else:
            print(error.code, file=sys.stderr)
        self._end(status)
