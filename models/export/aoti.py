"""AOTInductor: compiled programs that run without Python's view of the detector, kernels of the op inside."""

import subprocess
from pathlib import Path
from typing import Any

import torch

from models.export.buckets import Size
from models.export.certificate import Program, contrasting_inputs
from models.export.inference import InferenceModule, Outputs
from models.export.programs import StaticProgram, choose_device, example_inputs, program_name
from models.export.recipe import Precision, Source
from models.export.trial import answer_apart

_CPP_LIBRARY = "libstdc++.so.6"


class AotiFormat:
    """Writes one `.pt2` package a bucket; `torch._inductor.aoti_load_package` loads it without this project's code."""

    name = "aoti"
    needs_equality = False
    traces = True

    def __init__(self, *, device: str, inductor: dict[str, Any]) -> None:
        """Chooses where the programs run.

        Args:
            device: "cuda", "cpu", or "auto" for a GPU where there is one.
            inductor: options of Inductor by their full names.

        Raises:
            ValueError: if the device is not there.
        """
        self.device = choose_device(device)
        self.settings: dict[str, Any] = {"inductor": dict(inductor)}

    def check(self, precision: Precision, backend: str) -> None:
        """Refuses what the format cannot hold.

        Raises:
            ValueError: if the op cannot be compiled for the device, or there is no C++ compiler.
        """
        if backend == "cuda" or (self.device.type == "cpu" and backend == "triton"):
            raise ValueError(
                f"op must be triton or reference on a GPU and reference on a CPU for AOTInductor, got {backend} on "
                f"{self.device.type}; set op=reference or leave it out"
            )
        if self.device.type == "cpu" and precision.dtype == torch.float16:
            raise ValueError("precision must be fp32 or bf16 on a CPU, got fp16; set another or export on a GPU")
        find_compiler()

    def write(
        self, source: Source, module: InferenceModule, buckets: tuple[Size, ...], batch_size: int, folder: Path
    ) -> dict[Size, list[Outputs]]:
        """Compiles the programs and runs them in processes of their own; see `models.export.build.Format`.

        Raises:
            ValueError: if a program crashes there.
        """
        self.write_packages(module, buckets, batch_size, folder)
        return self._answer_apart(buckets, batch_size, folder)

    def compile(
        self, module: InferenceModule, buckets: tuple[Size, ...], batch_size: int, folder: Path
    ) -> dict[Size, Program]:
        """Writes a package for each bucket into a folder, and loads it into this process once it has run in another.

        Raises:
            ValueError: if a program crashes there.
        """
        self.write_packages(module, buckets, batch_size, folder)
        self._answer_apart(buckets, batch_size, folder)
        return load_programs(folder, buckets, batch_size)

    def write_packages(self, module: InferenceModule, buckets: tuple[Size, ...], batch_size: int, folder: Path) -> None:
        """Writes a package for each bucket into a folder."""
        options = link_options(find_compiler()) | self.settings["inductor"]
        for bucket in buckets:
            exported = torch.export.export(module, example_inputs(bucket, batch_size, self.device), strict=False)
            torch._inductor.aoti_compile_and_package(
                exported,
                package_path=str(folder / program_name(bucket, self.name)),
                inductor_configs=options,
            )

    def _answer_apart(self, buckets: tuple[Size, ...], batch_size: int, folder: Path) -> dict[Size, list[Outputs]]:
        return {
            bucket: answer_apart(
                folder / program_name(bucket, self.name), contrasting_inputs(bucket, batch_size), self.device
            )
            for bucket in buckets
        }


def find_compiler() -> str:
    """Returns Inductor's C++ compiler.

    Raises:
        ValueError: if there is none.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler  # takes a second, of which loading a package has no need
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ValueError(
            "a C++ compiler must be installed for AOTInductor, got none; install g++, or set the variable CXX"
        ) from error


def link_options(compiler: str) -> dict[str, Any]:
    """Returns options of Inductor by which packages use the C++ library that PyTorch has loaded.

    Some compilers link it statically. A program would then bring another copy into the process and crash as soon as it
    uses a regular expression, which it does when it is loaded.

    Args:
        compiler: of the packages; one that has no such library by itself keeps its own way.
    """
    return {"aot_inductor.custom_op_libs": [f":{_CPP_LIBRARY}"]} if has_library(compiler, _CPP_LIBRARY) else {}


def has_library(compiler: str, name: str) -> bool:
    """Whether a compiler finds a library, by its file name, where it looks by itself."""
    asked = [compiler, f"-print-file-name={name}"]
    return Path(subprocess.run(asked, capture_output=True, text=True).stdout.strip()).is_absolute()


def load_programs(folder: Path, buckets: tuple[Size, ...], batch_size: int) -> dict[Size, Program]:
    """Loads the packages of an artefact."""
    return {
        bucket: StaticProgram(
            torch._inductor.aoti_load_package(str(folder / program_name(bucket, AotiFormat.name))), bucket, batch_size
        )
        for bucket in buckets
    }
