"""The default list of cases on which implementations of the op are compared, and their seeded inputs."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from msda_op.options import DEFAULT_OPTIONS, Options

INPUT_NAMES = ("value", "sampling_locations", "attention_weights")

# Distance in pixels that locations keep from pixel centres, where the gradient jumps: far above the rounding of a
# float32 location (1e-5 pixel at width 167), so that every implementation stands on the same side.
_KINK_MARGIN = 0.01


@dataclass(frozen=True)
class Case:
    """Sizes and traits of one comparison.

    Args:
        name: words for a report.
        spatial_shapes: L pairs (h, w).
        num_queries: Q.
        batch: B.
        num_heads: M.
        head_dim: D.
        num_points: K.
        placement: "around" the image with a margin; "far" outside for the most part; on the "edges" 0 and 1; on pixel
            "centres" and the ends of the zero padding (exact only where sizes are powers of two); "broken" with NaN,
            infinite and huge numbers between sound ones.
        contiguous: whether the inputs are; otherwise they are strided views.
        gradients: names of the inputs that need a gradient.
    """

    name: str
    spatial_shapes: tuple[tuple[int, int], ...]
    num_queries: int
    batch: int = 2
    num_heads: int = 2
    head_dim: int = 8
    num_points: int = 4
    placement: Literal["around", "far", "edges", "centres", "broken"] = "around"
    contiguous: bool = True
    gradients: tuple[str, ...] = INPUT_NAMES


@dataclass(frozen=True)
class OpInputs:
    """Tensors of one call of the op, and the upstream gradient `[B, Q, M*D]`."""

    value: Tensor
    spatial_shapes: tuple[tuple[int, int], ...]
    sampling_locations: Tensor
    attention_weights: Tensor
    grad_output: Tensor

    def double(self) -> "OpInputs":
        """Returns the same numbers in float64."""
        return OpInputs(
            self.value.double(),
            self.spatial_shapes,
            self.sampling_locations.double(),
            self.attention_weights.double(),
            self.grad_output.double(),
        )


_UNEVEN = ((6, 9), (3, 5), (1, 1))

DEFAULT_CASES = (
    Case("uneven levels", _UNEVEN, num_queries=13),
    Case("odd channels, three points", ((5, 7), (4, 3)), num_queries=9, num_heads=3, head_dim=5, num_points=3),
    Case("wide heads", ((3, 4), (2, 1)), num_queries=3, batch=1, head_dim=48, num_points=2),
    Case("smallest", ((1, 1),), num_queries=1, batch=1, num_heads=1, head_dim=1, num_points=1),
    Case("one query", _UNEVEN, num_queries=1),
    Case("no queries", _UNEVEN, num_queries=0),
    Case("no batch", _UNEVEN, num_queries=3, batch=0),
    Case("one row, one column", ((1, 7), (6, 1)), num_queries=5),
    Case("far outside", _UNEVEN, num_queries=9, placement="far"),
    Case("on the edges", _UNEVEN, num_queries=9, placement="edges"),
    Case("on pixel centres", ((4, 8), (2, 1)), num_queries=9, placement="centres"),
    Case("broken locations", _UNEVEN, num_queries=9, placement="broken"),
    Case("strided inputs", _UNEVEN, num_queries=5, contiguous=False),
    Case("value gradient only", _UNEVEN, num_queries=5, gradients=("value",)),
    Case("location gradient only", _UNEVEN, num_queries=5, gradients=("sampling_locations",)),
    Case("weight gradient only", _UNEVEN, num_queries=5, gradients=("attention_weights",)),
)

# Together with the default options: every pair of choices of two options.
OPTION_SETS = (
    Options("zeros", True, "BNLC", "B2QHLP"),
    Options("border", False, "BNLC", "B2QHLP"),
    Options("border", True, "BLNC", "B2QHLP"),
    Options("border", True, "BNLC", "BQHLP2"),
)

_LEVELS_800x1333 = ((100, 167), (50, 84), (25, 42), (13, 21))

# Sizes of real training, for a GPU.
LARGE_CASES = (
    Case("encoder", _LEVELS_800x1333, num_queries=22223, batch=2, num_heads=8, head_dim=32),
    Case("decoder", _LEVELS_800x1333, num_queries=300, batch=4, num_heads=8, head_dim=32),
    Case("encoder, odd channels", ((33, 51), (17, 26)), num_queries=2125, num_heads=5, head_dim=20, num_points=3),
    Case("widest heads", ((33, 51), (17, 26)), num_queries=301, num_heads=2, head_dim=256, num_points=16),
)


def suited_to(case: Case, options: Options) -> Case:
    """Returns a case, its sizes replaced where the placement is exact for other options only."""
    if case.placement == "centres" and options.align_corners:
        return replace(case, spatial_shapes=((5, 9), (3, 2)))  # centre i of n pixels lies at i / (n - 1)
    return case


def make_inputs(
    case: Case, dtype: torch.dtype, device: torch.device, seed: int, options: Options = DEFAULT_OPTIONS
) -> OpInputs:
    """Draws the inputs of a case; equal seeds give equal numbers on every device.

    Args:
        case: what to draw.
        dtype: dtype of value, attention weights and upstream gradient; locations are float32 (float64 for float64).
        device: where to put them.
        seed: of the generator.
        options: layouts of value and locations, and the convention by which locations stand for pixels.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    b, q, m, d, k = case.batch, case.num_queries, case.num_heads, case.head_dim, case.num_points
    num_levels = len(case.spatial_shapes)
    value_length = sum(h * w for h, w in case.spatial_shapes)
    value = normal(b, value_length, m, d)
    weights = normal(b, q, m, num_levels * k).softmax(-1).view(b, q, m, num_levels, k)
    locations = _place(case, (b, q, m, num_levels, k, 2), generator, options.align_corners)
    location_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    if options.value_layout == "BNLC":
        value = value.transpose(1, 2).contiguous()
    if options.sampling_locations_layout == "B2QHLP":
        locations = locations.movedim(-1, 1).contiguous()
    drawn = (value.to(dtype), locations.to(location_dtype), weights.to(dtype), normal(b, q, m * d).to(dtype))
    placed = [tensor.to(device) if case.contiguous else _spread(tensor.to(device)) for tensor in drawn]
    value, locations, weights, grad_output = placed
    return OpInputs(value, case.spatial_shapes, locations, weights, grad_output)


def _place(case: Case, shape: tuple[int, ...], generator: torch.Generator, align_corners: bool) -> Tensor:
    """Returns float64 locations `shape` (x, y) for the placement of a case."""
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    sizes_wh = torch.tensor([(w, h) for h, w in case.spatial_shapes], dtype=torch.float64)[:, None, :]
    if case.placement == "edges":
        return (uniform * 3 - 1).round().clamp(0, 1)
    if case.placement == "centres":
        return _to_locations((uniform * (sizes_wh + 2)).floor() - 1, sizes_wh, align_corners)
    spread = 40.0 if case.placement == "far" else 1.6
    pixels = ((uniform - 0.5) * spread + 0.5) * sizes_wh - 0.5
    fraction = pixels - pixels.floor()
    pixels = pixels.floor() + _KINK_MARGIN + fraction * (1 - 2 * _KINK_MARGIN)
    locations = _to_locations(pixels, sizes_wh, align_corners)
    if case.placement == "broken":
        broken = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, -1e30, 0.5, 0.5, 0.5], dtype=torch.float64)
        choice = torch.randint(len(broken), shape, generator=generator)
        locations = torch.where(broken[choice] == 0.5, locations, broken[choice])
    return locations


def _to_locations(pixels: Tensor, sizes_wh: Tensor, align_corners: bool) -> Tensor:
    """Returns the locations of pixel coordinates; with aligned corners all locations on one pixel are the same."""
    return pixels / (sizes_wh - 1).clamp(min=1) if align_corners else (pixels + 0.5) / sizes_wh


def _spread(tensor: Tensor) -> Tensor:
    """Returns the same numbers as a view with every other element of a larger storage, its last two axes swapped."""
    storage = torch.full((*tensor.shape[:-2], tensor.shape[-1], 2 * tensor.shape[-2]), torch.nan).to(tensor)
    view = storage[..., ::2].transpose(-1, -2)
    view.copy_(tensor)
    return view
