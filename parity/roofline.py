"""Bytes that a call of the op has to move, to hold its measured time against."""

from dataclasses import dataclass

from parity.presets import Preset

# What the kernels compute in and add up in, whatever the dtype of value.
_FLOAT32_BYTES = 4
_CORNERS = 4


@dataclass(frozen=True)
class Traffic:
    """Bytes of one call.

    Args:
        forward: each input read once and the output written once: what memory must move at least.
        backward: the same, all gradients written in the dtype of their input.
        forward_gathers: corner rows of value that the samples read: what the caches must serve.
        backward_gathers: the same, plus as many rows added to the gradient of value in float32.
    """

    forward: int
    backward: int
    forward_gathers: int
    backward_gathers: int


def predict_traffic(preset: Preset, batch: int, element_bytes: int) -> Traffic:
    """Predicts the bytes of one call.

    Args:
        preset: sizes.
        batch: B.
        element_bytes: of value, attention weights, output and upstream gradient; locations have 4.
    """
    row = preset.num_heads * preset.head_dim * element_bytes
    samples = batch * preset.num_queries * preset.num_heads * len(preset.spatial_shapes) * preset.num_points
    value = batch * preset.value_length * row
    output = batch * preset.num_queries * row
    sample_tensors = samples * (2 * _FLOAT32_BYTES + element_bytes)
    corner_elements = samples * _CORNERS * preset.head_dim
    forward_gathers = corner_elements * element_bytes
    return Traffic(
        forward=value + sample_tensors + output,
        backward=2 * (value + sample_tensors) + output,
        forward_gathers=forward_gathers,
        backward_gathers=forward_gathers + corner_elements * _FLOAT32_BYTES,
    )
