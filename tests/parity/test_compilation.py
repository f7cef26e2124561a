"""No kernel is forgotten by the compile check."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Runs without the interpreter, which replaces the kernels when Triton is imported; compiles nothing.
RECORD = """
import json
from parity.compilation import entry_kernels, record_launches, targeting
from parity.shipped_calls import shipped_calls

reached = {}
for call in shipped_calls():
    with targeting(90), record_launches(compiles=False) as launches:
        call.run()
    reached[call.name] = [(each.kernel, each.grid[0], each.compiled) for each in launches]
print(json.dumps({"kernels": sorted(entry_kernels()), "reached": reached}))
"""


@pytest.fixture(scope="module")
def recorded() -> dict:
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", RECORD]
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def test_every_kernel_is_reached_by_a_shipped_call(recorded: dict) -> None:
    reached = {kernel for launches in recorded["reached"].values() for kernel, *_ in launches}
    assert reached == set(recorded["kernels"])
    assert {"forward.forward_kernel", "backward.backward_kernel", "fused_norm_kernels.backward_kernel"} <= reached


def test_a_path_without_a_call_would_be_seen(recorded: dict) -> None:
    forward = {name: launches for name, launches in recorded["reached"].items() if "forward" in name}
    reached = {kernel for launches in forward.values() for kernel, *_ in launches}
    assert "backward.backward_kernel" in set(recorded["kernels"]) - reached


def test_calls_have_names_of_their_own_and_launch_something(recorded: dict) -> None:
    assert len(recorded["reached"]) > 20
    assert all(launches for launches in recorded["reached"].values())


def test_recording_alone_compiles_nothing_and_sees_the_grid(recorded: dict) -> None:
    (kernel, programs, compiled), *_ = recorded["reached"]["wide bf16 forward"]
    assert kernel == "forward.forward_kernel"
    assert programs > 1000
    assert compiled is None
