"""Device functions of the fused boundary: softmax of the logits, locations from reference points and offsets.

Legend: B batch, Q queries, M heads, L levels, K points.
Two passes: the whole tile of logits [BLOCK_Q, BLOCK_L, BLOCK_K] gives each query's largest logit and sum; then
the weights [BLOCK_Q, BLOCK_K] of a level follow from its logits, level by level.
NUM_COORDINATES tells what stands in for locations: 0 locations themselves, 2 offsets from points (x, y), 4 offsets from
boxes (cx, cy, w, h).
"""

import triton
import triton.language as tl


@triton.jit
def score_tile(rows, query_mask, L: tl.constexpr, K: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_K: tl.constexpr):
    """Returns offsets and mask of all scores of a tile of (query, head) rows, [BLOCK_Q, BLOCK_L, BLOCK_K]."""
    levels = tl.arange(0, BLOCK_L)[None, :, None]
    points = tl.arange(0, BLOCK_K)[None, None, :]
    offsets = (rows[:, None, None] * L + levels) * K + points
    return offsets, query_mask[:, None, None] & (levels < L) & (points < K)


@triton.jit
def softmax_statistics(
    logits, rows, query_mask, L: tl.constexpr, K: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Returns each query's largest logit, and the sum of exp(logit - largest) over its L*K logits, [BLOCK_Q]."""
    offsets, mask = score_tile(rows, query_mask, L, K, BLOCK_L, BLOCK_K)
    scores = tl.load(logits + offsets, mask=mask, other=-float("inf")).to(tl.float32)
    largest = tl.max(tl.max(scores, axis=2), axis=1)
    largest = tl.where(query_mask, largest, 0.0)
    total = tl.sum(tl.sum(tl.exp(scores - largest[:, None, None]), axis=2), axis=1)
    return largest, tl.where(query_mask, total, 1.0)


@triton.jit
def store_logit_gradient(
    grad_logits,
    logits,
    grad_weights,
    largest,
    total,
    rows,
    query_mask,
    L: tl.constexpr,
    K: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Stores the gradient of the softmax: weight * (grad_weight - sum of weight * grad_weight)."""
    offsets, mask = score_tile(rows, query_mask, L, K, BLOCK_L, BLOCK_K)
    scores = tl.load(logits + offsets, mask=mask, other=-float("inf")).to(tl.float32)
    weights = tl.exp(scores - largest[:, None, None]) / total[:, None, None]
    mean = tl.sum(tl.sum(weights * grad_weights, axis=2), axis=1)
    gradient = weights * (grad_weights - mean[:, None, None])
    tl.store(grad_logits + offsets, gradient.to(grad_logits.dtype.element_ty), mask=mask)


@triton.jit
def load_reference(
    reference_points, queries, level, query_mask, AXIS: tl.constexpr, L: tl.constexpr, NUM_COORDINATES: tl.constexpr
):
    """Returns centre and extent of the queries' reference along an axis (0 = x, 1 = y), [BLOCK_Q, 1]; points have no
    extent, and 1 stands for it."""
    reference = reference_points + (queries * L + level) * NUM_COORDINATES + AXIS
    centre = tl.load(reference, mask=query_mask, other=0.0).to(tl.float32)
    if NUM_COORDINATES == 4:
        extent = tl.load(reference + 2, mask=query_mask, other=0.0).to(tl.float32)
    else:
        extent = tl.full(centre.shape, 1.0, tl.float32)
    return centre[:, None], extent[:, None]


@triton.jit
def offset_to_shift(offset, extent, size, K: tl.constexpr, NUM_COORDINATES: tl.constexpr):
    """Returns how far an offset moves a location; linear in the offset, so it takes gradients back as well.

    Divisions round to nearest: locations equal those of `msda_op.locations` bit by bit.
    """
    if NUM_COORDINATES == 4:
        divisor = tl.full(offset.shape, K, tl.float32)
        return tl.div_rn(offset, divisor) * extent * 0.5
    else:
        divisor = tl.zeros(offset.shape, tl.float32) + size
        return tl.div_rn(offset, divisor)


@triton.jit
def store_reference_gradient(
    grad_reference, query_mask, gradient, offset, AXIS: tl.constexpr, K: tl.constexpr, NUM_COORDINATES: tl.constexpr
):
    """Stores a head's share of the gradient of reference points along an axis; `grad_reference` are the [BLOCK_Q]
    places of the queries' first coordinate. Samples without gradient count as zero even at infinite offsets."""
    tl.store(grad_reference + AXIS, tl.sum(gradient, axis=1), mask=query_mask)
    if NUM_COORDINATES == 4:
        stretch = tl.where(gradient == 0.0, 0.0, gradient * offset * (0.5 / K))
        tl.store(grad_reference + 2 + AXIS, tl.sum(stretch, axis=1), mask=query_mask)
