import torch
import torchvision
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from models.layers.frozen_norm import FoldedBatchNorm2d, folding_norms

CHANNELS = 6


def build(norm: type[FrozenBatchNorm2d]) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, CHANNELS, 3, bias=False), norm(CHANNELS), nn.ReLU(inplace=True)]
    model = nn.Sequential(*layers, nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False), norm(CHANNELS)))
    for buffer in model.buffers():
        buffer.uniform_(0.5, 2)
    return model.double()


def run(model: nn.Module, fold: bool) -> list[Tensor]:
    images = torch.randn(2, 3, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    images.requires_grad_()
    if fold:
        with folding_norms(model):
            output = model(images)
    else:
        output = model(images)
    output.square().sum().backward()
    gradients = [images.grad, *(parameter.grad for parameter in model.parameters())]
    return [output.detach(), *(gradient for gradient in gradients if gradient is not None)]


def test_folded_norms_give_outputs_and_gradients_of_frozen_ones() -> None:
    folded, expected = run(build(FoldedBatchNorm2d), fold=True), run(build(FrozenBatchNorm2d), fold=False)
    assert len(folded) == len(expected) == 4
    for one, other in zip(folded, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_norm_that_nothing_folds_normalises() -> None:
    model = build(FoldedBatchNorm2d)
    alone, expected = run(model, fold=False), run(build(FrozenBatchNorm2d), fold=False)
    assert all(torch.equal(one, other) for one, other in zip(alone, expected, strict=True))
    with folding_norms(model):
        pass
    assert all(not norm.folded for norm in model.modules() if isinstance(norm, FoldedBatchNorm2d))


def test_every_norm_of_a_resnet_is_folded() -> None:
    resnet = torchvision.models.resnet50(weights=None, norm_layer=FoldedBatchNorm2d)
    norms = [module for module in resnet.modules() if isinstance(module, FoldedBatchNorm2d)]
    with folding_norms(resnet):
        assert len(norms) == 53
        assert all(norm.folded for norm in norms)
        assert all(module.bias is not None for module in resnet.modules() if isinstance(module, nn.Conv2d))
    assert all(module.bias is None for module in resnet.modules() if isinstance(module, nn.Conv2d))
