"""A call like an earlier one launches what that one launched, with its own tensors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from msda_op.options import DEFAULT_OPTIONS
from msda_op.triton import launch_memory

# Runs without the interpreter, which has nothing to remember. Kernels are compiled for a GPU that need not be there,
# and what Triton would hand to its launcher is kept: grid and arguments, tensors and addresses as their place in the
# call.
LAUNCH = """
import json
import sys

import torch
import triton
from triton.compiler import CompiledKernel

from msda_op.options import DEFAULT_OPTIONS
from msda_op.triton import launch
from parity.compilation import CompileOnlyDriver

triton.runtime.driver.set_active(CompileOnlyDriver(90))
launch._capability_of = lambda tensor: (9, 0)
handed = []

def pretend_to_load(kernel):
    kernel.module, kernel.function = 1, 2
    kernel._run = lambda *arguments: handed.append(arguments[:3] + arguments[9:])

CompiledKernel._init_handles = pretend_to_load
plain_runs = []
run = triton.JITFunction.run
triton.JITFunction.run = lambda kernel, *args, **kwargs: plain_runs.append(kernel) or run(kernel, *args, **kwargs)

def call(num_queries, num_coordinates, head_dim, offset=0):
    value = torch.rand(offset + 2 * 14 * 2 * head_dim).bfloat16()[offset:].view(2, 14, 2, head_dim)
    scores = torch.rand(2, num_queries, 2, 2, 4)
    reference = torch.rand(2, num_queries, 2, num_coordinates) if num_coordinates else None
    tables = torch.tensor(((3, 4), (1, 2))), torch.tensor((0, 12))
    inputs = launch.Inputs(value, *tables, torch.rand(2, num_queries, 2, 2, 4, 2), scores, reference)
    output = launch.forward(inputs, DEFAULT_OPTIONS, thin_levels=True)
    names = {tensor.data_ptr(): name for name, tensor in inputs._asdict().items() if tensor is not None}
    names[output.data_ptr()] = "output"
    found = handed.pop()
    assert not handed
    addresses = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in found]
    is_address = [isinstance(each, int) and each >= 2**32 for each in addresses]
    return [names.get(each, "other" if far else each) for each, far in zip(addresses, is_address)]

report = {}
for num_coordinates in (0, 4):
    for head_dim in (32, 5):
        same = [(call(6, num_coordinates, head_dim), len(plain_runs)) for _ in range(3)]
        longer = (call(9, num_coordinates, head_dim), len(plain_runs))
        skewed = [(call(6, num_coordinates, head_dim, offset=1), len(plain_runs)) for _ in range(2)]
        report[f"{num_coordinates} {head_dim}"] = [same, longer, skewed]
        plain_runs.clear()
print(json.dumps(report))
"""


def test_launches_the_same_with_new_tensors() -> None:
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[3])
    finished = subprocess.run([sys.executable, "-c", LAUNCH], env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout)
    assert len(report) == 4
    for name, (same, longer, skewed) in report.items():
        (first, runs), *again = same
        assert runs == 1
        assert again == [[first, 1]] * 2  # what Triton was not asked to look at again
        inputs = {"value", "spatial_shapes", "level_start_index", "points", "scores", "output"}
        assert {each for each in first if isinstance(each, str)} - {"zeros"} >= inputs, name
        assert "other" not in first
        assert longer[1] == 2
        assert longer[0] != first
        # A value that starts elsewhere has a kernel of its own, or is copied for the Hopper kernels, which take D = 32.
        assert [runs for _, runs in skewed] == ([2, 2] if name.endswith(" 32") else [3, 3])
        assert skewed[0] == skewed[1]


def test_interpreted_and_traced_calls_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    value, scores = torch.rand(1, 6, 1, 4), torch.rand(1, 2, 1, 1, 3)
    assert launch_memory.describe_call((value, scores), DEFAULT_OPTIONS) is None
    monkeypatch.setattr(launch_memory.triton.knobs.runtime, "interpret", False)
    call = launch_memory.describe_call((value, None, scores), DEFAULT_OPTIONS)
    assert call == launch_memory.describe_call((value + 1, None, scores), DEFAULT_OPTIONS)
    assert call != launch_memory.describe_call((value.half(), None, scores), DEFAULT_OPTIONS)
    assert call != launch_memory.describe_call((value, None, scores), (DEFAULT_OPTIONS, True))
    assert launch_memory.describe_call((value.transpose(1, 3), None, scores), DEFAULT_OPTIONS) is None
    with torch._subclasses.FakeTensorMode() as mode:
        assert launch_memory.describe_call((mode.from_tensor(value), None, scores), DEFAULT_OPTIONS) is None


def test_the_oldest_calls_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = dict.fromkeys(range(3))
    monkeypatch.setattr(launch_memory, "_recipes", recipes)
    monkeypatch.setattr(launch_memory, "_MAX_CALLS", 3)
    value, output = torch.rand(1), torch.rand(1)

    class Kernel:
        arg_names = ("value", "output")

    launch = launch_memory.Launch(Kernel, 1, {"value": value, "output": output}, 1)
    launch_memory.remember("new", (value, None), output, launch, None)
    assert list(recipes) == [1, 2, "new"]
    launch_memory.remember("twice", (value, value), output, launch, None)
    assert "twice" not in recipes
