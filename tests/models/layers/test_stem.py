import pytest
import torch
from torch import nn
from torch.nn import functional

from models.backbone import ResNetBackbone
from models.layers.frozen_norm import FoldedBatchNorm2d
from models.layers.stem import convolve_blocks, fits_blocks, norm_relu_pool

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("height", "width"), [(1, 1), (8, 12), (9, 12), (8, 15), (33, 31)])
@pytest.mark.parametrize("channels_last", [True, False])
def test_the_convolution_of_blocks_is_that_of_pixels(height: int, width: int, channels_last: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, height, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(5, 3, 7, 7, generator=generator, dtype=torch.float64)
    if channels_last:
        images, weight = (each.contiguous(memory_format=torch.channels_last) for each in (images, weight))
    results = []
    for convolve in (convolve_blocks, lambda x, w: functional.conv2d(x, w, stride=2, padding=3)):
        leaves = [images.clone().requires_grad_(), weight.clone().requires_grad_()]
        output = convolve(*leaves)
        upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        results.append([output, *torch.autograd.grad(output, leaves, upstream)])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected)


def test_only_the_published_convolution_fits() -> None:
    assert fits_blocks(nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False))
    others = [
        nn.Conv2d(3, 64, 7, stride=2, padding=3),
        nn.Conv2d(3, 64, 7, stride=1, padding=3, bias=False),
        nn.Conv2d(3, 64, 3, stride=2, padding=1, bias=False),
        nn.Conv2d(3, 64, 7, stride=2, padding=3, dilation=2, bias=False),
    ]
    assert not any(fits_blocks(other) for other in others)


def make_norm(channels: int) -> FoldedBatchNorm2d:
    norm = FoldedBatchNorm2d(channels)
    generator = torch.Generator().manual_seed(1)
    for name, buffer in norm.named_buffers():
        values = torch.randn(channels, generator=generator)
        buffer.copy_(values.abs() + 0.3 if name == "running_var" else values)
    return norm.to(DEVICE)


@pytest.mark.parametrize("shape", [(2, 64, 6, 8), (1, 20, 7, 5), (3, 70, 1, 9), (0, 8, 4, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_relu_and_pooling_by_one_kernel(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from models.layers.fused_stem import frozen_norm_relu_pool

    norm, pool = make_norm(shape[1]), nn.MaxPool2d(3, stride=2, padding=1)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    output = frozen_norm_relu_pool(x.contiguous(memory_format=torch.channels_last), norm)
    expected = norm(x.double()).relu()
    expected = pool(expected) if len(x) else expected[..., ::2, ::2]
    assert output.dtype == dtype
    assert output.shape == expected.shape
    assert output.is_contiguous(memory_format=torch.channels_last)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), expected, rtol=eps, atol=2e-6)
    assert not len(x) or (output > 0).any()


def test_what_is_not_a_number_stays() -> None:
    pytest.importorskip("triton")
    from models.layers.fused_stem import frozen_norm_relu_pool

    x = torch.zeros(1, 4, 6, 6, device=DEVICE)
    x[0, 1, 2, 3] = torch.nan
    output = frozen_norm_relu_pool(x, make_norm(4))
    expected = torch.zeros(1, 4, 3, 3, dtype=torch.bool, device=DEVICE)
    expected[0, 1, 1, 1:] = True
    assert torch.equal(output.isnan(), expected)


def test_elsewhere_it_is_composed() -> None:
    norm, pool = make_norm(8).cpu(), nn.MaxPool2d(3, stride=2, padding=1)
    x = torch.randn(2, 8, 7, 7)
    assert torch.equal(norm_relu_pool(x, norm, pool), pool(norm(x).relu()))


@pytest.mark.gpu
@pytest.mark.parametrize("norm", ["frozen", "batch"])
def test_the_stem_on_a_gpu_agrees_with_pytorchs(norm: str) -> None:
    torch.manual_seed(0)
    settings = {"name": "resnet18", "weights": "none", "norm": norm, "dilation": False, "finest_stride": 4}
    settings |= {"num_feature_levels": 4, "channels_last": True, "fold_norms": False}
    images = torch.randn(2, 3, 131, 200, device="cuda")
    results = []
    for fused in (True, False):
        torch.manual_seed(1)
        backbone = ResNetBackbone(**settings, fused_norm=fused).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            levels = backbone(images)
        sum(level.float().square().mean() for level in levels).backward()
        trained = {name: p.grad for name, p in backbone.named_parameters() if p.grad is not None}
        results.append([*levels, *trained.values()])
        assert ("body.conv1.weight" in trained) == (norm == "batch")
    for mine, expected in zip(*results, strict=True):
        assert (mine - expected).norm() <= 0.3 * expected.norm()  # a tap that is off by one makes it more than 1
