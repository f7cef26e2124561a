"""What a call of the op may choose: sampling conventions and memory layouts."""

from typing import NamedTuple

from torch import Tensor

PADDING_MODES = ("zeros", "border")
VALUE_LAYOUTS = ("BLNC", "BNLC")
SAMPLING_LOCATIONS_LAYOUTS = ("BQHLP2", "B2QHLP")


class Options(NamedTuple):
    """Conventions of one call.

    Args:
        padding_mode: what lies outside a level: "zeros", or "border" for its nearest pixel.
        align_corners: whether locations 0 and 1 are the centres of a level's first and last pixel; otherwise they are
            the outer edges of these pixels.
        value_layout: "BLNC" for `[B, S, M, D]`, "BNLC" for `[B, M, S, D]` (head-major).
        sampling_locations_layout: "BQHLP2" for `[B, Q, M, L, K, 2]`, "B2QHLP" for `[B, 2, Q, M, L, K]`.
    """

    padding_mode: str = "zeros"
    align_corners: bool = False
    value_layout: str = "BLNC"
    sampling_locations_layout: str = "BQHLP2"


DEFAULT_OPTIONS = Options()


class Sizes(NamedTuple):
    """Sizes of one call, in the letters of the legend: B, S, M, D, Q, L, K."""

    batch: int
    value_length: int
    num_heads: int
    head_dim: int
    num_queries: int
    num_levels: int
    num_points: int


def value_as_blnc(value: Tensor, value_layout: str) -> Tensor:
    """Returns a view `[B, S, M, D]` of `value`."""
    return value.transpose(1, 2) if value_layout == "BNLC" else value


def locations_as_bqhlp2(sampling_locations: Tensor, sampling_locations_layout: str) -> Tensor:
    """Returns a view `[B, Q, M, L, K, 2]` of `sampling_locations`."""
    return sampling_locations.movedim(1, -1) if sampling_locations_layout == "B2QHLP" else sampling_locations


def read_sizes(value: Tensor, attention_weights: Tensor, value_layout: str) -> Sizes:
    """Returns the sizes of a call from its validated value and `[B, Q, M, L, K]` weights (or logits)."""
    batch, value_length, num_heads, head_dim = value_as_blnc(value, value_layout).shape
    _, num_queries, _, num_levels, num_points = attention_weights.shape
    return Sizes(batch, value_length, num_heads, head_dim, num_queries, num_levels, num_points)
