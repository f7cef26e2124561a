import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from models.criterion import Criterion
from models.deformable_detr import DeformableDetr
from models.layers import linear
from models.structures import ImageBatch, Targets


def test_shapes_and_dtypes(detector: DeformableDetr, image_batch: ImageBatch) -> None:
    output = detector(image_batch)
    assert output.logits.shape == (3, 2, 11, 5)
    assert output.boxes_cxcywh.shape == (3, 2, 11, 4)
    assert (output.proposals is not None) == detector.two_stage
    if output.proposals is not None:
        num_pixels = 8 * 8 + 4 * 4 + 2 * 2 + 1
        assert output.proposals.logits.shape == (2, num_pixels, 5)
        assert output.proposals.boxes_cxcywh.shape == (2, num_pixels, 4)


@pytest.mark.parametrize("levels", [1, 2, 3, 5])
def test_one_to_five_levels(levels: int, make_detector: Callable[..., DeformableDetr]) -> None:
    model = make_detector(box_refine=False, num_feature_levels=levels, d_model=64).eval()
    batch = ImageBatch(torch.randn(1, 3, 64, 96), torch.zeros(1, 64, 96, dtype=torch.bool))
    assert model(batch).boxes_cxcywh.isfinite().all()
    assert len(model.input_proj) == levels


def test_bf16_autocast_keeps_logits_and_boxes_in_float32(detector: DeformableDetr, image_batch: ImageBatch) -> None:
    expected = detector(image_batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = detector(image_batch)
    assert (output.logits.dtype, output.boxes_cxcywh.dtype) == (torch.float32, torch.float32)
    if output.proposals is not None:
        assert output.proposals.logits.dtype == output.proposals.boxes_cxcywh.dtype == torch.float32
    assert (output.logits - expected.logits).abs().max() > 0
    assert output.logits.isfinite().all()


def test_initial_classes_are_rare(detector: DeformableDetr) -> None:
    for head in detector.class_embed:
        torch.testing.assert_close(head.bias.sigmoid(), torch.full((5,), 0.01))


def test_initial_box_heads(detector: DeformableDetr) -> None:
    for index, head in enumerate(detector.bbox_embed):
        first = not detector.two_stage and head is detector.bbox_embed[0]
        assert head.layers[-1].weight.abs().max() == 0
        assert head.layers[-1].bias.tolist() == ([0, 0, -2, -2] if first else [0, 0, 0, 0]), index


def test_initial_projections(detector: DeformableDetr) -> None:
    for projection in detector.input_proj:
        fan_in, fan_out = nn.init._calculate_fan_in_and_fan_out(projection[0].weight)
        bound = (6 / (fan_in + fan_out)) ** 0.5
        assert 0.9 * bound < projection[0].weight.abs().max() <= bound
        assert projection[0].bias.abs().max() == 0


def test_heads_are_shared_or_cloned(make_detector: Callable[..., DeformableDetr]) -> None:
    base, refine = make_detector(box_refine=False), make_detector(box_refine=True)
    two_stage = make_detector(box_refine=True, two_stage=True)
    assert len(set(base.class_embed)) == len(set(base.bbox_embed)) == 1
    assert len(set(refine.class_embed)) == len(set(refine.bbox_embed)) == 3
    assert len(set(two_stage.class_embed)) == len(set(two_stage.bbox_embed)) == 4


def test_state_dict_keys_are_the_published_ones(detector: DeformableDetr) -> None:
    keys = set(detector.state_dict())
    refine = detector.transformer.decoder.bbox_embed is not None
    patterns = [
        r"backbone\.0\.body\.(conv1|bn1|layer[1-4])\..*",
        r"input_proj\.[0-3]\.[01]\.(weight|bias)",
        r"transformer\.level_embed",
        r"transformer\.encoder\.layers\.[01]\.(self_attn\.(sampling_offsets|attention_weights|value_proj|output_proj)"
        r"|norm[12]|linear[12])\.(weight|bias)",
        r"transformer\.decoder\.layers\.[0-2]\.((cross_attn\.(sampling_offsets|attention_weights|value_proj|output_proj)"
        r"|norm[123]|linear[12]|self_attn\.out_proj)\.(weight|bias)|self_attn\.in_proj_(weight|bias))",
        r"class_embed\.[0-3]\.(weight|bias)",
        r"bbox_embed\.[0-3]\.layers\.[0-2]\.(weight|bias)",
    ]
    if refine:
        patterns.append(r"transformer\.decoder\.bbox_embed\.[0-3]\.layers\.[0-2]\.(weight|bias)")
    if detector.two_stage:
        patterns.append(r"transformer\.decoder\.class_embed\.[0-3]\.(weight|bias)")
        patterns.append(r"transformer\.(enc_output|enc_output_norm|pos_trans|pos_trans_norm)\.(weight|bias)")
    else:
        patterns.append(r"query_embed\.weight")
        patterns.append(r"transformer\.reference_points\.(weight|bias)")
    assert [key for key in keys if not any(re.fullmatch(pattern, key) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not any(re.fullmatch(pattern, key) for key in keys)] == []


@pytest.mark.parametrize("counts", [(0, 0), (0, 3)])
def test_every_parameter_gets_a_finite_gradient(
    counts: tuple[int, int], detector: DeformableDetr, criterion: Criterion, image_batch: ImageBatch
) -> None:
    boxes = torch.tensor([0.5, 0.5, 0.3, 0.4]).expand(sum(counts), 4)
    targets = Targets(torch.zeros(sum(counts), dtype=torch.int64), boxes, counts)
    criterion(detector(image_batch), targets, lambda count: count).total.backward()
    without = [name for name, parameter in detector.named_parameters() if parameter.grad is None]
    assert without == []
    assert all(parameter.grad.isfinite().all() for parameter in detector.parameters())


def test_forward_reads_no_tensor_on_the_host(
    detector: DeformableDetr, image_batch: ImageBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *args: pytest.fail("the forward pass reads a tensor"))
    detector(image_batch)


@pytest.mark.gpu
def test_only_the_matcher_waits_for_the_gpu(
    detector: DeformableDetr, criterion: Criterion, image_batch: ImageBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    detector.cuda()
    batch = ImageBatch(image_batch.images.cuda(), image_batch.padding_mask.cuda())
    boxes = torch.tensor([0.5, 0.5, 0.3, 0.4]).expand(3, 4).cuda()
    targets = Targets(torch.zeros(3, dtype=torch.int64).cuda(), boxes, (0, 3))
    matches = criterion.matcher(detector(batch), targets)
    monkeypatch.setattr(criterion.matcher, "forward", lambda output, targets: matches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        criterion(detector(batch), targets, lambda count: count).total.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(parameter.grad is not None for parameter in detector.parameters())


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing_gives_the_same_gradients(
    autocast: bool,
    summed: bool,
    make_detector: Callable[..., DeformableDetr],
    image_batch: ImageBatch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if summed:  # as on a GPU
        pytest.importorskip("triton")
        monkeypatch.setattr(linear, "can_sum", lambda *tensors: torch.is_grad_enabled())
    plain, recomputed = (
        encoder_gradients(make_detector, gradient_checkpointing, image_batch, autocast)
        for gradient_checkpointing in (False, True)
    )
    torch.testing.assert_close(plain, recomputed)


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing_on_a_gpu_gives_the_same_gradients(
    autocast: bool, make_detector: Callable[..., DeformableDetr]
) -> None:
    large = ImageBatch(torch.randn(2, 3, 512, 768), torch.zeros(2, 512, 768, dtype=torch.bool))
    plain, recomputed = (
        encoder_gradients(make_detector, gradient_checkpointing, large, autocast, "cuda")
        for gradient_checkpointing in (False, True)
    )
    for expected, gradient in zip(plain, recomputed, strict=True):  # sums by atomics have no fixed order
        assert (gradient - expected).norm() <= 1e-3 * expected.norm()


def encoder_gradients(
    make_detector: Callable[..., DeformableDetr],
    gradient_checkpointing: bool,
    batch: ImageBatch,
    autocast: bool,
    device: str = "cpu",
) -> list[torch.Tensor]:
    model = make_detector(box_refine=True, two_stage=True, dropout=0.1, gradient_checkpointing=gradient_checkpointing)
    model.to(device)
    torch.manual_seed(1)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        output = model(ImageBatch(batch.images.to(device), batch.padding_mask.to(device)))
    (output.logits.sum() + output.boxes_cxcywh.sum()).backward()
    return [parameter.grad for parameter in model.transformer.encoder.parameters()]


def test_an_image_gives_the_same_boxes_alone_and_in_a_batch(detector: DeformableDetr) -> None:
    detector.eval()
    images = torch.randn(2, 3, 64, 96)
    mask = torch.zeros(2, 64, 96, dtype=torch.bool)
    both = detector(ImageBatch(images, mask))
    alone = detector(ImageBatch(images[:1], mask[:1]))
    torch.testing.assert_close(alone.boxes_cxcywh[:, 0], both.boxes_cxcywh[:, 0], atol=1e-5, rtol=0)
    torch.testing.assert_close(alone.logits[:, 0], both.logits[:, 0], atol=1e-5, rtol=0)


def pad(images: torch.Tensor, height: int, width: int) -> ImageBatch:
    padded = torch.zeros(len(images), 3, height, width)
    padded[:, :, : images.shape[2], : images.shape[3]] = images
    padding_mask = torch.ones(len(images), height, width, dtype=torch.bool)
    padding_mask[:, : images.shape[2], : images.shape[3]] = False
    return ImageBatch(padded, padding_mask)


class PooledPixels(nn.Module):
    """A backbone without borders: random mixtures of the pixels' means over squares of 8, 16 and 32."""

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        self.mixtures = [torch.randn(width, 3) for width in channels]

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        pooled = (nn.functional.avg_pool2d(images, size) for size in (8, 16, 32))
        return [torch.einsum("cd,bdhw->bchw", *pair) for pair in zip(self.mixtures, pooled, strict=True)]


def test_padding_does_not_move_the_boxes(detector: DeformableDetr) -> None:
    # Without the two parts that look across the border: the ResNet's convolutions and GroupNorm's statistics.
    detector.backbone[0] = PooledPixels((128, 256, 512))
    for projection in detector.input_proj:
        projection[1] = nn.Identity()
    for head in detector.bbox_embed:
        nn.init.normal_(head.layers[-1].weight, std=0.1)
    images = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        alone, padded = detector(pad(images, 64, 96)), detector(pad(images, 128, 192))
        unmasked = detector(ImageBatch(pad(images, 128, 192).images, torch.zeros(1, 128, 192, dtype=torch.bool)))
    assert (padded.boxes_cxcywh - alone.boxes_cxcywh).abs().max() <= 1e-4
    assert (padded.logits - alone.logits).abs().max() <= 1e-4
    assert (unmasked.boxes_cxcywh - alone.boxes_cxcywh).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"box_refine": False, "two_stage": True}, "box_refine must be true with two_stage"),
        ({"box_refine": False, "num_classes": 0}, "num_classes must be at least 1, got 0"),
        ({"box_refine": False, "d_model": 48}, "d_model must be a multiple of 32, got 48"),
    ],
)
def test_wrong_settings_are_refused(
    overrides: dict[str, Any], message: str, make_detector: Callable[..., DeformableDetr]
) -> None:
    with pytest.raises(ValueError, match=message):
        make_detector(**overrides)
