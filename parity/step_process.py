"""The training loop of another code base, in a process of its own: it takes steps and times them as its parent asks.

Only PyTorch is imported here: a code base may have packages called as ours are. A line with a number on the standard
input asks for so many steps; the answer is a line of JSON with `walls_ms`, `phases_ms` and `peak_gib`.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

PHASES = ("forward", "loss", "backward", "update")
_GIB = 2**30


class Trained(Protocol):
    """A model with its optimiser and one batch, on one device."""

    @property
    def model(self) -> nn.Module:
        """The model, in training mode."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimiser of its parameters."""

    @property
    def clip(self) -> float:
        """Largest norm of the gradients."""

    def compute_loss(self, forward_is_done: Callable[[], None]) -> Tensor:
        """Returns the loss of the batch; calls `forward_is_done` between the model's forward pass and its loss."""


class Stepper:
    """Takes and times steps.

    Args:
        trained: what to train.
        job: see `parity.step_peer.make_job`.
    """

    def __init__(self, trained: Trained, job: dict[str, Any]) -> None:
        self.trained = trained
        self.device = torch.device(job["device"])
        self.on_gpu = self.device.type == "cuda"
        self.dtype = job["dtype"]

    def run(self) -> tuple[float, dict[str, float]]:
        """Trains once; returns the wall time and that of the phases, in milliseconds."""
        trained = self.trained
        self._synchronize()
        begin = time.perf_counter()
        marks = [self._mark()]
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None):
            total = trained.compute_loss(lambda: marks.append(self._mark()))
        marks.append(self._mark())
        total.backward()
        marks.append(self._mark())
        nn.utils.clip_grad_norm_(trained.model.parameters(), trained.clip)
        trained.optimizer.step()
        trained.optimizer.zero_grad()
        marks.append(self._mark())
        self._synchronize()
        wall = 1000 * (time.perf_counter() - begin)
        elapsed = [self._milliseconds(*pair) for pair in pairwise(marks)]
        return wall, dict(zip(PHASES, elapsed, strict=True))

    def answer(self, steps: int) -> dict[str, Any]:
        """Takes so many steps and returns what there is to say about them."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        walls, phases = zip(*(self.run() for _ in range(steps)), strict=True)
        peak = torch.cuda.max_memory_allocated() / _GIB if self.on_gpu else None
        return {"walls_ms": walls, "phases_ms": phases, "peak_gib": peak}

    def _mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _milliseconds(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) if self.on_gpu else 1000 * (end - begin)

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def serve(build: Callable[[dict[str, Any]], Trained], job_path: Path) -> None:
    """Builds what is to be trained from the job in a file, then answers until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the other code prints is no answer
    job = torch.load(job_path, weights_only=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = job["allow_tf32"]
    torch.manual_seed(0)
    stepper = Stepper(build(job), job)
    for line in sys.stdin:
        print(json.dumps(stepper.answer(int(line))), file=answers, flush=True)
