"""Trains transformers' Deformable-DETR with its own loss in a process of its own, step by step, as its parent asks.

Usage: python -m parity.hugging_face_step <job.pt> [swap_op]

The job's `settings` are arguments of `DeformableDetrConfig` and, under `backbone_config`, of `ResNetConfig`. The model
is what that package makes of them but for the last three stages of the backbone, which train as they do in the
published recipe: the package looks for them by other names than its own ResNet's, and would freeze all. The optimiser
is the fused one that its Trainer takes. With `swap_op` its attention calls our op, and nothing else is other.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msda_op.hugging_face import swap_op
from parity.step_process import serve

SWAP = "swap_op"
TRAINED_STAGES = ("stages.1.", "stages.2.", "stages.3.")


class HuggingFaceStep:
    """The model, its optimiser with the published settings, and one batch.

    Args:
        job: see `parity.step_peer.make_job`.
        swapped: whether its attention calls our op.
    """

    clip = 0.1

    def __init__(self, job: dict[str, Any], swapped: bool) -> None:
        transformers: Any = import_module("transformers")
        device = torch.device(job["device"])
        settings = dict(job["settings"])
        backbone = transformers.ResNetConfig(**settings.pop("backbone_config"))
        config = transformers.DeformableDetrConfig(backbone_config=backbone, use_timm_backbone=False, **settings)
        self.model = transformers.DeformableDetrForObjectDetection(config)
        if swapped:
            swap_op(self.model)
        self.model.to(device).train()
        for name, parameter in self.model.named_parameters():
            if any(stage in name for stage in TRAINED_STAGES):
                parameter.requires_grad_(True)
        self._own_loss = self.model.loss_function
        self.images = job["images"].to(device)
        self.pixel_mask = (~job["padding_mask"]).long().to(device)
        self.targets = [
            {"class_labels": each["labels"].to(device), "boxes": each["boxes"].to(device)} for each in job["targets"]
        ]
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, lr=2e-4, weight_decay=1e-4, fused=True)

    def compute_loss(self, forward_is_done: Callable[[], None]) -> Tensor:
        """Runs the model, which computes its loss itself."""

        def loss_function(*arguments: Any, **keywords: Any) -> Any:
            forward_is_done()
            return self._own_loss(*arguments, **keywords)

        self.model.loss_function = loss_function
        return self.model(self.images, pixel_mask=self.pixel_mask, labels=self.targets).loss


if __name__ == "__main__":
    serve(partial(HuggingFaceStep, swapped=sys.argv[2:] == [SWAP]), Path(sys.argv[1]))
