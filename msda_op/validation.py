"""Checks of the op's arguments; every failure is a ValueError that names the argument, the rule and what came."""

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from msda_op.levels import HostShapes, LevelStarts, SpatialShapes, level_starts, read_shapes, read_starts
from msda_op.options import (
    DEFAULT_OPTIONS,
    PADDING_MODES,
    SAMPLING_LOCATIONS_LAYOUTS,
    VALUE_LAYOUTS,
    Options,
    value_as_blnc,
)

_TABLE_DTYPES = (torch.int32, torch.int64)
_MAX_INT32 = 2**31 - 1

_VALUE_FORMS = {"BLNC": "[B, S, M, D]", "BNLC": "[B, M, S, D]"}
_LOCATION_FORMS = {"BQHLP2": "[B, Q, M, L, K, 2]", "B2QHLP": "[B, 2, Q, M, L, K]"}


def check_options(options: Options) -> None:
    """Checks the names of conventions and layouts.

    Raises:
        ValueError: if one is unknown.
    """
    for name, names in (
        ("padding_mode", PADDING_MODES),
        ("value_layout", VALUE_LAYOUTS),
        ("sampling_locations_layout", SAMPLING_LOCATIONS_LAYOUTS),
    ):
        given = getattr(options, name)
        if given not in names:
            raise ValueError(f"{name} must be one of {', '.join(names)}, got {given!r}; pass one of them")


def validate_inputs(
    value: Tensor,
    spatial_shapes: SpatialShapes,
    level_start_index: LevelStarts,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    options: Options = DEFAULT_OPTIONS,
) -> None:
    """Checks ranks, sizes, dtypes, devices and the level table of a call of the op.

    Args:
        value: `[B, S, M, D]`, floating point; or as `options` say.
        spatial_shapes: `[L, 2]` int32 or int64 tensor, or L pairs; rows are (h, w).
        level_start_index: `[L]` int32 or int64 tensor, or L ints; None only where `spatial_shapes` holds pairs.
        sampling_locations: `[B, Q, M, L, K, 2]`, float32 (or float64, with a float64 value); or as `options` say.
        attention_weights: `[B, Q, M, L, K]`, floating point.
        options: conventions and layouts.

    Raises:
        ValueError: if an argument breaks a rule.

    Notes:
        Never waits for the device: a level table in device memory is checked by shape, dtype and device alone, and its
        numbers are the caller's responsibility. A table on the host is checked in full.
    """
    check_options(options)
    _check_forms(
        value,
        (
            ("value", value, _VALUE_FORMS[options.value_layout]),
            ("sampling_locations", sampling_locations, _LOCATION_FORMS[options.sampling_locations_layout]),
            ("attention_weights", attention_weights, "[B, Q, M, L, K]"),
        ),
    )
    _check_sampling(value, sampling_locations, attention_weights, options)
    _check_levels(value_as_blnc(value, options.value_layout), spatial_shapes, level_start_index, attention_weights)


def validate_fused_inputs(
    value: Tensor,
    spatial_shapes: SpatialShapes,
    level_start_index: LevelStarts,
    reference_points: Tensor,
    sampling_offsets: Tensor,
    attention_logits: Tensor,
    options: Options = DEFAULT_OPTIONS,
) -> None:
    """Checks the same of a call of the fused op.

    Args:
        value: `[B, S, M, D]`, floating point; or as `options` say.
        spatial_shapes: as in `validate_inputs`.
        level_start_index: as in `validate_inputs`.
        reference_points: `[B, Q, L, 2 or 4]`, float32 (or float64, with a float64 value).
        sampling_offsets: `[B, Q, M, L, K, 2]`, floating point.
        attention_logits: `[B, Q, M, L, K]`, floating point.
        options: conventions and layouts.

    Raises:
        ValueError: if an argument breaks a rule.
    """
    check_options(options)
    _check_forms(
        value,
        (
            ("value", value, _VALUE_FORMS[options.value_layout]),
            ("reference_points", reference_points, "[B, Q, L, 2 or 4]"),
            ("sampling_offsets", sampling_offsets, "[B, Q, M, L, K, 2]"),
            ("attention_logits", attention_logits, "[B, Q, M, L, K]"),
        ),
    )
    _check_precise("reference_points", reference_points, value)
    batch, _, num_heads, _ = value_as_blnc(value, options.value_layout).shape
    sample = (batch, sampling_offsets.shape[1], num_heads, *sampling_offsets.shape[3:5])
    if sampling_offsets.shape != (*sample, 2) or 0 in sample[3:]:
        raise ValueError(
            f"sampling_offsets must be [B={batch}, Q, M={num_heads}, L >= 1, K >= 1, 2], "
            f"got shape {tuple(sampling_offsets.shape)}; match batch and heads of value and end in (x, y)"
        )
    if attention_logits.shape != sample:
        raise ValueError(
            f"attention_logits must have shape {sample} [B, Q, M, L, K], or its last two axes as one, "
            f"got {tuple(attention_logits.shape)}; give one logit to each offset"
        )
    if reference_points.shape[:3] != (batch, sample[1], sample[3]) or reference_points.shape[3] not in (2, 4):
        raise ValueError(
            f"reference_points must have shape {(batch, sample[1], sample[3])} [B, Q, L] and end in 2 (x, y) or 4 "
            f"(cx, cy, w, h) numbers, got {tuple(reference_points.shape)}; give one to each query and level"
        )
    _check_levels(value_as_blnc(value, options.value_layout), spatial_shapes, level_start_index, attention_logits)


def _check_levels(
    value: Tensor, spatial_shapes: SpatialShapes, level_start_index: LevelStarts, attention_weights: Tensor
) -> None:
    num_levels = attention_weights.shape[3]
    _check_shapes_form(spatial_shapes, num_levels, value.device)
    _check_starts_form(spatial_shapes, level_start_index, num_levels, value.device)
    if not _on_host(spatial_shapes):
        return
    shapes = read_shapes(spatial_shapes)
    starts = read_starts(level_start_index) if level_start_index is not None and _on_host(level_start_index) else None
    # A traced call must not put its symbolic sizes into the cache.
    check = _check_host_table if torch.compiler.is_compiling() else _cached_check_host_table
    check(shapes, starts, value.shape[1])


def _check_host_table(shapes: HostShapes, starts: tuple[int, ...] | None, value_length: int) -> None:
    check_level_table(shapes, value_length)
    if starts is not None and starts != level_starts(shapes):
        raise ValueError(
            f"level_start_index must be {level_starts(shapes)} for spatial_shapes {shapes}, got {starts}; "
            f"store the levels one after the other"
        )


_cached_check_host_table = lru_cache(maxsize=1024)(_check_host_table)


def check_level_table(spatial_shapes: HostShapes, value_length: int) -> None:
    """Checks that level sizes are positive and add up to the length of `value`.

    Raises:
        ValueError: if they do not.
    """
    if any(h < 1 or w < 1 for h, w in spatial_shapes):
        raise ValueError(f"spatial_shapes must hold sizes of at least 1, got {spatial_shapes}; leave empty levels out")
    total = sum(h * w for h, w in spatial_shapes)
    if total != value_length:
        raise ValueError(
            f"spatial_shapes must add up to S = {value_length} rows of value, got {spatial_shapes} = {total} rows; "
            f"pass (h, w) of each level in the order of value"
        )


def check_sample_sizes(**tensors: Tensor) -> None:
    """Checks that the elements of one batch item of each tensor can be counted in int32, as the kernels do.

    Raises:
        ValueError: if an item is larger; the batch as a whole may be.
    """
    for name, tensor in tensors.items():
        elements = prod(tensor.shape[1:])  # torch.Size.numel() would fix the sizes in an exported program
        if elements > _MAX_INT32:
            raise ValueError(
                f"{name} must have at most {_MAX_INT32} elements in a batch item for backend 'triton', "
                f"got {elements}; pass backend='reference'"
            )


def _check_forms(value: Tensor, tensors: tuple[tuple[str, Tensor, str], ...]) -> None:
    for name, tensor, form in tensors:
        rank = form.count(",") + 1
        if tensor.dim() != rank:
            raise ValueError(f"{name} must have {rank} dimensions {form}, got shape {tuple(tensor.shape)}; reshape it")
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {tensor.dtype}; convert it")
        if tensor.device != value.device:
            raise ValueError(f"{name} must be on the device of value, {value.device}, got {tensor.device}; move it")
    name, _, form = tensors[0]
    sizes = dict(zip(form[1:-1].split(", "), value.shape, strict=True))
    if sizes["M"] < 1 or sizes["D"] < 1:
        raise ValueError(f"{name} must have M >= 1 and D >= 1, got shape {tuple(value.shape)}; pass {form}")


def _check_precise(name: str, tensor: Tensor, value: Tensor) -> None:
    wide = value.dtype == torch.float64
    if tensor.dtype != torch.float32 and not (wide and tensor.dtype == torch.float64):
        raise ValueError(
            f"{name} must be float32{' or float64' if wide else ''}, got {tensor.dtype}; "
            f"compute locations in float32 (half precision is up to a pixel wrong), e.g. with autocast disabled"
        )


def _check_sampling(value: Tensor, sampling_locations: Tensor, attention_weights: Tensor, options: Options) -> None:
    _check_precise("sampling_locations", sampling_locations, value)
    batch, _, num_heads, _ = value_as_blnc(value, options.value_layout).shape
    pair_first = options.sampling_locations_layout == "B2QHLP"
    num_queries, _, num_levels, num_points = (
        sampling_locations.shape[2:] if pair_first else sampling_locations.shape[1:5]
    )
    sample = (batch, num_queries, num_heads, num_levels, num_points)
    expected = (batch, 2, *sample[1:]) if pair_first else (*sample, 2)
    if sampling_locations.shape != expected or 0 in sample[3:]:
        form = (f"B={batch}", "Q", f"M={num_heads}", "L >= 1", "K >= 1")
        ordered = (form[0], "2", *form[1:]) if pair_first else (*form, "2")
        raise ValueError(
            f"sampling_locations must be [{', '.join(ordered)}], "
            f"got shape {tuple(sampling_locations.shape)}; match batch and heads of value and give (x, y) pairs"
        )
    if attention_weights.shape != sample:
        raise ValueError(
            f"attention_weights must have shape {sample} [B, Q, M, L, K], "
            f"got {tuple(attention_weights.shape)}; give one weight to each sampling location"
        )


def _on_host(table: Tensor | Sequence) -> bool:
    return not isinstance(table, Tensor) or table.device.type == "cpu"


def _check_shapes_form(spatial_shapes: SpatialShapes, num_levels: int, device: torch.device) -> None:
    if isinstance(spatial_shapes, Tensor):
        _check_table_tensor("spatial_shapes", spatial_shapes, (num_levels, 2), device)
        return
    pairs = all(isinstance(pair, Sequence) and len(pair) == 2 and _all_ints(pair) for pair in spatial_shapes)
    if not pairs or len(spatial_shapes) != num_levels:
        raise ValueError(
            f"spatial_shapes must hold L = {num_levels} pairs of ints (h, w), got {spatial_shapes!r}; "
            f"give one pair to each level of sampling_locations"
        )


def _check_starts_form(
    spatial_shapes: SpatialShapes, level_start_index: LevelStarts, num_levels: int, device: torch.device
) -> None:
    if level_start_index is None:
        if isinstance(spatial_shapes, Tensor):
            raise ValueError(
                "level_start_index must be given where spatial_shapes is a tensor, got None; "
                "pass [L] first rows of the levels, or spatial_shapes as a tuple of (h, w) pairs"
            )
        return
    if isinstance(level_start_index, Tensor):
        _check_table_tensor("level_start_index", level_start_index, (num_levels,), device)
    elif len(level_start_index) != num_levels or not _all_ints(level_start_index):
        raise ValueError(
            f"level_start_index must hold L = {num_levels} ints, got {level_start_index!r}; "
            f"give the first row of each level of value"
        )


def _all_ints(numbers: Sequence) -> bool:
    return all(isinstance(number, int) for number in numbers)


def _check_table_tensor(name: str, table: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if tuple(table.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(table.shape)}; give one row to each level")
    if table.dtype not in _TABLE_DTYPES:
        raise ValueError(f"{name} must be int32 or int64, got {table.dtype}; convert it")
    if table.device.type != "cpu" and table.device != device:
        raise ValueError(f"{name} must be on the CPU or on the device of value, {device}, got {table.device}; move it")
