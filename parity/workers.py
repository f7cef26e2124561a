"""Processes that train arms side by side: a step on small images leaves most of a GPU idle."""

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.queues import SimpleQueue
from types import TracebackType
from typing import Any

import torch

from models.environment import silence_dependencies
from parity.arms import Experiment
from parity.recording import Progress

Work = Callable[[Experiment, Progress], Any]
"""A piece of work that can be sent to another process: a function of a module, or a `functools.partial` of one."""


class Workers:
    """Runs pieces of work in processes that live as long as this context.

    A process takes one piece after the other, in the order in which they were started. What a piece raises is raised
    where its result is asked for; pieces that have not begun by then are dropped, those that have are finished.

    Args:
        experiment: what each process works on.
        count: number of processes.
        progress: called, in a thread, with the lines of all of them.
    """

    def __init__(self, experiment: Experiment, count: int, progress: Progress) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would share a CUDA context, which CUDA forbids
        self.count = count
        self._closed = False
        self._lines: SimpleQueue[str | None] = context.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, args=(progress,), daemon=True)
        self._listener.start()
        threads = max(1, torch.get_num_threads() // count)
        self._pool = ProcessPoolExecutor(count, context, _begin, (experiment, self._lines, threads))

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(self, work: Work, after: "Future[Any] | None" = None) -> "Future[Any]":
        """Puts a piece of work at the end of the queue, once another one is done if it needs what that leaves."""
        if after is None:
            return self._pool.submit(_do, work)
        promised: Future[Any] = Future()

        def begin(done: "Future[Any]") -> None:
            if self._closed:
                promised.cancel()
            elif done.cancelled() or done.exception() is not None:
                _pass_on(done, promised)
            else:
                self.start(work).add_done_callback(lambda found: _pass_on(found, promised))

        after.add_done_callback(begin)
        return promised

    def close(self) -> None:
        """Ends the processes, after the pieces that have begun."""
        self._closed = True
        self._pool.shutdown(cancel_futures=True)
        if self._listener.is_alive():
            self._lines.put(None)
            self._listener.join()

    def _listen(self, progress: Progress) -> None:
        while (line := self._lines.get()) is not None:
            progress(line)


def _pass_on(done: "Future[Any]", promised: "Future[Any]") -> None:
    """Gives a promised future the end of another one."""
    if done.cancelled():
        promised.cancel()
    elif (error := done.exception()) is not None:
        promised.set_exception(error)
    else:
        promised.set_result(done.result())


# What a process of the pool works on, set when it begins.
_context: list[tuple[Experiment, Progress]] = []


def _begin(experiment: Experiment, lines: "SimpleQueue[str | None]", threads: int) -> None:
    silence_dependencies()
    torch.set_num_threads(threads)
    _context.append((experiment, lines.put))


def _do(work: Work) -> Any:
    return work(*_context[0])
