"""Runs the official DINO code in a process of its own and saves what it computes.

Usage: python run_official_dino.py <checkout of the official code> <settings.json> <result.pt>

The official packages are called `models` and `util`, as ours are, so this file imports nothing of this project. The
compiled extension is replaced by the official code's own PyTorch function, packages that only other backbones and the
command line need are replaced by empty ones, whatever is sent to a GPU stays where it is, and no weights are
downloaded. The random numbers of the denoising are recorded.
"""

import argparse
import json
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SIZES_HW = ((150, 190), (110, 200))


def import_official(checkout: Path) -> types.ModuleType:
    """Imports the official `models` package with the compiled extension and the download replaced."""
    sys.modules["MultiScaleDeformableAttention"] = types.ModuleType("MultiScaleDeformableAttention")
    layers = types.ModuleType("timm.models.layers")
    vars(layers).update(dict.fromkeys(("DropPath", "to_2tuple", "trunc_normal_")))
    sys.modules |= {"timm": types.ModuleType("timm"), "timm.models": types.ModuleType("timm.models")}
    sys.modules["timm.models.layers"] = layers
    sys.path.insert(0, str(checkout))
    import util.misc

    util.misc.is_main_process = lambda: False
    import models
    from models.dino.ops.functions import ms_deform_attn_func
    from models.dino.ops.modules import ms_deform_attn

    class PyTorchOp:
        """Stands in for the autograd function around the compiled extension."""

        @staticmethod
        def apply(
            value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor, im2col_step: int
        ) -> Tensor:
            return ms_deform_attn_func.ms_deform_attn_core_pytorch(value, shapes, locations, weights)

    ms_deform_attn.MSDeformAttnFunction = PyTorchOp
    return models


def stay_on_cpu() -> None:
    """Makes the official code's moves to "cuda" leave tensors on the CPU."""
    move = Tensor.to
    Tensor.cuda = lambda self: self
    Tensor.to = lambda self, *args, **kwargs: self if args == ("cuda",) else move(self, *args, **kwargs)


def record(name: str, draws: list[Tensor]) -> None:
    """Appends what `torch.<name>` draws to a list."""
    draw: Callable[..., Tensor] = getattr(torch, name)

    def recorded(*args: Any, **kwargs: Any) -> Tensor:
        draws.append(draw(*args, **kwargs).clone())
        return draws[-1].clone()

    setattr(torch, name, recorded)


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


def make_targets(counts: list[int]) -> list[dict[str, Tensor]]:
    """Draws random boxes for each image."""
    return [
        {
            "labels": torch.randint(91, (count,)),
            "boxes": torch.cat((torch.rand(count, 2) * 0.5 + 0.25, torch.rand(count, 2) * 0.4 + 0.05), dim=1),
        }
        for count in counts
    ]


def predictions(output: dict[str, Any]) -> dict[str, Tensor]:
    """Collects logits and boxes of the layers, of the proposals, and of the denoising queries where there are any."""
    parts = {"": output, "denoising_": (output["dn_meta"] or {}).get("output_known_lbs_bboxes")}
    collected = {f"proposal_{name}": value for name, value in output["interm_outputs"].items()}
    for prefix, part in parts.items():
        if part is not None:
            layers = [*part["aux_outputs"], part]
            collected[f"{prefix}logits"] = torch.stack([layer["pred_logits"] for layer in layers])
            collected[f"{prefix}boxes"] = torch.stack([layer["pred_boxes"] for layer in layers])
    return {name: value.detach() for name, value in collected.items()}


def main(checkout: Path, settings: dict[str, Any], result_path: Path) -> None:
    """Builds the model, runs it in both modes, a training step without its update included, and saves everything."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    official = import_official(checkout)
    folder = checkout / "config" / "DINO"
    published = runpy.run_path(str(folder / "coco_transformer.py")) | runpy.run_path(str(folder / "DINO_4scale.py"))
    counts = settings.pop("counts")
    values = {name: value for name, value in published.items() if not name.startswith("_")}
    args = argparse.Namespace(**values | settings, device="cpu")
    model, criterion, _ = official.build_dino(args)
    randomize(model)
    from util.misc import nested_tensor_from_tensor_list

    samples = nested_tensor_from_tensor_list([torch.randn(3, *size) for size in SIZES_HW])
    targets = make_targets(counts)
    model.eval()
    with torch.no_grad():
        evaluated = predictions(model(samples))
    model.train()
    stay_on_cpu()
    draws: dict[str, list[Tensor]] = {"rand_like": [], "randint_like": []}
    for name, recorded in draws.items():
        record(name, recorded)
    output = model(samples, targets)
    losses = criterion(output, targets)
    total = sum(losses[name] * weight for name, weight in criterion.weight_dict.items() if name in losses)
    total.backward()
    torch.save(
        {
            "checkpoint": {"model": model.state_dict(), "args": args},
            "images": samples.tensors,
            "padding_mask": samples.mask,
            "targets": targets,
            "draws": draws,
            "trained": predictions(output),
            "evaluated": evaluated,
            "losses": {name: losses[name].detach() for name in criterion.weight_dict},
            "total": total.detach(),
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
