"""Fixtures of the op's tests."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fills what `torch.empty` returns with NaN, so that an element nobody writes fails a comparison.

    PyTorch does so in its deterministic mode, which the op follows unless it is called with `deterministic=False`.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1000).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
