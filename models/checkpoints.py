"""Loads published and own checkpoints into a model, with strict accounting of every key."""

import argparse
import pickle
import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

CLASS_HEADS = ("class_embed.", "transformer.decoder.class_embed.")
PROFILER_SUFFIXES = ("total_params", "total_ops")
OPTIONAL_SUFFIX = "num_batches_tracked"
LIGHTNING_PREFIX = "model."


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Loads the weights of a checkpoint file into a model, in place.

    Reads official Deformable-DETR checkpoints (weights under `model`) and checkpoints of this project's training
    (weights under `state_dict`, prefix `model.`). Nothing may be missing, left over or of another shape, except for:
    counters that a profiler left in official files (dropped), batch-norm step counts (optional), and class heads for
    another number of classes (dropped with a warning that names them).

    Args:
        model: the model to fill; its state-dict keys are those of the official code.
        path: the file.

    Raises:
        ValueError: if the file can't be read, holds anything but tensors and plain data, holds no known layout or
            does not fit the model; the message is one line.
    """
    weights = _find_weights(read_checkpoint(path), path)
    expected = model.state_dict(keep_vars=True)
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


def read_checkpoint(path: str | Path) -> Mapping[str, object]:
    """Reads a file of tensors and plain data; an `argparse.Namespace` is the only other class allowed in it.

    Args:
        path: the file.

    Returns:
        The dict that it holds, tensors on the CPU.

    Raises:
        ValueError: if there is no such file, or it is damaged, would run code or holds no dict.
    """
    if not Path(path).is_file():
        raise ValueError(f"weights must be the path of a checkpoint file, got {str(path)!r}; no such file exists")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"weights must be a checkpoint of tensors and plain data, got {str(path)!r}; it was refused: {reason}"
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


def _find_weights(checkpoint: Mapping[str, object], path: str | Path) -> dict[str, Tensor]:
    """Recognises the layout by its keys and returns the weights under the model's own names."""
    official, own = checkpoint.get("model"), checkpoint.get("state_dict")
    if isinstance(official, Mapping):
        weights = {key: tensor for key, tensor in official.items() if not key.endswith(PROFILER_SUFFIXES)}
    elif isinstance(own, Mapping):
        weights = {key.removeprefix(LIGHTNING_PREFIX): own[key] for key in own if key.startswith(LIGHTNING_PREFIX)}
    else:
        raise ValueError(
            f"weights must hold `model` (official layout) or `state_dict` (ours), got "
            f"{', '.join(map(str, checkpoint))} in {str(path)!r}; give a checkpoint of one of them"
        )
    strangers = [str(key) for key, value in weights.items() if not isinstance(value, Tensor)]
    if strangers:
        raise ValueError(f"weights must be tensors, got others in {_shorten(strangers)} of {str(path)!r}; drop them")
    return weights


def _is_for_other_classes(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return any(
        key.startswith(CLASS_HEADS) and key in weights and weights[key].shape[:1] != tensor.shape[:1]
        for key, tensor in expected.items()
    )


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


def _shorten(keys: list[str]) -> str:
    shown = 5
    return ", ".join(keys[:shown]) + (", ..." if len(keys) > shown else "")
