"""Norms inside convolutions."""

import pytest
import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from models.export.folding import fold_batch_norms, freeze_batch_norms
from models.layers.frozen_norm import FoldedBatchNorm2d


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.SyncBatchNorm, FrozenBatchNorm2d])
@pytest.mark.parametrize("bias", [False, True])
def test_folded_network_computes_the_same(norm, bias):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3, bias=bias), norm(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    for tensor in network[1].state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 2)
    images = torch.randn(2, 3, 5, 6)
    expected = network(images)
    assert fold_batch_norms(network) == 1
    assert isinstance(network[1], nn.Identity)
    torch.testing.assert_close(network(images), expected)


def test_what_follows_no_convolution_stays():
    network = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4)).eval()
    assert fold_batch_norms(network) == 0
    assert isinstance(network[0], nn.BatchNorm2d)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.SyncBatchNorm])
def test_frozen_network_computes_the_same(norm, affine):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), norm(4, eps=1e-3, affine=affine), nn.GroupNorm(2, 4)).eval()
    for tensor in network[1].state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 2)
    images = torch.randn(2, 3, 5, 6)
    expected = network(images)
    freeze_batch_norms(network)
    assert isinstance(network[1], FoldedBatchNorm2d)
    assert network[1].fused
    torch.testing.assert_close(network(images), expected)


@pytest.mark.parametrize("change", [fold_batch_norms, freeze_batch_norms])
def test_a_norm_without_statistics_is_refused(change):
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False))
    with pytest.raises(ValueError, match="must hold running statistics"):
        change(network)
