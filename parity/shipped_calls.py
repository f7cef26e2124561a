"""Every way in which users reach the kernels, as calls of what launches them on tensors without memory.

A new path gets a call here; a kernel that no call reaches fails `tests/parity/test_compilation.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import FrozenBatchNorm2d

from models.layers.fused_frozen_norm import frozen_norm_relu, frozen_norm_residual_relu
from models.layers.fused_group_norm import group_norm
from models.layers.fused_norm import residual_norm
from models.layers.fused_positions import embed_positions
from models.layers.fused_stem import frozen_norm_relu_pool
from models.layers.in_place import apply_relu_dropout, clear_rows
from models.layers.row_sum import sum_passed_rows, sum_rows
from msda_op.options import DEFAULT_OPTIONS, Options
from msda_op.triton import launch
from msda_op.triton.launch import Inputs, Needs, Targets
from parity.presets import PRESETS, Preset

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_BATCH = 4
_ODD = Preset("odd", ((33, 51), (17, 26)), num_queries=300, num_heads=5, head_dim=20, num_points=3)
_WIDE = Preset("wide", ((33, 51), (17, 26)), num_queries=300, num_heads=2, head_dim=256, num_points=16)
_WIDE_HEADS = Preset("wide heads", ((33, 51), (17, 26)), num_queries=2125, num_heads=4, head_dim=64)
_MOST_SAMPLES = Preset("most samples", ((33, 51),) * 8, num_queries=300, num_heads=8, num_points=16)
_HEAD_MAJOR = Options(value_layout="BNLC")
_EVERY_OPTION = Options("border", align_corners=True, value_layout="BNLC", sampling_locations_layout="B2QHLP")
_TRAINING = Needs(value=True, points=True, scores=True, reference_points=False)
_REFINING = Needs(value=True, points=True, scores=True, reference_points=True)
_FROZEN_VALUE = Needs(value=False, points=True, scores=True, reference_points=False)


@dataclass(frozen=True)
class ShippedCall:
    """One way in which users reach the kernels.

    Args:
        name: words for a report.
        head_dim: D; of the norm, the channels of a row.
        judged: whether problems of the machine code count; not where a caller asks for half atomics, which the
            documentation warns of.
        run: calls what launches the kernels.
        architecture: the only compute capability that has this path; None where all have it.
    """

    name: str
    head_dim: int
    judged: bool
    run: Callable[[], Any]
    architecture: int | None = None


class UnallocatedCudaTensor(Tensor):
    """A meta tensor that says that it is on a GPU: the launch module decides by it, and nothing reads it."""

    is_cuda = True


def shipped_calls() -> list[ShippedCall]:
    """Returns the calls: sizes x dtypes x plain, fused and deterministic; sets of gradients and options once.

    float16 differs from bfloat16 in one conversion, so what is rarer is compiled for bfloat16 and float32 alone.
    """
    calls: list[ShippedCall] = []
    for name, (dtype_name, dtype) in product(("encoder", "decoder", "dino"), DTYPES.items()):
        calls += _common_calls(PRESETS[name], dtype_name, dtype)
    for preset in (_ODD, _WIDE):
        calls += _pass_calls(f"{preset.name} bf16", preset, torch.bfloat16, 0, [_TRAINING])
    calls += _pass_calls("wide fp32", _WIDE, torch.float32, 0, [_TRAINING])
    for dtype_name in ("bf16", "fp32"):
        calls += _gradient_set_calls(f"encoder {dtype_name}", PRESETS["encoder"], DTYPES[dtype_name])
    calls += _pass_calls("encoder bf16 head-major", PRESETS["encoder"], torch.bfloat16, 0, [_TRAINING], _HEAD_MAJOR)
    for dtype_name in ("bf16", "fp32"):
        name = f"encoder {dtype_name} border, aligned, head-major, pair first"
        calls += _pass_calls(name, PRESETS["encoder"], DTYPES[dtype_name], 0, [_TRAINING], _EVERY_OPTION)
    calls += _pass_calls("encoder bf16 fused boxes", PRESETS["encoder"], torch.bfloat16, 4, [_REFINING])
    calls += _accumulation_calls(PRESETS["encoder"])
    calls += _hopper_calls()
    calls += _norm_calls()
    calls += _frozen_norm_calls()
    calls += _group_norm_calls()
    calls += _linear_calls()
    calls += _position_calls()
    return calls


def _common_calls(preset: Preset, dtype_name: str, dtype: torch.dtype) -> Iterator[ShippedCall]:
    """Yields what training and inference of a detector call."""
    name = f"{preset.name} {dtype_name}"
    yield from _pass_calls(name, preset, dtype, 0, [_TRAINING])
    if dtype == torch.float16:
        yield from _pass_calls(f"{name} fused", preset, dtype, 2, [_TRAINING])
        return
    yield from _pass_calls(f"{name} fused", preset, dtype, 2, [_TRAINING, _REFINING])
    grad_output, inputs = unallocated_inputs(preset, dtype)
    run = partial(launch.backward, grad_output, inputs, DEFAULT_OPTIONS, False, True, True, _TRAINING)
    yield ShippedCall(f"{name} deterministic backward", preset.head_dim, True, run)


def _gradient_set_calls(name: str, preset: Preset, dtype: torch.dtype) -> Iterator[ShippedCall]:
    """Yields backward passes of fewer than all gradients: every set in bf16, a frozen value in fp32."""
    every = [Needs(value, points, scores, False) for value, points, scores in product((True, False), repeat=3)]
    chosen = every[1:-1] if dtype == torch.bfloat16 else [_FROZEN_VALUE]
    calls = _pass_calls(name, preset, dtype, 0, chosen)
    yield from (call for call in calls if not call.name.endswith("forward"))


def _pass_calls(
    name: str,
    preset: Preset,
    dtype: torch.dtype,
    num_coordinates: int,
    gradient_sets: list[Needs],
    options: Options = DEFAULT_OPTIONS,
) -> Iterator[ShippedCall]:
    """Yields a forward pass, and a backward pass for each set of gradients; fused where there are coordinates."""
    grad_output, inputs = unallocated_inputs(preset, dtype, num_coordinates, options)
    yield ShippedCall(f"{name} forward", preset.head_dim, True, partial(launch.forward, inputs, options, False))
    for needs in gradient_sets:
        asked = "+".join(word for word, needed in needs._asdict().items() if needed)
        run = partial(launch.backward, grad_output, inputs, options, False, True, False, needs)
        yield ShippedCall(f"{name} backward {asked}", preset.head_dim, True, run)


def _accumulation_calls(preset: Preset) -> Iterator[ShippedCall]:
    """Yields the ways to add the gradient of value up that a caller has to ask for."""
    for dtype_name in ("bf16", "fp16"):
        grad_output, inputs = unallocated_inputs(preset, DTYPES[dtype_name])
        half = partial(launch.backward, grad_output, inputs, DEFAULT_OPTIONS, False, False, False, _TRAINING)
        yield ShippedCall(f"{preset.name} {dtype_name} backward half atomics", preset.head_dim, False, half)
    buffers = _empty(4, *inputs.value.shape, dtype=torch.float32)
    targets = Targets(buffers, torch.empty_like(inputs.points), torch.empty_like(inputs.scores), None)
    into_buffers = partial(launch.accumulate_backward, grad_output, inputs, DEFAULT_OPTIONS, False, False, targets)
    yield ShippedCall(f"{preset.name} fp16 backward into four buffers", preset.head_dim, True, into_buffers)


def _hopper_calls() -> Iterator[ShippedCall]:
    """Yields what only the fast kernels of sm_90 tell apart: common calls reach them by themselves there."""
    for name, layout in product(("encoder", "decoder"), (DEFAULT_OPTIONS, _HEAD_MAJOR)):
        label = f"hopper {name} bf16 {layout.value_layout}"
        yield from _ways_of_hopper(label, PRESETS[name], torch.bfloat16, 2, layout)
    for dtype_name in ("bf16", "fp32"):
        for preset in (_WIDE_HEADS, _MOST_SAMPLES):
            name = f"hopper {preset.name} {dtype_name}"
            yield from _ways_of_hopper(name, preset, DTYPES[dtype_name], 0, DEFAULT_OPTIONS)


def _norm_calls() -> Iterator[ShippedCall]:
    """Yields the norm after a layer with its backward pass, in training and with nothing dropped."""
    rows, channels = _BATCH * PRESETS["encoder"].num_queries, 256
    for dtype_name in ("bf16", "fp32"):
        dtype = DTYPES[dtype_name]
        residual, branch = (_empty(rows, channels, dtype=dtype).requires_grad_() for _ in range(2))
        weight, bias = (_empty(channels, dtype=torch.float32).requires_grad_() for _ in range(2))
        for seed in (None, _empty(1, dtype=torch.int64)):
            run = partial(_run_norm, residual, branch, weight, bias, seed)
            words = "without dropout" if seed is None else "with dropout"
            yield ShippedCall(f"norm {dtype_name} {words}", channels, True, run)


def _run_norm(residual: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, seed: Tensor | None) -> None:
    probability = 0.0 if seed is None else 0.1
    output = residual_norm(residual, branch, weight, bias, seed, probability, 1e-5, residual.dtype)
    torch.autograd.grad(output, (residual, branch, weight, bias), torch.empty_like(output))


def _linear_calls() -> Iterator[ShippedCall]:
    """Yields what follows a linear layer of many rows in place, and sums of its gradient's rows."""
    num_rows, width = _BATCH * PRESETS["encoder"].num_queries, 1024
    padding_mask, seed = _empty(num_rows, dtype=torch.bool), _empty(1, dtype=torch.int64)
    for dtype_name, dtype in DTYPES.items():
        rows = _empty(num_rows, width, dtype=dtype)
        runs: dict[str, Callable[[], Any]] = {
            "row sum": partial(sum_rows, rows),
            "row sum without padding": partial(sum_passed_rows, rows, padding_mask, None, 1.0),
            "row sum of what was activated": partial(sum_passed_rows, rows, None, rows, 1.25),
            "cleared rows": partial(clear_rows, rows, padding_mask),
            "relu and dropout": partial(apply_relu_dropout, rows, seed, 6554, 1.25),
        }
        for words, run in runs.items():
            yield ShippedCall(f"{words} {dtype_name}", width, True, run)


def _frozen_norm_calls() -> Iterator[ShippedCall]:
    """Yields the norm and ReLU after a convolution with their backward pass, and with either kind of residual."""
    channels = 1024
    for dtype_name, dtype in DTYPES.items():
        x, residual = (_empty(_BATCH, channels, 50, 84, dtype=dtype).requires_grad_() for _ in range(2))
        norm = FrozenBatchNorm2d(channels).to("meta")
        alone, added = partial(frozen_norm_relu, x, norm), partial(frozen_norm_residual_relu, x, norm, residual)
        runs = {
            "": partial(_differentiate, alone, (x,)),
            " with residual": partial(_differentiate, partial(added, None), (x, residual)),
            " of two": partial(_differentiate, partial(added, norm), (x, residual)),
        }
        for words, run in runs.items():
            yield ShippedCall(f"frozen norm {dtype_name}{words}", channels, True, run)
        stem = _empty(_BATCH, 64, 400, 667, dtype=dtype)
        pooled = partial(frozen_norm_relu_pool, stem, FrozenBatchNorm2d(64).to("meta"))
        yield ShippedCall(f"frozen norm {dtype_name} and pooling", 64, True, pooled)


def _group_norm_calls() -> Iterator[ShippedCall]:
    """Yields the norm of the neck with its backward pass: of the published width, and with three channels a group."""
    for dtype_name, channels in (*product(DTYPES, (256,)), ("bf16", 96)):
        x = _empty(_BATCH, channels, 50, 84, dtype=DTYPES[dtype_name]).requires_grad_()
        weight, bias = (_empty(channels, dtype=torch.float32).requires_grad_() for _ in range(2))
        run = partial(_differentiate, partial(group_norm, x, weight, bias, 32, 1e-5), (x, weight, bias))
        yield ShippedCall(f"group norm {dtype_name} of {channels} channels", channels, True, run)


def _position_calls() -> Iterator[ShippedCall]:
    """Yields the position encodings of all levels with the gradient of the level embedding."""
    preset, channels = PRESETS["encoder"], 256
    padding_mask = _empty(_BATCH, preset.value_length, dtype=torch.bool)
    level_embed = _empty(len(preset.spatial_shapes), channels, dtype=torch.float32).requires_grad_()
    for dtype_name, dtype in DTYPES.items():
        settings = (preset.spatial_shapes, level_embed, 10000.0, -0.5, 1e-6, dtype)
        run = partial(_differentiate, partial(embed_positions, padding_mask, *settings), (level_embed,))
        yield ShippedCall(f"positions {dtype_name}", channels, True, run)


def _differentiate(function: Callable[[], Any], leaves: tuple[Tensor, ...]) -> None:
    outputs = function()
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.grad(outputs, leaves, [torch.empty_like(output) for output in outputs])


def _ways_of_hopper(
    name: str, preset: Preset, dtype: torch.dtype, num_coordinates: int, options: Options
) -> Iterator[ShippedCall]:
    """Yields a forward pass, and backward passes with a frozen value and in a fixed order beside the common one."""
    grad_output, inputs = unallocated_inputs(preset, dtype, num_coordinates, options)
    backward = partial(launch.backward, grad_output, inputs, options, False, True)
    thin = partial(launch.backward, grad_output, inputs, options, True, True)
    runs: dict[str, Callable[[], Any]] = {
        "forward": partial(launch.forward, inputs, options, False),
        "forward of thin levels": partial(launch.forward, inputs, options, True),
        "eager step": partial(_step, grad_output, inputs, options),
        "backward": partial(backward, False, _TRAINING),
        "backward of thin levels": partial(thin, False, _TRAINING),
        "backward of a frozen value": partial(backward, False, _FROZEN_VALUE),
        "deterministic backward": partial(backward, True, _TRAINING),
    }
    for words, run in runs.items():
        yield ShippedCall(f"{name} {words}", preset.head_dim, True, run, architecture=90)


def _step(grad_output: Tensor, inputs: Inputs, options: Options) -> None:
    _, counted = launch.counting_forward(inputs, options, False, True, False)
    launch.backward(grad_output, inputs, options, False, True, False, _TRAINING, counted)


def unallocated_inputs(
    preset: Preset, dtype: torch.dtype, num_coordinates: int = 0, options: Options = DEFAULT_OPTIONS
) -> tuple[Tensor, Inputs]:
    """Returns upstream gradient and inputs of a preset in a batch of 4, without memory.

    Args:
        preset: sizes.
        dtype: of value, scores and upstream gradient.
        num_coordinates: of the reference points; 0 for the plain op, whose points are locations.
        options: decide the layouts.
    """
    b, q, m, d, k = _BATCH, preset.num_queries, preset.num_heads, preset.head_dim, preset.num_points
    s, num_levels = preset.value_length, len(preset.spatial_shapes)
    pair_first = options.sampling_locations_layout == "B2QHLP"
    samples = (q, m, num_levels, k)
    inputs = Inputs(
        value=_empty(b, m, s, d, dtype=dtype) if options.value_layout == "BNLC" else _empty(b, s, m, d, dtype=dtype),
        spatial_shapes=_empty(num_levels, 2, dtype=torch.int64),
        level_start_index=_empty(num_levels, dtype=torch.int64),
        points=_empty(*((b, 2, *samples) if pair_first else (b, *samples, 2)), dtype=torch.float32),
        scores=_empty(b, *samples, dtype=dtype),
        reference_points=_empty(b, q, num_levels, num_coordinates, dtype=torch.float32) if num_coordinates else None,
    )
    return _empty(b, q, m * d, dtype=dtype), inputs


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta").as_subclass(UnallocatedCudaTensor)
