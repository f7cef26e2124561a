import json

import pytest
import torch

from models.environment import allow_tf32, describe_environment


def test_description_names_versions_and_commit():
    description = json.loads(json.dumps(describe_environment()))
    assert torch.__version__.startswith(description["packages"]["torch"].split("+")[0])
    assert set(description) >= {"command", "python", "gpus", "commit", "dirty", "tf32"}


@pytest.fixture
def tf32_flags():
    """Puts PyTorch's process-wide switches back after the test."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.usefixtures("tf32_flags")
@pytest.mark.parametrize("allowed", [True, False])
def test_tf32_switch_reaches_products_and_convolutions(allowed):
    allow_tf32(not allowed)
    allow_tf32(allowed)
    assert torch.backends.cuda.matmul.allow_tf32 is allowed
    assert torch.backends.cudnn.allow_tf32 is allowed
