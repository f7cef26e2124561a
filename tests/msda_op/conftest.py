"""Fixtures of the op's tests."""

import pytest
import torch

from msda_op import call_memory
from msda_op.triton import launch
from msda_op.triton.hopper import launch as hopper_launch
from msda_op.triton.hopper.support import CAPABILITY


@pytest.fixture(autouse=True)
def forgotten_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no call be run as one of another test, which may have changed what follows from it."""
    monkeypatch.setattr(call_memory, "_ways", {})


@pytest.fixture
def hopper_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets calls of the op take the Hopper kernels, where these support them, on the CPU too.

    Triton's interpreter runs them there, which has no compute capability of its own and takes the plain kernels.
    """
    if torch.cuda.is_available():
        if torch.cuda.get_device_capability() != CAPABILITY:
            pytest.skip("made for compute capability 9.0")
        return
    monkeypatch.setattr(launch, "_capability_of", lambda tensor: CAPABILITY)
    monkeypatch.setattr(hopper_launch, "_SORT_BLOCK", 32)  # a large sort takes the interpreter seconds
