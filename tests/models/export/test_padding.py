"""An image's detections do not depend on how far it is padded."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from models.export.certificate import Tolerance, compare_detections
from models.export.padding import PaddingGuard, UnpaddedGroupNorm

PADDING = {
    torch.float32: Tolerance(score=1e-3, box_px=0.5, min_score=0.0),
    torch.bfloat16: Tolerance(score=2e-3, box_px=1.0, min_score=0.0),
}
"""What padding to a bucket may move, in pixels of the original, whose longer side has 280."""


def padded(inputs, height, width):
    images, sizes_hw, original_sizes_hw = inputs
    batch = torch.randint(256, (1, 3, height, width), dtype=torch.uint8)  # what lies in the padding must not matter
    batch[:, :, : images.shape[2], : images.shape[3]] = images
    return batch, sizes_hw, original_sizes_hw


@pytest.mark.parametrize("dtype", PADDING)
@pytest.mark.parametrize(("height", "width"), [(128, 192), (192, 256)])
def test_padding_to_a_bucket_moves_nothing(any_model, as_module, image_inputs, height, width, dtype):
    module = as_module(any_model, dtype)
    alone = module(*image_inputs)
    found = compare_detections(alone, module(*padded(image_inputs, height, width)))
    assert found.within(PADDING[dtype]), found
    assert alone[0].std() > 1e-4, "detections that are all alike would agree in any case"


@pytest.mark.parametrize("dtype", PADDING)
def test_without_the_guard_padding_moves_boxes(any_model, as_module, image_inputs, dtype, monkeypatch):
    module = as_module(any_model, dtype)
    monkeypatch.setattr(PaddingGuard, "on", lambda self, mask: nullcontext())
    found = compare_detections(module(*image_inputs), module(*padded(image_inputs, 192, 256)))
    assert not found.within(PADDING[dtype])


def test_a_bucket_off_the_stride_moves_boxes(any_model, as_module, image_inputs):
    """The coarsest pixels then stand for another share of the image, which is why buckets are rounded up."""
    module = as_module(any_model)
    assert not compare_detections(module(*image_inputs), module(*padded(image_inputs, 150, 211))).within(
        PADDING[torch.float32]
    )


def test_group_norm_leaves_padding_out():
    torch.manual_seed(0)
    plain = nn.GroupNorm(4, 8)
    nn.init.normal_(plain.weight)
    nn.init.normal_(plain.bias)
    network = nn.Sequential(nn.Conv2d(3, 8, 1), plain)
    features = torch.randn(2, 3, 6, 10)
    expected = network(features[:, :, :4, :7])
    guard = PaddingGuard(network)
    assert isinstance(network[1], UnpaddedGroupNorm)
    assert network.state_dict().keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert torch.equal(network(features[:, :, :4, :7]), expected), "without a mask nothing changes"
    mask = torch.ones(2, 6, 10, dtype=torch.bool)
    mask[:, :4, :7] = False
    with guard.on(mask):
        actual = network(features)[:, :, :4, :7]
    torch.testing.assert_close(actual, expected)
    assert not torch.allclose(network(features)[:, :, :4, :7], expected)


def test_convolutions_and_pooling_do_not_see_padding():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1))
    features = torch.randn(1, 3, 16, 32)
    expected = network(features[:, :, :12, :20])
    mask = torch.ones(1, 16, 32, dtype=torch.bool)
    mask[:, :12, :20] = False
    with PaddingGuard(network).on(mask):
        actual = network(features.masked_fill(mask, torch.inf))
    torch.testing.assert_close(actual[:, :, :3, :5], expected)


def test_features_keep_their_layout_in_memory():
    """Convolutions would bring them into another one and back."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last)
    given = []
    network[1].register_forward_hook(lambda layer, arguments, output: given.append(arguments[0]))
    features = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    mask = torch.zeros(2, 8, 8, dtype=torch.bool)
    mask[:, 5:] = True
    with torch.no_grad(), PaddingGuard(network).on(mask):
        network(features)
    assert given[0].is_contiguous(memory_format=torch.channels_last)
    assert (given[0][:, :, 5:] == 0).all()
