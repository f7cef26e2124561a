"""ONNX: the detector through the reference op, for onnxruntime and whatever else reads it."""

import logging
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.export.buckets import Size
from models.export.certificate import Program, collect_answers
from models.export.inference import INPUT_NAMES, OUTPUT_NAMES, InferenceModule, Outputs
from models.export.programs import StaticProgram, example_inputs, program_name
from models.export.recipe import Precision, Source

OPSETS = range(18, 21)
"""From the first one that PyTorch's exporter writes (GridSample alone would be content with 16) to the last one that it
and onnxruntime agree on."""


class OnnxFormat:
    """Writes one `.onnx` file a bucket, for float32 on a CPU."""

    name = "onnx"
    needs_equality = False
    traces = True
    device = torch.device("cpu")

    def __init__(self, *, opset: int) -> None:
        """Chooses the operators.

        Raises:
            ValueError: if the opset is none of `OPSETS`.
        """
        if opset not in OPSETS:
            raise ValueError(
                f"opset must be {OPSETS[0]} to {OPSETS[-1]}, got {opset}; PyTorch writes no earlier ones, and later "
                "ones have operators that onnxruntime may lack"
            )
        self.settings: dict[str, Any] = {"opset": opset}

    def check(self, precision: Precision, backend: str) -> None:
        """Refuses what the format cannot hold.

        Raises:
            ValueError: if precision or op do not fit, or a package is missing.
        """
        if precision.name != "fp32":
            raise ValueError(f"precision must be fp32 for ONNX, got {precision.name}; set precision=fp32")
        if backend != "reference":
            raise ValueError(f"op must be reference for ONNX, which has no Triton kernels, got {backend}; leave it out")
        missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
        if missing:
            raise ValueError(f"packages must be installed, got no {', '.join(missing)}; pip install -e .[export]")

    def write(
        self, source: Source, module: InferenceModule, buckets: tuple[Size, ...], batch_size: int, folder: Path
    ) -> dict[Size, list[Outputs]]:
        """Writes the programs, loads them again and runs them; see `models.export.build.Format`."""
        for name in ("onnxscript", "onnx_ir"):
            logging.getLogger(name).setLevel(logging.WARNING)  # they report every pass over the graph
        for bucket in buckets:
            example = example_inputs(bucket, batch_size, self.device)
            exported = torch.export.export(module, example, strict=False)
            program = torch.onnx.export(
                exported.run_decompositions({torch.ops.aten.mean.dim: _average}),
                dynamo=True,
                opset_version=self.settings["opset"],
                input_names=list(INPUT_NAMES),
                output_names=list(OUTPUT_NAMES),
                optimize=False,  # onnxruntime optimises when it loads; the exporter's pass loses a node of DINO
                verbose=False,
            )
            assert program is not None, "torch.onnx.export returns a program unless it is given a file"
            program.save(folder / program_name(bucket, self.name), external_data=False)
        programs = load_programs(folder, buckets, batch_size)
        return {bucket: collect_answers(programs[bucket], bucket, batch_size, self.device) for bucket in buckets}


def _average(tensor: Tensor, dim: list[int], keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Means a tensor after converting it; the exporter converts afterwards, and ONNX has no mean of booleans."""
    converted = tensor if dtype is None else tensor.to(dtype)
    return converted.sum(dim, keepdim) / math.prod(tensor.shape[axis] for axis in dim)


def load_programs(folder: Path, buckets: tuple[Size, ...], batch_size: int) -> dict[Size, Program]:
    """Opens the programs of an artefact in onnxruntime, on the CPU."""
    return {
        bucket: StaticProgram(OnnxSession(folder / program_name(bucket, OnnxFormat.name)), bucket, batch_size)
        for bucket in buckets
    }


class OnnxSession:
    """One `.onnx` file in onnxruntime, called with tensors."""

    def __init__(self, path: Path) -> None:
        """Opens the file.

        Raises:
            ValueError: if onnxruntime is not installed.
        """
        if find_spec("onnxruntime") is None:
            raise ValueError("onnxruntime must be installed to run ONNX, got none; pip install -e .[export]")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors; it warns of every cast that it does not fold
        options.intra_op_num_threads = torch.get_num_threads()
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def __call__(self, images: Tensor, sizes_hw: Tensor, original_sizes_hw: Tensor) -> Outputs:
        """Runs the program on tensors of the CPU."""
        inputs = dict(zip(INPUT_NAMES, (images, sizes_hw, original_sizes_hw), strict=True))
        arrays = self._session.run(list(OUTPUT_NAMES), {name: tensor.numpy() for name, tensor in inputs.items()})
        scores, labels, boxes_xyxy = (torch.from_numpy(array) for array in arrays)
        return scores, labels, boxes_xyxy
