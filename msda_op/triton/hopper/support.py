"""Which calls the Hopper path takes."""

import torch

from msda_op.options import Options, Sizes

CAPABILITY = (9, 0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (32, 64)
MAX_LEVELS = 8
MAX_POINTS = 16
MAX_FUSED_QUADS = 4
MAX_QUERIES = 2**17
MIN_VALUE_LENGTH = 3
MAX_VALUE_LENGTH = 2**24


def supports(
    sizes: Sizes, dtype: torch.dtype, options: Options, *, fused: bool, capability: tuple[int, int] | None
) -> str | None:
    """Tells why the Hopper path does not take a call; None where it does.

    Args:
        sizes: B, S, M, D, Q, L, K of the call.
        dtype: dtype of `value`.
        options: sampling conventions and layouts.
        fused: whether the call brings reference points, offsets and logits.
        capability: compute capability of the GPU; None for the interpreter.

    Notes:
        Looks at nothing in device memory. The least S leaves room for a block that moves, see `samples`; the most comes
        from the float32 that numbers the pixels of a level, that of Q from the 17 bits of a record, and that of the
        fused form from its softmax over 16 lanes, which hold four points of a level each.
    """
    quads = sizes.num_levels * -(-sizes.num_points // 4)
    limits = (
        (capability == CAPABILITY, f"a GPU of compute capability 9.0, got {capability}"),
        (dtype in DTYPES, f"value in bfloat16, float16 or float32, got {dtype}"),
        (sizes.head_dim in HEAD_DIMS, f"D of {HEAD_DIMS}, got {sizes.head_dim}"),
        (options.padding_mode == "zeros", f"padding_mode 'zeros', got {options.padding_mode!r}"),
        (not options.align_corners, "align_corners False, got True"),
        (
            options.sampling_locations_layout == "BQHLP2",
            f"sampling_locations_layout 'BQHLP2', got {options.sampling_locations_layout!r}",
        ),
        (sizes.num_levels <= MAX_LEVELS, f"L of at most {MAX_LEVELS}, got {sizes.num_levels}"),
        (sizes.num_points <= MAX_POINTS, f"K of at most {MAX_POINTS}, got {sizes.num_points}"),
        (
            not fused or quads <= MAX_FUSED_QUADS,
            f"L * ceil(K / 4) of at most {MAX_FUSED_QUADS} when fused, got {quads}",
        ),
        (sizes.num_queries <= MAX_QUERIES, f"Q of at most {MAX_QUERIES}, got {sizes.num_queries}"),
        (sizes.value_length >= MIN_VALUE_LENGTH, f"S of at least {MIN_VALUE_LENGTH}, got {sizes.value_length}"),
        (sizes.value_length <= MAX_VALUE_LENGTH, f"S of at most {MAX_VALUE_LENGTH}, got {sizes.value_length}"),
    )
    return next((f"the Hopper kernels need {need}" for met, need in limits if not met), None)
