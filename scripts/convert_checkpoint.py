"""Converts detector checkpoints between layouts: `python -m scripts.convert_checkpoint SOURCE TARGET --to LAYOUT`.

SOURCE may be in any layout that `model.weights` reads. TARGET ends in .pth, .bin or .safetensors.
"""

import argparse
import sys
from pathlib import Path

import torch

from models.checkpoints import read_weights
from models.export.weights import save_weights
from models.layouts import BACKBONE_NAMES, HUGGING_FACE_LAYOUTS, to_hugging_face

OFFICIAL = "official"


def convert(source: Path, target: Path, *, layout: str, backbone: str, ema: bool) -> int:
    """Reads one file and writes another.

    Args:
        source: The checkpoint to read.
        target: The file to write; one that exists is replaced.
        layout: "official", or one of `HUGGING_FACE_LAYOUTS`.
        backbone: Names of the backbone in a Hugging Face layout, one of `BACKBONE_NAMES`.
        ema: Whether to take the averaged weights of an official DINO checkpoint.

    Returns:
        The number of tensors written.

    Raises:
        ValueError: If the source can't be read or has no counterpart in the layout.
    """
    weights = read_weights(source, ema=ema)
    if layout != OFFICIAL:
        weights = to_hugging_face(weights, layout, backbone)
    if target.suffix == ".safetensors":
        save_weights(weights, target)
    else:
        torch.save({"model": weights} if layout == OFFICIAL else weights, target)
    return len(weights)


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.convert_checkpoint", description=__doc__.split(":")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--to", required=True, choices=(OFFICIAL, *HUGGING_FACE_LAYOUTS), dest="layout")
    parser.add_argument("--backbone", default="timm", choices=BACKBONE_NAMES, help="names inside a Hugging Face layout")
    parser.add_argument("--ema", action="store_true", help="take the averaged weights of a DINO checkpoint")
    options = parser.parse_args(arguments)
    try:
        count = convert(
            options.source, options.target, layout=options.layout, backbone=options.backbone, ema=options.ema
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {count} tensors in the layout {options.layout} to {options.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
