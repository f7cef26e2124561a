"""Compiles what the package launches, for any NVIDIA architecture, on a machine without a GPU.

Kernels are not listed here. Each call of `parity.shipped_calls` runs what launches kernels on tensors without memory
while `record_launches` has Triton compile instead of launch: tiles, warps, dtypes and alignments are the shipped ones.
"""

import multiprocessing
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, MockTensor

from parity.assembly import KernelReport, disassemble, report_kernel
from parity.shipped_calls import ShippedCall, shipped_calls

ARCHITECTURES = (80, 86, 89, 90, 100)
_PACKAGES = ("msda_op.triton.", "models.layers.")


@dataclass(frozen=True)
class RecordedLaunch:
    """One launch that was compiled instead.

    Args:
        kernel: module and name of the function, e.g. "forward.forward_kernel".
        arguments: what it was launched with, by name; tensors are meta tensors.
        grid: as launched.
        compiled: Triton's compiled kernel, its texts in `asm`, its launch shape in `metadata`; None where the recording
            does not compile.
    """

    kernel: str
    arguments: dict[str, Any]
    grid: Any
    compiled: Any


class CompileOnlyDriver:
    """Stands in for Triton's driver of a GPU, with a target but without the GPU."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_device(self) -> int:
        """Returns the architecture: Triton keeps compiled kernels apart by device."""
        return self.architecture

    def get_current_stream(self, device: int) -> int:
        """Returns the default stream, which nothing is launched on."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Returns what to compile for."""
        return GPUTarget("cuda", self.architecture, 32)


@contextmanager
def record_launches(compiles: bool = True) -> Iterator[list[RecordedLaunch]]:
    """Appends every launch inside the context to the list, compiled for the active target, and launches nothing.

    Args:
        compiles: whether to compile; without it only arguments and grids are recorded.
    """
    launches: list[RecordedLaunch] = []
    run, wrap = JITFunction.run, torch.library.wrap_triton

    def compile_instead(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = None
        if compiles:
            positional = [_without_memory(argument) for argument in args]
            named = {name: _without_memory(argument) for name, argument in kwargs.items()}
            compiled = run(kernel, *positional, grid=grid, warmup=True, **named)
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        launches.append(RecordedLaunch(_qualified_name(kernel), arguments, grid, compiled))
        return compiled

    # PyTorch drops the launch of a wrapped kernel on meta tensors before Triton sees it.
    JITFunction.run, torch.library.wrap_triton = compile_instead, lambda kernel: kernel
    try:
        yield launches
    finally:
        JITFunction.run, torch.library.wrap_triton = run, wrap


@contextmanager
def targeting(architecture: int) -> Iterator[None]:
    """Makes Triton and PyTorch name `architecture` as that of the GPU, for what the launch module decides by it.

    Notes:
        Triton's driver stays replaced afterwards (a machine without a GPU has none to put back): for a process of
        its own.
    """
    capability = torch.cuda.get_device_capability
    triton.runtime.driver.set_active(CompileOnlyDriver(architecture))
    torch.cuda.get_device_capability = lambda device=None: divmod(architecture, 10)
    try:
        yield
    finally:
        torch.cuda.get_device_capability = capability


def compile_shipped(architectures: Sequence[int], pattern: str, jobs: int) -> list[KernelReport]:
    """Compiles the shipped calls for each architecture and reports each distinct machine code once.

    Args:
        architectures: compute capabilities, e.g. 90.
        pattern: regular expression that the names of the calls must contain.
        jobs: architectures that are compiled at a time, each in a process of its own.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        return list(chain.from_iterable(pool.map(_compile_for, architectures, repeat(pattern))))


def entry_kernels() -> set[str]:
    """Returns all kernels of the modules imported by now: jit functions that no other one calls."""
    functions: dict[str, JITFunction] = {}
    for name in [name for name in sys.modules if name.startswith(_PACKAGES)]:
        members = vars(sys.modules[name]).values()
        functions |= {_qualified_name(member): member for member in members if isinstance(member, JITFunction)}
    called = {name for function in functions.values() for name in function.fn.__code__.co_names}
    return {name for name in functions if name.rsplit(".", 1)[-1] not in called}


def _qualified_name(kernel: JITFunction) -> str:
    """Returns for example "forward.forward_kernel": the module inside its package, and the function."""
    module = kernel.fn.__module__
    package = next((package for package in _PACKAGES if module.startswith(package)), "")
    return f"{module.removeprefix(package)}.{kernel.__name__}"


def _compile_for(architecture: int, pattern: str) -> list[KernelReport]:
    torch.set_num_threads(1)
    found: dict[str, tuple[RecordedLaunch, list[ShippedCall]]] = {}
    for call in shipped_calls():
        if call.architecture in (None, architecture) and re.search(pattern, call.name):
            with targeting(architecture), record_launches() as launches:
                call.run()
            for each in launches:
                found.setdefault(each.compiled.hash, (each, []))[1].append(call)
    return [_report(architecture, each, users) for each, users in found.values()]


def _report(architecture: int, each: RecordedLaunch, users: list[ShippedCall]) -> KernelReport:
    names = ", ".join(dict.fromkeys(call.name for call in users))
    tools = triton.knobs.nvidia
    report = report_kernel(
        kernel=each.kernel,
        variant=names,
        architecture=architecture,
        num_warps=each.compiled.metadata.num_warps,
        shared_bytes=each.compiled.metadata.shared,
        row_bytes=4 * users[0].head_dim,
        ptx=each.compiled.asm["ptx"],
        sass=disassemble(each.compiled.asm["cubin"], tools.cuobjdump.path, tools.nvdisasm.path),
    )
    return report if any(call.judged for call in users) else replace(report, problems=())


def _without_memory(argument: Any) -> Any:
    """Replaces a tensor by Triton's stand-in, whose address counts as aligned to 16 bytes as fresh tensors' are."""
    return MockTensor(argument.dtype, argument.shape) if isinstance(argument, Tensor) else argument
