import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from models.compilation import compile_regions
from models.position_encoding import NORMALIZATION_EPS, SinePositionEncoding
from models.structures import LevelGeometry
from parity.tolerances import GRADIENT, OUTPUT, Bound

pytest.importorskip("triton")

from models.layers.fused_positions import embed_positions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PUBLISHED = {"deformable_detr": (10000.0, -0.5), "dino": (20.0, 0.0)}
# Levels, images, channels: more pixels than a tile of sums and rows longer than a block of counts; one level and row.
SIZES = {
    "levels": (((9, 14), (5, 7), (3, 4), (1, 1)), 2, 32),
    "large": (((3, 139), (137, 2), (13, 21)), 1, 20),
    "one": (((1, 6),), 3, 4),
    "wide": (((5, 4), (2, 2)), 1, 264),
}


pytestmark = pytest.mark.usefixtures("poisoned_memory")


def make_geometry(shapes: tuple[tuple[int, int], ...], batch_size: int, padding: str) -> LevelGeometry:
    """Returns levels without padding, padded at the right and below, or with holes; each line keeps a pixel if asked.

    In "holes" the first row and column of each level are unpadded, so that no line is all padding.
    """
    generator = torch.Generator().manual_seed(0)
    masks = []
    for height, width in shapes:
        mask = torch.zeros(batch_size, height, width, dtype=torch.bool)
        if padding == "holes":
            mask[:, 1:, 1:] = torch.rand(batch_size, height - 1, width - 1, generator=generator) < 0.4
        if padding == "borders":
            mask[0, math.ceil(0.7 * height) :] = True
            mask[-1, :, math.ceil(0.6 * width) :] = True
        masks.append(mask.flatten(1))
    return LevelGeometry(torch.cat(masks, dim=1).to(DEVICE), shapes, torch.ones(batch_size, len(shapes), 2))


def make_tensors(geometry: LevelGeometry, channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the embedding, float32, and an upstream gradient."""
    generator = torch.Generator().manual_seed(1)
    level_embed = torch.randn(len(geometry.spatial_shapes), channels, generator=generator)
    upstream = torch.randn(*geometry.padding_mask.shape, channels, generator=generator)
    return level_embed.to(DEVICE), upstream.to(DEVICE, dtype)


def encode_exactly(geometry: LevelGeometry, level_embed: Tensor, temperature: float, offset: float) -> Tensor:
    """Encodes in float64."""
    half = level_embed.shape[1] // 2
    index = torch.arange(half, dtype=torch.float64, device=level_embed.device)
    wavelengths = temperature ** (2 * (index // 2) / half)
    sizes = [height * width for height, width in geometry.spatial_shapes]
    encoded = []
    for level, mask in enumerate(geometry.padding_mask.split(sizes, dim=1)):
        valid = (~mask.unflatten(1, geometry.spatial_shapes[level])).double()
        halves = []
        for dim in (1, 2):
            angles = 2 * math.pi * (valid.cumsum(dim) + offset) / (valid.sum(dim, keepdim=True) + NORMALIZATION_EPS)
            phases = angles.unsqueeze(-1) / wavelengths
            halves.append(torch.where(index % 2 == 0, phases.sin(), phases.cos()))
        encoded.append(torch.cat(halves, dim=-1).flatten(1, 2) + level_embed[level].double())
    return torch.cat(encoded, dim=1)


def in_a_line(geometry: LevelGeometry) -> Tensor:
    """Tells of each pixel whether its row and its column have an unpadded one, bool [B, S]."""
    sizes = [height * width for height, width in geometry.spatial_shapes]
    found = []
    for shape, mask in zip(geometry.spatial_shapes, geometry.padding_mask.split(sizes, dim=1), strict=True):
        valid = ~mask.unflatten(1, shape)
        found.append((valid.any(1, keepdim=True) & valid.any(2, keepdim=True)).flatten(1))
    return torch.cat(found, dim=1)


def fuse(geometry: LevelGeometry, temperature: float, offset: float, dtype: torch.dtype, level_embed: Tensor) -> Tensor:
    settings = (temperature, offset, NORMALIZATION_EPS, dtype)
    return embed_positions(geometry.padding_mask, geometry.spatial_shapes, level_embed, *settings)


def compose(
    geometry: LevelGeometry, temperature: float, offset: float, dtype: torch.dtype, level_embed: Tensor
) -> Tensor:
    encoding = SinePositionEncoding(channels=level_embed.shape[1], temperature=temperature, offset=offset)
    encoding.fused = False
    return encoding.embed_levels(geometry, level_embed, dtype)


def differentiate(function: Callable[[Tensor], Tensor], level_embed: Tensor, upstream: Tensor) -> list[Tensor]:
    """Returns the output and the gradient of the embedding."""
    leaf = level_embed.detach().requires_grad_()
    output = function(leaf)
    return [output.detach(), *torch.autograd.grad(output, leaf, upstream.to(output.dtype))]


def check(actual: Tensor, expected: Tensor, competitor: Tensor, bound: Bound, dtype: torch.dtype) -> None:
    """Requires an error within the bound, and that one of the largest number times 0.9 is not."""
    limit = bound.limit(float((competitor - expected).abs().max()), float(expected.abs().max()), dtype)
    assert (actual - expected).abs().max() <= limit
    assert (actual * 0.9 - expected).abs().max() > limit


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("padding", "published"), [("none", "deformable_detr"), ("borders", "deformable_detr"), ("holes", "dino")]
)
def test_encodings_against_float64(size: str, padding: str, published: str) -> None:
    shapes, batch_size, channels = SIZES[size]
    geometry = make_geometry(shapes, batch_size, padding)
    level_embed, _ = make_tensors(geometry, channels, torch.float32)
    clear = in_a_line(geometry)
    expected = encode_exactly(geometry, level_embed, *PUBLISHED[published])
    for dtype in DTYPES:
        actual = fuse(geometry, *PUBLISHED[published], dtype, level_embed)
        competitor = compose(geometry, *PUBLISHED[published], dtype, level_embed)
        assert actual.dtype == dtype
        assert actual.is_contiguous()
        assert actual.isfinite().all()
        assert (actual - expected).abs().max() <= 2.1  # where a line is all padding, too
        check(actual[clear], expected[clear], competitor[clear], OUTPUT, dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("embed_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_against_float64(size: str, embed_dtype: torch.dtype, dtype: torch.dtype) -> None:
    shapes, batch_size, channels = SIZES[size]
    geometry = make_geometry(shapes, batch_size, "borders")
    level_embed, upstream = make_tensors(geometry, channels, dtype)
    level_embed = level_embed.to(embed_dtype)
    output, gradient = differentiate(partial(fuse, geometry, 20.0, 0.0, dtype), level_embed, upstream)
    _, competitor = differentiate(partial(compose, geometry, 20.0, 0.0, dtype), level_embed, upstream)
    sizes = [height * width for height, width in shapes]
    expected = torch.stack([level.sum((0, 1)) for level in upstream.double().split(sizes, dim=1)])
    assert (output.dtype, gradient.dtype) == (dtype, embed_dtype)
    check(gradient, expected, competitor, GRADIENT, embed_dtype)


def test_every_argument_matters() -> None:
    geometry = make_geometry(((5, 4), (2, 3)), 2, "holes")
    level_embed, _ = make_tensors(geometry, 8, torch.float32)
    expected = fuse(geometry, 20.0, 0.0, torch.float32, level_embed)
    turned = LevelGeometry(geometry.padding_mask, ((4, 5), (3, 2)), geometry.valid_ratios)
    unpadded = make_geometry(((5, 4), (2, 3)), 2, "none")
    others = [
        fuse(geometry, 21.0, 0.0, torch.float32, level_embed),
        fuse(geometry, 20.0, -0.1, torch.float32, level_embed),
        fuse(geometry, 20.0, 0.0, torch.float32, level_embed.flip(0)),
        fuse(turned, 20.0, 0.0, torch.float32, level_embed),
        fuse(unpadded, 20.0, 0.0, torch.float32, level_embed),
    ]
    assert all((other - expected).abs().max() > 1e-2 for other in others)


def test_non_contiguous_tensors() -> None:
    geometry = make_geometry(((9, 14), (5, 7)), 3, "holes")
    level_embed, upstream = make_tensors(geometry, 20, torch.float32)
    strided = LevelGeometry(geometry.padding_mask.t().contiguous().t(), geometry.spatial_shapes, geometry.valid_ratios)
    across = (level_embed.t().contiguous().t(), upstream.transpose(0, 2).contiguous().transpose(0, 2))
    assert not any(tensor.is_contiguous() for tensor in (strided.padding_mask, *across))
    straight = differentiate(partial(fuse, geometry, 20.0, 0.0, torch.float32), level_embed, upstream)
    for one, other in zip(
        differentiate(partial(fuse, strided, 20.0, 0.0, torch.float32), *across), straight, strict=True
    ):
        assert torch.equal(one, other)


def test_results_repeat_bit_for_bit() -> None:
    geometry = make_geometry(((37, 22), (5, 7)), 2, "borders")
    tensors = make_tensors(geometry, 20, torch.bfloat16)
    results = [differentiate(partial(fuse, geometry, 20.0, -0.5, torch.bfloat16), *tensors) for _ in range(2)]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("shapes", "batch_size"), [(((2, 3), (1, 2)), 0), (((2, 0), (0, 2)), 2)])
def test_no_pixels_give_no_encodings(shapes: tuple[tuple[int, int], ...], batch_size: int) -> None:
    geometry = make_geometry(shapes, batch_size, "none")
    level_embed, upstream = make_tensors(geometry, 8, torch.float32)
    output, gradient = differentiate(partial(fuse, geometry, 20.0, 0.0, torch.float32), level_embed, upstream)
    assert output.shape == upstream.shape
    assert torch.equal(gradient, torch.zeros_like(level_embed))


def test_a_level_without_pixels_has_a_gradient_of_zero() -> None:
    geometry = make_geometry(((2, 3), (0, 4), (1, 2)), 2, "none")
    level_embed, _ = make_tensors(geometry, 8, torch.float32)
    upstream = torch.ones(2, 8, 8, device=DEVICE)
    output, gradient = differentiate(partial(fuse, geometry, 20.0, 0.0, torch.float32), level_embed, upstream)
    torch.testing.assert_close(output, compose(geometry, 20.0, 0.0, torch.float32, level_embed), atol=1e-5, rtol=0)
    assert gradient[:, 0].tolist() == [12.0, 0.0, 4.0]


def test_a_second_derivative_is_refused() -> None:
    geometry = make_geometry(((2, 3),), 1, "none")
    level_embed, upstream = make_tensors(geometry, 8, torch.float32)
    leaf, upstream = level_embed.requires_grad_(), upstream.requires_grad_()
    output = fuse(geometry, 20.0, 0.0, torch.float32, leaf)
    (gradient,) = torch.autograd.grad(output, leaf, upstream, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_without_a_gradient_nothing_is_kept() -> None:
    geometry = make_geometry(((2, 3),), 1, "none")
    level_embed, _ = make_tensors(geometry, 8, torch.float32)
    assert not fuse(geometry, 20.0, 0.0, torch.float32, level_embed).requires_grad


def test_the_module_fuses_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.position_encoding.can_fuse", lambda x: True)  # the interpreter runs on a CPU
    geometry = make_geometry(((5, 4), (2, 3)), 2, "holes")
    level_embed = make_tensors(geometry, 8, torch.float32)[0].requires_grad_()
    encoding = SinePositionEncoding(channels=8, temperature=20, offset=0)
    assert type(encoding.embed_levels(geometry, level_embed, torch.bfloat16).grad_fn).__name__ == (
        "_EmbedPositionsBackward"
    )
    fused = encoding.embed_levels(geometry, level_embed, torch.float32)
    assert torch.equal(fused, fuse(geometry, 20, 0, torch.float32, level_embed))
    encoding.fused = False
    composed = encoding.embed_levels(geometry, level_embed, torch.float32)
    assert type(composed.grad_fn).__name__ == "CatBackward0"
    torch.testing.assert_close(fused, composed, atol=1e-5, rtol=0)
    compile_regions(encoding, backend="eager")
    assert torch.equal(encoding.embed_levels(geometry, level_embed, torch.float32), composed)
    encoding.fused = True
    assert torch.equal(encoding.embed_levels(geometry, level_embed, torch.float32), fused)


@pytest.mark.gpu
@pytest.mark.parametrize("published", PUBLISHED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_levels_of_an_image_on_a_gpu(published: str, dtype: torch.dtype) -> None:
    geometry = make_geometry(((100, 167), (50, 84), (25, 42), (13, 21)), 2, "borders")
    level_embed, upstream = make_tensors(geometry, 256, dtype)
    clear = in_a_line(geometry)
    settings = (*PUBLISHED[published], dtype)
    output, gradient = differentiate(partial(fuse, geometry, *settings), level_embed, upstream)
    competitors = differentiate(partial(compose, geometry, *settings), level_embed, upstream)
    expected = encode_exactly(geometry, level_embed, *PUBLISHED[published])
    check(output[clear], expected[clear], competitors[0][clear], OUTPUT, dtype)
    sizes = [height * width for height, width in geometry.spatial_shapes]
    sums = torch.stack([level.sum((0, 1)) for level in upstream.double().split(sizes, dim=1)])
    check(gradient, sums, competitors[1], GRADIENT, torch.float32)
    encoding = SinePositionEncoding(channels=256, temperature=PUBLISHED[published][0], offset=PUBLISHED[published][1])
    assert torch.equal(encoding.embed_levels(geometry, level_embed, dtype), output)
