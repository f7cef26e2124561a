"""A detector small enough for tests, and inputs for it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.backbone import ResNetBackbone
from models.criterion import Criterion
from models.cuda_graphs import TrainingGraphs
from models.deformable_detr import DeformableDetr
from models.deformable_transformer import DeformableTransformer
from models.denoising import ContrastiveDenoising
from models.dino import Dino, DinoTransformer
from models.matcher import HungarianMatcher
from models.position_encoding import SinePositionEncoding
from models.structures import DetectorOutput, ImageBatch, Targets, take_apart

torch.set_num_threads(1)  # tensors this small only wait for a second thread

NUM_CLASSES = 5
TRANSFORMER = {
    "d_model": 32,
    "num_heads": 4,
    "num_encoder_layers": 2,
    "num_decoder_layers": 3,
    "num_feature_levels": 4,
    "num_encoder_points": 2,
    "num_decoder_points": 3,
    "num_queries": 11,
    "dim_feedforward": 64,
    "dropout": 0.0,
    "two_stage": False,
    "inverse_sigmoid_eps": 1e-5,
    "gradient_checkpointing": False,
    "backend": "reference",
    "fused": True,
    "fused_norm": True,
}
VARIANTS: dict[str, dict[str, bool]] = {
    "base": {"box_refine": False, "two_stage": False},
    "refine": {"box_refine": True, "two_stage": False},
    "two_stage": {"box_refine": True, "two_stage": True},
}


def build_detector(box_refine: bool, num_classes: int = NUM_CLASSES, **overrides: Any) -> DeformableDetr:
    torch.manual_seed(0)
    settings = TRANSFORMER | overrides
    return DeformableDetr(
        backbone=ResNetBackbone(
            name="resnet18",
            weights="none",
            norm="batch",
            dilation=False,
            finest_stride=8,
            channels_last=False,
            fold_norms=True,
            fused_norm=True,
            num_feature_levels=settings["num_feature_levels"],
        ),
        position_encoding=SinePositionEncoding(channels=settings["d_model"], temperature=10000, offset=-0.5),
        transformer=DeformableTransformer(**settings),
        graphs=TrainingGraphs(enabled=False, max_sizes=1),
        num_classes=num_classes,
        box_refine=box_refine,
        weights=None,
    )


@pytest.fixture
def make_detector() -> Callable[..., DeformableDetr]:
    """Builds a tiny Deformable-DETR from overrides of its settings."""
    return build_detector


@pytest.fixture(params=VARIANTS)
def detector(request: pytest.FixtureRequest) -> DeformableDetr:
    """Each published variant, tiny."""
    return build_detector(**VARIANTS[request.param])


def build_dino(num_classes: int = NUM_CLASSES, **overrides: Any) -> Dino:
    torch.manual_seed(0)
    settings = {name: value for name, value in TRANSFORMER.items() if name != "two_stage"}
    settings |= {"inverse_sigmoid_eps": 1e-3} | overrides
    return Dino(
        backbone=ResNetBackbone(
            name="resnet18",
            weights="none",
            norm="batch",
            dilation=False,
            finest_stride=8,
            channels_last=False,
            fold_norms=True,
            fused_norm=True,
            num_feature_levels=settings["num_feature_levels"],
        ),
        position_encoding=SinePositionEncoding(channels=settings["d_model"], temperature=20, offset=0.0),
        transformer=DinoTransformer(**settings),
        denoising=ContrastiveDenoising(num_queries=6, max_queries=40, label_noise_ratio=0.5, box_noise_scale=1.0),
        graphs=TrainingGraphs(enabled=False, max_sizes=1),
        num_classes=num_classes,
        weights=None,
    )


@pytest.fixture
def make_dino() -> Callable[..., Dino]:
    """Builds a tiny DINO from overrides of its transformer's settings."""
    return build_dino


@pytest.fixture
def dino() -> Dino:
    """A tiny DINO whose attention and box heads have left their initialisation, where everything is alike."""
    model = build_dino()
    for name, parameter in model.named_parameters():
        if any(word in name for word in ("sampling_offsets.weight", "attention_weights.weight", "bbox_embed")):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.fixture
def criterion() -> Criterion:
    """The published criterion."""
    matcher = HungarianMatcher(cost_class=2, cost_bbox=5, cost_giou=2, focal_alpha=0.25, focal_gamma=2)
    weights = {"loss_ce": 2, "loss_bbox": 5, "loss_giou": 2}
    return Criterion(matcher=matcher, loss_weights=weights, focal_alpha=0.25, focal_gamma=2)


@pytest.fixture
def image_batch() -> ImageBatch:
    """Two images, 48x64 and 64x50, padded to 64x64."""
    generator = torch.Generator().manual_seed(0)
    padding_mask = torch.zeros(2, 64, 64, dtype=torch.bool)
    padding_mask[0, 48:] = True
    padding_mask[1, :, 50:] = True
    images = torch.randn(2, 3, 64, 64, generator=generator)
    return ImageBatch(images.masked_fill(padding_mask.unsqueeze(1), 0.0), padding_mask)


@pytest.fixture
def one_target() -> Targets:
    """A box in the first of two images."""
    return Targets(torch.tensor([1]), torch.tensor([[0.5, 0.5, 0.2, 0.2]]), (1, 0))


@pytest.fixture
def make_batch() -> Callable[..., ImageBatch]:
    """Draws two images of a height, the second padded from 48 to 64 columns."""

    def make(height: int = 64, seed: int = 0) -> ImageBatch:
        generator = torch.Generator().manual_seed(seed)
        padding_mask = torch.zeros(2, height, 64, dtype=torch.bool)
        padding_mask[1, :, 48:] = True
        images = torch.randn(2, 3, height, 64, generator=generator)
        return ImageBatch(images.masked_fill(padding_mask.unsqueeze(1), 0.0), padding_mask)

    return make


@pytest.fixture
def weigh_outputs() -> Callable[[DetectorOutput], Tensor]:
    """Makes a loss to which every differentiable output adds, each number with a weight of its own."""

    def weigh(output: DetectorOutput) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        tensors = [tensor for tensor in take_apart(output)[0] if tensor.requires_grad]
        weights = [torch.randn(tensor.shape, generator=generator).to(tensor.device) for tensor in tensors]
        return torch.stack([(tensor * weight).sum() for tensor, weight in zip(tensors, weights, strict=True)]).sum()

    return weigh


@pytest.fixture
def gradients_of() -> Callable[[nn.Module], dict[str, Tensor]]:
    """Copies the gradients of a module, by name of the parameter."""

    def copy(module: nn.Module) -> dict[str, Tensor]:
        return {name: each.grad.clone() for name, each in module.named_parameters() if each.grad is not None}

    return copy


@pytest.fixture
def differing() -> Callable[..., dict[str, float]]:
    """Finds the largest difference of each tensor that is not equal bit for bit, or is on one side alone."""

    def compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
        names = found.keys() ^ expected.keys()
        unequal = {name for name in found.keys() & expected.keys() if not torch.equal(found[name], expected[name])}
        return dict.fromkeys(names, float("inf")) | {
            name: float((found[name] - expected[name]).abs().max()) for name in unequal
        }

    return compare
