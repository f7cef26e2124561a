"""Checkpoint files that are whole at any moment, and are read without running code."""

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint aside, in its own folder, and renames it when it is on the disk.

    Killed at any moment, a run leaves the checkpoint before or the one after, never a part of one. (Lightning writes
    aside too, but into the system's temporary folder; from there to another file system a rename is a copy.)
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Saves atomically.

        Args:
            checkpoint: Tensors and plain Python values.
            path: A file on a local or mounted file system.
            storage_options: None; files have none.
        """
        if storage_options is not None:
            raise ValueError(f"storage_options must be None, got {storage_options!r}; leave them out")
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f".{target.name}.partial")
        with aside.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(target)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Callable[..., Any] | None = lambda storage, location: storage,
        weights_only: bool | None = True,
    ) -> dict[str, Any]:
        """Loads with `read_checkpoint`; what Lightning asks of `weights_only` is overruled by safety."""
        return read_checkpoint(Path(path))


def read_checkpoint(path: Path, *, lazy: bool = False) -> dict[str, Any]:
    """Reads a checkpoint of ours onto the CPU.

    Args:
        path: The file.
        lazy: Map the file into memory, so that only what is looked at is read.

    Raises:
        ValueError: The file is damaged, would run code, or is no checkpoint to resume from.
    """
    refusal = f"checkpoint must be a whole file of torch.save, got {path}; use another one"
    if not zipfile.is_zipfile(path):
        raise ValueError(refusal)
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=lazy)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"checkpoint must hold tensors and plain values alone, got {path}, which would run code when loaded "
            f"({reason}); save it anew without Python objects"
        ) from error
    except (RuntimeError, KeyError, EOFError) as error:  # a zip file of something else, or without a part
        raise ValueError(refusal) from error
    if not (isinstance(checkpoint, dict) and "loops" in checkpoint and "state_dict" in checkpoint):
        raise ValueError(
            f"ckpt_path must name a checkpoint of a run, got {path} without the run's progress; start from its weights "
            "with model.weights=..."
        )
    return checkpoint
