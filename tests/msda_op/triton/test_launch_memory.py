"""A call like an earlier one launches what that one launched, with its own tensors."""

import json
import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch

from msda_op.triton import launch_memory
from msda_op.triton.kernel_launch import Launch
from msda_op.triton.launch_memory import write_recipe

# Runs without the interpreter, which has nothing to remember. Kernels are compiled for a GPU that need not be there,
# and what Triton would hand to its launcher is kept: grid, stream, kernel and arguments, tensors and addresses as their
# place in the call.
LAUNCH = """
import json
import sys

import torch
import triton
from triton.compiler import CompiledKernel

from msda_op import backends, call_memory, fused_ms_deform_attn, ms_deform_attn
from msda_op.call_memory import recall
from msda_op.triton import launch
from parity.compilation import CompileOnlyDriver

triton.runtime.driver.set_active(CompileOnlyDriver(90))
backends._is_interpreted = lambda: True  # the tensors are on the CPU
launch._capability_of = lambda tensor: (9, 0)
handed = []

def pretend_to_load(kernel):
    kernel.module, kernel.function = 1, 2
    kernel._run = lambda *arguments: handed.append(arguments[:6] + arguments[9:])

CompiledKernel._init_handles = pretend_to_load
plain_runs = []
run = triton.JITFunction.run
triton.JITFunction.run = lambda kernel, *args, **kwargs: plain_runs.append(kernel) or run(kernel, *args, **kwargs)

def call(num_queries, num_coordinates, head_dim, offset=0):
    value = torch.rand(offset + 2 * 14 * 2 * head_dim).bfloat16()[offset:].view(2, 14, 2, head_dim)
    scores = torch.rand(2, num_queries, 2, 2, 4)
    reference = torch.rand(2, num_queries, 2, num_coordinates) if num_coordinates else None
    points = torch.rand(2, num_queries, 2, 2, 4, 2)
    samples = (reference, points, scores) if num_coordinates else (points, scores)
    op = fused_ms_deform_attn if num_coordinates else ms_deform_attn
    inputs = (value, *samples)
    for tensor in inputs:
        tensor.requires_grad_(tensor is not reference)
    output = op(value, ((3, 4), (1, 2)), None, *samples, backend="triton")
    attention = recall(next(reversed(call_memory._ways)))
    tensors = dict(value=value, points=points, scores=scores, reference=reference, output=output)
    tensors |= dict(zip(("spatial_shapes", "level_start_index"), attention.tables))
    forward = names_of(handed.pop(), tensors)
    assert not handed
    upstream = torch.rand_like(output)
    grads = torch.autograd.grad(output, [tensor for tensor in inputs if tensor.requires_grad], upstream)
    tensors |= dict(grad_output=upstream, grad_points=grads[1], grad_scores=grads[2])
    backward = names_of(handed.pop(), tensors)
    assert not handed
    return forward, backward

def names_of(found, tensors):
    names = {tensor.data_ptr(): name for name, tensor in tensors.items() if tensor is not None}
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
    finished = subprocess.run([sys.executable, "-c", LAUNCH], env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout)
    assert len(report) == 4
    for name, (same, longer, skewed) in report.items():
        (first, runs), *again = same
        assert runs == 2  # forward and backward
        assert again == [[first, 2]] * 2  # what Triton was not asked to look at again
        forward, backward = (set(filter(lambda each: isinstance(each, str), arguments)) for arguments in first)
        inputs = {"value", "spatial_shapes", "level_start_index", "points", "scores"}
        inputs |= {"reference"} if name.startswith("4") else set()
        assert forward >= inputs | {"output"}, name
        assert backward >= inputs | {"grad_output", "grad_points", "grad_scores"}, name
        assert "other" not in forward
        assert first[1].count("other") == 1, name  # the gradient of value, before it is rounded
        assert longer[1] == 4
        assert longer[0] != first
        # A value that starts elsewhere has kernels of its own, or is copied for the Hopper kernels, which take D = 32.
        assert [runs for _, runs in skewed] == ([4, 4] if name.endswith(" 32") else [6, 6])
        assert skewed[0] == skewed[1]


class Kernel:
    """A kernel of two tensors and a number."""

    arg_names = ("value", "size", "output")


def keep(handed: list[tuple], num_programs: int, *arguments: Any) -> None:
    handed.append((num_programs, *arguments))


@pytest.fixture(autouse=True)
def kept_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a kernel be a list of what it was started with."""
    monkeypatch.setattr(launch_memory, "bind", lambda handed, num_programs: partial(keep, handed, num_programs))


def test_recipe_puts_addresses_in_their_places() -> None:
    value, output = torch.rand(4), torch.rand(4)
    launch = Launch(Kernel, 7, {"value": value, "size": 4, "output": output}, 1)
    handed: list[tuple] = []
    recipe = write_recipe(launch, handed, (output, None, value))
    assert recipe is not None
    others = torch.rand(4), torch.rand(4)
    recipe.run((others[0], None, others[1]))
    assert handed == [(7, others[1].data_ptr(), 4, others[0].data_ptr())]


def test_no_recipe_for_copies_for_a_tensor_given_twice_and_from_the_interpreter() -> None:
    value, output = torch.rand(4), torch.rand(4)
    launch = Launch(Kernel, 7, {"value": value, "size": 4, "output": output}, 1)
    assert write_recipe(launch, [], (value.clone(), output)) is None
    assert write_recipe(launch, [], (value,)) is None
    twice = launch._replace(arguments={"value": value, "size": 4, "output": value})
    assert write_recipe(twice, [], (value, value)) is None
    assert write_recipe(launch, None, (value, output)) is None
