"""Errors of settings that show only once a batch runs."""

import torch


class UnfitSettingError(ValueError):
    """A setting that does not fit the images of a batch."""


def explain_full_memory(error: torch.OutOfMemoryError) -> str:
    """Returns a line on what a batch found no memory for, and what to do."""
    found = ". ".join(str(error).split(". ")[:2]).rstrip(".")
    return (
        f"the GPU's memory must hold a batch, got: {found}; lower data.batch_size (in an evaluation "
        "data.eval_batch_size), or set model.transformer.gradient_checkpointing=true cuda_graphs=false"
    )
