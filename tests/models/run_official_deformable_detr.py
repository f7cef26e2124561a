"""Runs the official Deformable-DETR code in a process of its own and saves what it computes.

Usage: python run_official_deformable_detr.py <checkout of the official code> <settings.json> <result.pt>

The official packages are called `models` and `util`, as ours are, so this file imports nothing of this project. The
compiled extension is replaced by the official code's own PyTorch function, and no weights are downloaded.
"""

import argparse
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

SIZES_HW = ((150, 190), (110, 200))
BOX_COUNTS = (0, 7)


def import_official(checkout: Path) -> types.ModuleType:
    """Imports the official `models` package with the compiled extension and the download replaced."""
    torchvision.__version__ = "0.9.0"  # the official code reads the first three characters as a number
    extension = types.ModuleType("MultiScaleDeformableAttention")
    sys.modules["MultiScaleDeformableAttention"] = extension
    sys.path.insert(0, str(checkout))
    import util.misc

    util.misc.is_main_process = lambda: False
    import models
    from models.ops.functions import ms_deform_attn_func
    from models.ops.modules import ms_deform_attn

    class PyTorchOp:
        """Stands in for the autograd function around the compiled extension."""

        @staticmethod
        def apply(
            value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor, im2col_step: int
        ) -> Tensor:
            return ms_deform_attn_func.ms_deform_attn_core_pytorch(value, shapes, locations, weights)

    ms_deform_attn.MSDeformAttnFunction = PyTorchOp
    return models


def randomize(model: nn.Module) -> None:
    """Moves what the initialisation leaves at zero or one, so that no part of the model hides an error."""
    for name, parameter in model.named_parameters():
        zero_at_init = any(word in name for word in ("sampling_offsets", "attention_weights", "bbox_embed"))
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter) * (0.05 if zero_at_init or parameter.dim() == 1 else 0.0))
    for name, buffer in model.named_buffers():
        if name.endswith(("running_var", "bn1.weight", "bn2.weight", "bn3.weight", "downsample.1.weight")):
            buffer.uniform_(0.5, 1.5)
        else:
            buffer.normal_(0, 0.1)


def make_targets(num_classes: int) -> list[dict[str, Tensor]]:
    """Draws random boxes for each image."""
    return [
        {
            "labels": torch.randint(num_classes, (count,)),
            "boxes": torch.cat((torch.rand(count, 2) * 0.5 + 0.25, torch.rand(count, 2) * 0.4 + 0.05), dim=1),
        }
        for count in BOX_COUNTS
    ]


def main(checkout: Path, settings: dict[str, Any], result_path: Path) -> None:
    """Builds the model, runs a training step without its update, and saves inputs and results."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    official = import_official(checkout)
    sys.argv = ["main.py"]
    import main as official_main

    args = official_main.get_args_parser().parse_args([])
    vars(args).update(settings, device="cpu", dropout=0.0)
    model, criterion, _ = official.build_model(args)
    randomize(model)
    from util.misc import nested_tensor_from_tensor_list

    samples = nested_tensor_from_tensor_list([torch.randn(3, *size) for size in SIZES_HW])
    targets = make_targets(91)
    assignments: list[list[tuple[Tensor, Tensor]]] = []
    criterion.matcher.register_forward_hook(lambda module, inputs, output: assignments.append(output))
    output = model(samples)
    losses = criterion(output, targets)
    total = sum(losses[name] * weight for name, weight in criterion.weight_dict.items() if name in losses)
    total.backward()
    layers = [*output["aux_outputs"], output]
    encoder = output.get("enc_outputs")
    torch.save(
        {
            "checkpoint": {"model": model.state_dict(), "args": argparse.Namespace(**vars(args))},
            "images": samples.tensors,
            "padding_mask": samples.mask,
            "targets": targets,
            "logits": torch.stack([layer["pred_logits"] for layer in layers]).detach(),
            "boxes": torch.stack([layer["pred_boxes"] for layer in layers]).detach(),
            "proposals": None if encoder is None else {name: value.detach() for name, value in encoder.items()},
            "losses": {name: value.detach() for name, value in losses.items() if name.startswith("loss_")},
            "total": total.detach(),
            "assignments": assignments,
            "gradients": {
                name: parameter.grad
                for name, parameter in model.named_parameters(remove_duplicate=False)
                if parameter.grad is not None
            },
        },
        result_path,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]))
