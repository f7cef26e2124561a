"""Test-wide set-up: where commands find packages, the interpreter without a GPU, Ctrl-C as in a terminal, `gpu`."""

import os
import signal

import pytest
import torch

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
