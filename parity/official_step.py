"""Trains the official Deformable-DETR in a process of its own, step by step, as its parent asks.

Usage: python -m parity.official_step <job.pt> <checkout of the official code>

The official packages are called `models` and `util`, as ours are, and stand first on the path: of this project nothing
but `parity.step_process` and `msda_op` is imported. The job's `settings` are options of the official main.py. Where the
official extension has not been built, another package with the same kernels takes its place.
"""

import sys
import types
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor

from parity.step_process import serve

EXTENSION = "MultiScaleDeformableAttention"


def import_official(checkout: Path, on_gpu: bool) -> types.ModuleType:
    """Imports the official `models` package; its op takes float32 under autocast, as the kernels do."""
    torchvision.__version__ = "0.9.0"  # the official code reads the first three characters as a number
    is_built = find_spec(EXTENSION) is not None
    if not is_built:
        sys.modules[EXTENSION] = types.ModuleType(EXTENSION)
    sys.path.insert(0, str(checkout))
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
        device = torch.device(job["device"])
        official = import_official(checkout, device.type == "cuda")
        sys.argv = ["main.py"]
        import main as official_main
        from util.misc import NestedTensor

        args = official_main.get_args_parser().parse_args([])
        vars(args).update(job["settings"], device=job["device"])
        self.args, self.clip = args, args.clip_max_norm
        self.model, self.criterion, _ = official.build_model(args)
        self.model.to(device).train()
        self.criterion.train()
        self.samples = NestedTensor(job["images"].to(device), job["padding_mask"].to(device))
        self.targets = [{name: tensor.to(device) for name, tensor in each.items()} for each in job["targets"]]
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

    def compute_loss(self, forward_is_done: Callable[[], None]) -> Tensor:
        """Runs model and criterion."""
        output = self.model(self.samples)
        forward_is_done()
        losses = self.criterion(output, self.targets)
        weights = self.criterion.weight_dict
        return sum(losses[name] * weight for name, weight in weights.items() if name in losses)


if __name__ == "__main__":
    serve(partial(OfficialStep, Path(sys.argv[2])), Path(sys.argv[1]))
