"""Compiles what the launch module launches, for any NVIDIA architecture, on a machine without a GPU.

Kernels are not listed here. Each call of `shipped_calls` runs the launch module itself on meta tensors while
`record_launches` has Triton compile instead of launch, so tiles, warps, dtypes and alignments are the shipped ones.
A new path gets a call in `shipped_calls`; a kernel that no call reaches fails `tests/parity/test_compilation.py`.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, MockTensor

import msda_op.triton
from msda_op.triton import launch
from parity.assembly import KernelReport, disassemble, report_kernel
from parity.presets import PRESETS, Preset

ARCHITECTURES = (80, 86, 89, 90, 100)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_META = torch.device("meta")
_BATCH = 4
_ODD = Preset("odd", ((33, 51), (17, 26)), num_queries=300, num_heads=5, head_dim=20, num_points=3)
_WIDE = Preset("wide", ((33, 51), (17, 26)), num_queries=300, num_heads=2, head_dim=256, num_points=16)
_COMPILED_PRESETS = (*(PRESETS[name] for name in ("encoder", "decoder", "dino")), _ODD, _WIDE)


@dataclass(frozen=True)
class Launch:
    """One launch that was compiled instead.

    Args:
        kernel: name of the function.
        arguments: what it was launched with, by name; tensors are meta tensors.
        grid: as launched.
        compiled: Triton's compiled kernel, its texts in `asm`, its launch shape in `metadata`; None where the recording
            does not compile.
    """

    kernel: str
    arguments: dict[str, Any]
    grid: Any
    compiled: Any


@dataclass(frozen=True)
class ShippedCall:
    """One way in which users reach the kernels.

    Args:
        name: words for a report.
        head_dim: D.
        default: whether a user gets this without asking for an option; only then its problems count.
        run: calls the launch module on meta tensors.
    """

    name: str
    head_dim: int
    default: bool
    run: Callable[[], Any]


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
def record_launches(compiles: bool = True) -> Iterator[list[Launch]]:
    """Appends every launch inside the context to the list, compiled for the active target, and launches nothing.

    Args:
        compiles: whether to compile; without it only arguments and grids are recorded.
    """
    launches: list[Launch] = []
    run = JITFunction.run

    def compile_instead(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = None
        if compiles:
            positional = [_without_memory(argument) for argument in args]
            named = {name: _without_memory(argument) for name, argument in kwargs.items()}
            compiled = run(kernel, *positional, grid=grid, warmup=True, **named)
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        launches.append(Launch(kernel.__name__, arguments, grid, compiled))
        return compiled

    JITFunction.run = compile_instead
    try:
        yield launches
    finally:
        JITFunction.run = run


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


def shipped_calls() -> list[ShippedCall]:
    """Returns every way in which users reach the kernels: sizes that matter x dtypes x sets of gradients."""
    calls = []
    for preset, (dtype_name, dtype) in product(_COMPILED_PRESETS, DTYPES.items()):
        value, shapes, starts, locations, weights, grad_output = _meta_inputs(preset, dtype)
        name = f"{preset.name} {dtype_name}"
        inputs = (value, shapes, starts, locations, weights)
        calls.append(ShippedCall(f"{name} forward", preset.head_dim, True, partial(launch.forward, *inputs)))
        for needs in _gradient_sets(preset, dtype):
            asked = "+".join(word for word, need in zip(("value", "locations", "weights"), needs, strict=True) if need)
            run = partial(launch.backward, grad_output, *inputs, *needs)
            calls.append(ShippedCall(f"{name} backward {asked}", preset.head_dim, True, run))
    return calls


def compile_shipped(architectures: tuple[int, ...], calls: list[ShippedCall]) -> list[KernelReport]:
    """Compiles `calls` for each architecture and reports each distinct machine code once."""
    reports = []
    for architecture in architectures:
        found: dict[str, tuple[Launch, list[ShippedCall]]] = {}
        for call in calls:
            with targeting(architecture), record_launches() as launches:
                call.run()
            for each in launches:
                found.setdefault(each.compiled.hash, (each, []))[1].append(call)
        reports += [_report(architecture, each, users) for each, users in found.values()]
    return reports


def entry_kernels() -> set[str]:
    """Returns the names of all kernels in `msda_op.triton`: jit functions that no other jit function calls."""
    functions: dict[str, JITFunction] = {}
    for module in pkgutil.walk_packages(msda_op.triton.__path__, "msda_op.triton."):
        members = vars(importlib.import_module(module.name)).values()
        functions |= {member.__name__: member for member in members if isinstance(member, JITFunction)}
    called = set()
    for function in functions.values():
        names = function.fn.__code__.co_names
        called |= {name for name in names if isinstance(function.fn.__globals__.get(name), JITFunction)}
    return functions.keys() - called


def _report(architecture: int, each: Launch, users: list[ShippedCall]) -> KernelReport:
    names = ", ".join(dict.fromkeys(call.name for call in users))
    report = report_kernel(
        kernel=each.kernel,
        variant=names,
        architecture=architecture,
        num_warps=each.compiled.metadata.num_warps,
        shared_bytes=each.compiled.metadata.shared,
        row_bytes=4 * users[0].head_dim,
        ptx=each.compiled.asm["ptx"],
        sass=disassemble(each.compiled.asm["cubin"], triton.knobs.nvidia.cuobjdump.path),
    )
    return report if any(call.default for call in users) else replace(report, problems=())


def _gradient_sets(preset: Preset, dtype: torch.dtype) -> list[tuple[bool, ...]]:
    """Returns which of value, locations, weights need a gradient: all three, and each set once for a half and a float.

    Decoders share the encoder's machine code, and float16 the loads and registers of bfloat16.
    """
    every = list(product((True, False), repeat=3))
    return every[:-1] if preset.name == "encoder" and dtype != torch.float16 else every[:1]


def _meta_inputs(preset: Preset, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Returns value, tables, locations, weights and upstream gradient of a preset without memory."""
    b, q, m, d, k = _BATCH, preset.num_queries, preset.num_heads, preset.head_dim, preset.num_points
    num_levels = len(preset.spatial_shapes)
    empty = partial(torch.empty, device=_META)
    return (
        empty(b, preset.value_length, m, d, dtype=dtype),
        empty(num_levels, 2, dtype=torch.int64),
        empty(num_levels, dtype=torch.int64),
        empty(b, q, m, num_levels, k, 2, dtype=torch.float32),
        empty(b, q, m, num_levels, k, dtype=dtype),
        empty(b, q, m * d, dtype=dtype),
    )


def _without_memory(argument: Any) -> Any:
    """Replaces a tensor by Triton's stand-in, whose address counts as aligned to 16 bytes as fresh tensors' are."""
    return MockTensor(argument.dtype, argument.shape) if isinstance(argument, Tensor) else argument
