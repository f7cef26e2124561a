"""A launch like an earlier one runs the same compiled kernel, with what Triton itself would hand to it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import triton

from msda_op.triton.kernel_launch import bind
from parity.compilation import CompileOnlyDriver

# Runs without the interpreter, which compiles nothing. Kernels are compiled for a GPU that need not be there, and what
# reaches the launcher is kept: grid and arguments, tensors by their addresses.
LAUNCH = """
import json

import torch
import triton
from triton.compiler import CompiledKernel

from msda_op.triton import kernel_launch, launch
from msda_op.triton.arguments import Inputs, Needs
from msda_op.triton.kernel_launch import Launch
from msda_op.options import DEFAULT_OPTIONS
from msda_op.triton.hopper import tuning
from parity.compilation import CompileOnlyDriver

triton.runtime.driver.set_active(CompileOnlyDriver(90))
launch._capability_of = lambda tensor: (9, 0)
handed, report = [], []

def pretend_to_load(kernel):
    kernel.module, kernel.function = 1, 2
    kernel._run = lambda *arguments: handed.append((kernel, arguments[:3], arguments[9:]))

CompiledKernel._init_handles = pretend_to_load
start = Launch._start

def start_twice(self, device):
    kernel_launch._compiled.clear()
    compiled = start(self, device)
    again = start(self, device)
    first, second = ([getattr(each, "data_ptr", lambda each=each: each)() for each in row[2]] for row in handed)
    same = compiled is again and handed[0][:2] == handed[1][:2] and first == second
    report.append((self.kernel.fn.__name__, same and len(kernel_launch._compiled) == 1))
    handed.clear()
    return compiled

def inputs_of(head_dim):
    value = torch.rand(2, 14, 2, head_dim).bfloat16()
    tables = torch.tensor(((3, 4), (1, 2))), torch.tensor((0, 12))
    return Inputs(value, *tables, torch.rand(2, 6, 2, 2, 4, 2), torch.rand(2, 6, 2, 2, 4), None)

Launch._start = start_twice
for least, deterministic, head_dim in ((0, False, 32), (0, True, 32), (10**9, False, 32), (0, False, 5)):
    tuning._MIN_RECORDS = least
    inputs = inputs_of(head_dim)
    output, counted = launch.counting_forward(inputs, DEFAULT_OPTIONS, True, True, deterministic)
    needs = Needs(True, True, True, False)
    launch.backward(output, inputs, DEFAULT_OPTIONS, True, True, deterministic, needs, counted)

Launch._start = start
keys = []
for offset in (0, 1):
    value = torch.rand(offset + 2 * 14 * 2 * 5)[offset:].view(2, 14, 2, 5)
    output = torch.empty(2, 6, 10)
    launch.forward_launch(inputs._replace(value=value), output, DEFAULT_OPTIONS).run(output)
    keys.append(handed.pop()[0].hash)
print(json.dumps({"launches": report, "kernels": keys}))
"""


def test_launches_as_triton_does_and_tells_alignments_apart() -> None:
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    finished = subprocess.run([sys.executable, "-c", LAUNCH], env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout)
    names = {name for name, _ in report["launches"]}
    counting = {"plan_kernel", "scan_kernel", "seat_kernel"}
    assert names == counting | {"forward_kernel", "backward_kernel", "reduce_kernel", "sort_kernel"}
    assert [name for name, same in report["launches"] if not same] == []
    aligned, skewed = report["kernels"]
    assert aligned != skewed


class Compiled:
    """A compiled kernel that keeps how it is started: by itself, or through Triton's hooks."""

    function, packed_metadata = 2, (4, 1, 0)

    def __init__(self) -> None:
        self.runs: list[tuple[Any, ...]] = []
        self.hooked: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.runs.append(arguments)

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.hooked.append((grid, *arguments))


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_bound_kernel_calls_hooks_where_there_are_some(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=CompileOnlyDriver(90)))
    compiled = Compiled()
    start = bind(compiled, 7)
    start(10, 11)
    assert compiled.runs.pop() == (7, 1, 1, 0, 2, (4, 1, 0), None, None, None, 10, 11)
    hook = getattr(triton.knobs.runtime, name)
    hook.add(print)
    try:
        start(10, 11)
    finally:
        hook.remove(print)
    assert compiled.hooked == [((7, 1, 1), 10, 11)]
    monkeypatch.setattr(triton.knobs.runtime, name, print)
    start(12)
    assert compiled.hooked[1:] == [((7, 1, 1), 12)]
    monkeypatch.setattr(triton.knobs.runtime, name, None)
    start(13)
    assert len(compiled.hooked) == 2
    assert compiled.runs[0][-1] == 13
