"""What programs of fixed shapes have in common: their files, their inputs, and the refusal of other shapes."""

import torch
from torch import Tensor

from models.export.buckets import Size
from models.export.certificate import Program
from models.export.inference import Outputs

_SUFFIXES = {"aoti": "pt2", "onnx": "onnx"}


class StaticProgram:
    """A program for one shape, which refuses others in words: compiled code would read past the end in silence."""

    def __init__(self, program: Program, bucket: Size, batch_size: int) -> None:
        self._program = program
        self._shape = (batch_size, 3, *bucket)

    def __call__(self, images: Tensor, sizes_hw: Tensor, original_sizes_hw: Tensor) -> Outputs:
        """Runs the program.

        Raises:
            ValueError: if shapes or dtypes are not those of its export.
        """
        pairs = (self._shape[0], 2)
        expected = ((self._shape, torch.uint8), (pairs, torch.int64), (pairs, torch.int64))
        given = tuple((tuple(each.shape), each.dtype) for each in (images, sizes_hw, original_sizes_hw))
        if given != expected:
            raise ValueError(f"inputs must be {expected}, got {given}; pad them to the bucket")
        scores, labels, boxes_xyxy = self._program(images, sizes_hw, original_sizes_hw)
        return scores, labels, boxes_xyxy


def choose_device(name: str) -> torch.device:
    """Returns a device by its name; "auto" is a GPU where there is one.

    Raises:
        ValueError: if the name is unknown, or there is no GPU.
    """
    has_gpu = torch.cuda.is_available()
    if name not in ("auto", "cuda", "cpu") or (name == "cuda" and not has_gpu):
        raise ValueError(f"device must be auto, cpu or, with a GPU, cuda, got {name}; choose one that is there")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and has_gpu) else "cpu")


def example_inputs(bucket: Size, batch_size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns inputs of a program's shapes."""
    images = torch.zeros((batch_size, 3, *bucket), dtype=torch.uint8, device=device)
    sizes_hw = torch.tensor(bucket, device=device).repeat(batch_size, 1)
    return images, sizes_hw, sizes_hw.clone()


def program_name(bucket: Size, format_name: str) -> str:
    """Returns the file of a bucket's program."""
    return f"detector_{bucket[0]}x{bucket[1]}.{_SUFFIXES[format_name]}"
