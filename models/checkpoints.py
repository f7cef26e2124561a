"""Loads published and own checkpoints into a model, with strict accounting of every key."""

import argparse
import logging
import pickle
import re
import struct
import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from models.layouts import detect_layout, from_hugging_face

CLASS_HEADS = ("class_embed.", "transformer.decoder.class_embed.", "transformer.enc_out_class_embed.", "label_enc.")
PROFILER_SUFFIXES = ("total_params", "total_ops")
OPTIONAL_SUFFIX = "num_batches_tracked"
LIGHTNING_PREFIX = "model."
PARALLEL_PREFIX = "module."
COCO_SLOTS = 91
COCO_UNUSED_IDS = {0, 12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
COCO_IDS = [index for index in range(COCO_SLOTS) if index not in COCO_UNUSED_IDS]
"""The ids of COCO's 80 categories: the rows that published class heads, of 91 slots, were trained in."""
_NO_PICKLE = (AssertionError, AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError, struct.error)
"""What PyTorch's unpickler runs into where it takes text, an archive or a part of a file for its instructions."""

logger = logging.getLogger(__name__)


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Loads the weights of a checkpoint file into a model, in place.

    Nothing may be missing, left over or of another shape, except for batch-norm step counts (optional) and class heads
    for another number of classes (dropped with a warning that names them). Of class heads with COCO's 91 slots a model
    of 80 classes takes the rows of COCO's 80 categories.

    Args:
        model: the model to fill; its state-dict keys are those of the official code.
        path: the file, in any layout that `read_weights` knows.

    Raises:
        ValueError: if the file can't be read, holds anything but tensors and plain data, holds no known layout or
            does not fit the model; the message is one line.
    """
    weights = read_weights(path, ema=False)
    expected = model.state_dict(keep_vars=True)
    if _is_for_other_classes(weights, expected):
        weights = _take_coco_classes(weights, expected)
    if _is_for_other_classes(weights, expected):
        dropped = sorted(key for key in weights if key.startswith(CLASS_HEADS))
        warnings.warn(
            f"{path} was trained for another number of classes; these start from their initialisation: "
            f"{', '.join(dropped)}",
            stacklevel=2,
        )
        weights = {key: tensor for key, tensor in weights.items() if key not in dropped}
        expected = {key: tensor for key, tensor in expected.items() if not key.startswith(CLASS_HEADS)}
    check_keys(weights, expected, path)
    _check_tied_tensors(weights, expected, path)
    model.load_state_dict(weights, strict=False)


def read_weights(path: str | Path, *, ema: bool) -> dict[str, Tensor]:
    """Reads the weights of a detector under our names, which are the official ones.

    Knows the checkpoints of the official Deformable-DETR and DINO code (`model`, `ema_model`), of this project's
    training (`state_dict`), and the state dicts of Hugging Face's DeformableDetrForObjectDetection of versions 4 and 5
    (.safetensors or .bin). What a profiler left in official files is dropped.

    Args:
        path: the file.
        ema: whether to take the averaged weights of an official DINO checkpoint instead of the trained ones.

    Raises:
        ValueError: if the file can't be read, holds anything but tensors and plain data, or no known layout.
    """
    weights = _find_weights(read_checkpoint(path), path, ema)
    layout = detect_layout(list(weights))
    if layout is None:
        hint = "pass it as backbone.weights" if "layer1.0.conv1.weight" in weights else "convert it to a known layout"
        raise ValueError(
            f"weights must be of a Deformable-DETR or DINO, got names like {_shorten(list(weights))} in {str(path)!r}; "
            f"{hint}"
        )
    return weights if layout == "ours" else from_hugging_face(weights, layout)


def read_checkpoint(path: str | Path) -> Mapping[str, object]:
    """Reads a file of tensors and plain data; an `argparse.Namespace` is the only other class allowed in it.

    Args:
        path: the file.

    Returns:
        The dict that it holds, tensors on the CPU.

    Raises:
        ValueError: if there is no such file, or it is no checkpoint, damaged, would run code or holds no dict; the
            message is one line.
    """
    if not Path(path).is_file():
        raise ValueError(f"weights must be the path of a checkpoint file, got {str(path)!r}; no such file exists")
    try:
        if Path(path).suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, SafetensorError, *_NO_PICKLE) as error:
        raise ValueError(
            f"weights must be a checkpoint of tensors and plain data, as torch.save and safetensors write them, got "
            f"{str(path)!r} ({_describe_refusal(error)}); check the path, get the file anew or save its state dict"
        ) from error
    if not isinstance(checkpoint, Mapping):
        raise ValueError(f"weights must hold a dict, got {type(checkpoint).__name__} in {str(path)!r}; save one")
    return checkpoint


def check_keys(weights: Mapping[str, object], expected: Mapping[str, Tensor], path: str | Path) -> None:
    """Checks that weights have the keys and shapes of a state dict; step counts of batch norms may differ.

    Args:
        weights: what a file holds.
        expected: state dict of the module to fill.
        path: the file, for the message.

    Raises:
        ValueError: if a key is missing, left over, no tensor or of another shape; the message is one line.
    """
    shapes = {key: tuple(tensor.shape) for key, tensor in weights.items() if isinstance(tensor, Tensor)}
    problems = {
        "missing": [key for key in expected if key not in weights and not key.endswith(OPTIONAL_SUFFIX)],
        "unexpected": [key for key in weights if key not in expected and not key.endswith(OPTIONAL_SUFFIX)],
        "of another shape": [
            f"{key} {shapes.get(key)} for {tuple(tensor.shape)}"
            for key, tensor in expected.items()
            if key in weights and shapes.get(key) != tuple(tensor.shape)
        ],
    }
    found = [f"{len(keys)} {kind} ({_shorten(keys)})" for kind, keys in problems.items() if keys]
    if found:
        raise ValueError(
            f"weights must fit the model exactly, got {'; '.join(found)} in {str(path)!r}; "
            "choose the model and backbone that the checkpoint was trained with"
        )


def _find_weights(checkpoint: Mapping[str, object], path: str | Path, ema: bool) -> dict[str, Tensor]:
    """Finds the state dict of the detector in a checkpoint."""
    found = checkpoint.get("ema_model" if ema else "model")
    own = checkpoint.get("state_dict")
    if isinstance(found, Mapping) and found:
        weights = {str(key): value for key, value in found.items() if not key.endswith(PROFILER_SUFFIXES)}
    elif ema:
        raise ValueError(
            f"weights must hold `ema_model` to take averaged ones, got none in {str(path)!r}; leave ema off"
        )
    elif isinstance(own, Mapping):
        weights = {key.removeprefix(LIGHTNING_PREFIX): own[key] for key in own if key.startswith(LIGHTNING_PREFIX)}
    elif checkpoint and all(isinstance(value, Tensor) for value in checkpoint.values()):
        weights = dict(checkpoint)
    else:
        raise ValueError(
            f"weights must hold `model` (official layout), `state_dict` (ours) or tensors alone (Hugging Face), got "
            f"{', '.join(map(str, checkpoint))} in {str(path)!r}; give a checkpoint of one of them"
        )
    strangers = [str(key) for key, value in weights.items() if not isinstance(value, Tensor)]
    if strangers:
        raise ValueError(f"weights must be tensors, got others in {_shorten(strangers)} of {str(path)!r}; drop them")
    if all(key.startswith(PARALLEL_PREFIX) for key in weights):
        weights = {key.removeprefix(PARALLEL_PREFIX): tensor for key, tensor in weights.items()}
    return cast(dict[str, Tensor], weights)


def _is_for_other_classes(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return any(
        key.startswith(CLASS_HEADS) and key in weights and weights[key].shape[:1] != tensor.shape[:1]
        for key, tensor in expected.items()
    )


def _take_coco_classes(weights: dict[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Reduces class heads of 91 slots to the 80 rows that were trained, where the model has 80 classes."""
    extra_rows = {key: int(key.startswith("label_enc.")) for key in expected if key.startswith(CLASS_HEADS)}
    if not all(
        key in weights and len(weights[key]) == COCO_SLOTS + extra and len(expected[key]) == len(COCO_IDS) + extra
        for key, extra in extra_rows.items()
    ):
        return weights
    logger.info("The rows of COCO's 80 categories are taken from class heads with 91 slots")
    rows = {0: COCO_IDS, 1: [*COCO_IDS, COCO_SLOTS]}
    return weights | {key: weights[key][rows[extra]] for key, extra in extra_rows.items()}


def _check_tied_tensors(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: str | Path) -> None:
    """Checks that names of one tensor of the model hold equal values in the file."""
    names_of: dict[int, list[str]] = defaultdict(list)
    for key, tensor in expected.items():
        names_of[id(tensor)].append(key)
    for first, *others in names_of.values():
        differing = [key for key in others if not torch.equal(weights[key], weights[first])]
        if differing:
            raise ValueError(
                f"weights must hold equal tensors under names that the model shares, got another {_shorten(differing)} "
                f"than {first} in {str(path)!r}; choose the variant that the checkpoint was trained with"
            )


def _describe_refusal(error: Exception) -> str:
    """Says in one line why a file was not read; PyTorch says it after advice to read the file without care."""
    text = str(error).strip()
    if isinstance(error, EOFError) or not text:
        return "it is empty or ends too early"
    if isinstance(error, _NO_PICKLE) or "Unsupported operand" in text:
        return "its content is something else, or damaged"
    reason = re.search(r"WeightsUnpickler error:\s*([^\n]+?)(?: was not an allowed global|$)", text, re.MULTILINE)
    return reason.group(1) if reason else text.splitlines()[0]


def _shorten(keys: list[str]) -> str:
    shown = 5
    return ", ".join(keys[:shown]) + (", ..." if len(keys) > shown else "")
