"""Trains the official Deformable-DETR in a process of its own, step by step, as its parent asks.

Usage: python -P official_step.py <checkout of the official code> <job.pt>; -P, since modules beside this file have
names of the standard library.

The official packages are called `models` and `util`, as ours are, so of this project `msda_op` alone is imported here.
The job is a dict: `settings` (options of the official main.py), `device`, `dtype` of autocast or None, `allow_tf32`,
`images` float32 [B, 3, H, W] and `padding_mask` [B, H, W], and `targets`, the official dicts. A line with a number on
the standard input asks for so many steps; the answer is a line of JSON with `walls_ms`, `phases_ms` and `peak_gib`.
Where the official extension has not been built, another package with the same kernels takes its place.
"""

import json
import os
import sys
import time
import types
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor

PHASES = ("forward", "loss", "backward", "update")
EXTENSION = "MultiScaleDeformableAttention"
_GIB = 2**30


def import_official(checkout: Path, on_gpu: bool) -> types.ModuleType:
    """Imports the official `models` package; its op takes float32 under autocast, as the kernels do."""
    torchvision.__version__ = "0.9.0"  # the official code reads the first three characters as a number
    is_built = find_spec(EXTENSION) is not None
    if not is_built:
        sys.modules[EXTENSION] = types.ModuleType(EXTENSION)
    root = str(Path(__file__).resolve().parent.parent)
    sys.path.insert(0, str(checkout))
    sys.path.append(root)
    import util.misc

    util.misc.is_main_process = lambda: False  # no download of weights
    import models
    from models.ops.functions import ms_deform_attn_func
    from models.ops.modules import ms_deform_attn

    if not is_built:
        del sys.modules[EXTENSION]  # so that it is not taken for the extension where another package is looked for
    from msda_op.compat import original_ms_deform_attn, require_original_op

    if on_gpu:
        require_original_op("cuda")

    class OfficialOp:
        """Stands in for the autograd function around the compiled extension."""

        @staticmethod
        def apply(
            value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor, im2col_step: int
        ) -> Tensor:
            if on_gpu:
                return original_ms_deform_attn(value, shapes, starts, locations.float(), weights)
            return ms_deform_attn_func.ms_deform_attn_core_pytorch(value, shapes, locations, weights)

    ms_deform_attn.MSDeformAttnFunction = OfficialOp
    return models


class OfficialStep:
    """The official model, criterion and optimiser, with their settings, and one batch."""

    def __init__(self, checkout: Path, job: dict[str, Any]) -> None:
        self.device = torch.device(job["device"])
        self.on_gpu = self.device.type == "cuda"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = job["allow_tf32"]
        official = import_official(checkout, self.on_gpu)
        sys.argv = ["main.py"]
        import main as official_main
        from util.misc import NestedTensor

        torch.manual_seed(0)
        args = official_main.get_args_parser().parse_args([])
        vars(args).update(job["settings"], device=job["device"])
        self.args, self.dtype = args, job["dtype"]
        self.model, self.criterion, _ = official.build_model(args)
        self.model.to(self.device).train()
        self.criterion.train()
        self.samples = NestedTensor(job["images"].to(self.device), job["padding_mask"].to(self.device))
        self.targets = [{name: tensor.to(self.device) for name, tensor in each.items()} for each in job["targets"]]
        self.optimizer = torch.optim.AdamW(self._groups(), lr=args.lr, weight_decay=args.weight_decay)

    def _groups(self) -> list[dict[str, Any]]:
        """Returns the three groups of the official main.py."""
        rates = {"main": self.args.lr, "backbone": self.args.lr_backbone, "slow": self.args.lr * 0.1}
        members: dict[str, list[Tensor]] = {name: [] for name in rates}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                slow = any(word in name for word in self.args.lr_linear_proj_names)
                group = "backbone" if name.startswith("backbone.0") else "slow" if slow else "main"
                members[group].append(parameter)
        return [{"params": members[name], "lr": rate} for name, rate in rates.items()]

    def run(self) -> tuple[float, dict[str, float]]:
        """Trains once; returns the wall time and that of the phases, in milliseconds."""
        marks: list[tuple[Any, Any]] = []
        self._synchronize()
        begin = time.perf_counter()
        with self._phase(marks), self._autocast():
            output = self.model(self.samples)
        with self._phase(marks), self._autocast():
            losses = self.criterion(output, self.targets)
            weights = self.criterion.weight_dict
            total = sum(losses[name] * weight for name, weight in weights.items() if name in losses)
        with self._phase(marks):
            total.backward()
        with self._phase(marks):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip_max_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._synchronize()
        wall = 1000 * (time.perf_counter() - begin)
        elapsed = [a.elapsed_time(b) if self.on_gpu else 1000 * (b - a) for a, b in marks]
        return wall, dict(zip(PHASES, elapsed, strict=True))

    @contextmanager
    def _phase(self, marks: list[tuple[Any, Any]]) -> Any:
        begin = self._mark()
        yield
        marks.append((begin, self._mark()))

    def _mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None)


def main(checkout: Path, job_path: Path) -> None:
    """Builds the model, then answers until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the official code prints is no answer
    step = OfficialStep(checkout, torch.load(job_path, weights_only=True))
    for line in sys.stdin:
        if step.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        walls, phases = zip(*(step.run() for _ in range(int(line))), strict=True)
        peak = torch.cuda.max_memory_allocated() / _GIB if step.on_gpu else None
        print(json.dumps({"walls_ms": walls, "phases_ms": phases, "peak_gib": peak}), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
