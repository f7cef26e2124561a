"""Test-wide set-up: where commands find packages, the interpreter without a GPU, Ctrl-C as in a terminal, fixtures."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from models.environment import child_variables

# Commands that tests start find this project and whatever packages the tests themselves find, from any folder.
os.environ["PYTHONPATH"] = child_variables()["PYTHONPATH"]
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell, of which processes take it over
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` on a machine without one."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fills what `torch.empty` returns with NaN, so that an element nobody writes fails a comparison.

    PyTorch does so in its deterministic mode, which the op follows unless it is called with `deterministic=False`.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1000).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


class Commands:
    """Runs commands of this project on a CPU, each in a process of its own that is spared seconds of imports."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("run_commands.py"))],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *words: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a file, or a module behind `-m`, with its words in a folder; variables join those of this process."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        given = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        command = json.dumps({"words": words, "folder": str(folder), "variables": given})
        print(command, file=self._server.stdin, flush=True)
        return subprocess.CompletedProcess(words, *json.loads(self._server.stdout.readline()))

    def close(self) -> None:
        """Ends the process that the others are forked from."""
        self._server.communicate()


@pytest.fixture(scope="session")
def run_command() -> Iterator[Commands]:
    """Runs commands of this project, see `Commands`."""
    commands = Commands()
    yield commands
    commands.close()


def _join(
    rank: int, port: int, num_processes: int, function: Callable[..., None], arguments: tuple[object, ...]
) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_processes)
    function(rank, *arguments)
    dist.destroy_process_group()


@pytest.fixture
def run_group() -> Callable[..., None]:
    """Calls a function with its rank and further arguments in each of several processes, a group of Gloo's."""

    def run(num_processes: int, function: Callable[..., None], *arguments: object) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words: tuple[Any, ...] = (port, num_processes, function, arguments)
        mp.start_processes(_join, words, nprocs=num_processes, start_method="fork")

    return run
