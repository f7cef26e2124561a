"""Comparison of an implementation of the op with float64 and with the reference in the same precision.

Expected: the reference in float64. Competitor: the reference in the dtype under test. Actual: what is judged.
Nothing here prints or asserts; callers read the verdicts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from msda_op.options import DEFAULT_OPTIONS, Options
from msda_op.reference import ms_deform_attn_reference
from parity.cases import INPUT_NAMES, OpInputs
from parity.tolerances import GRADIENT, OUTPUT, Bound

Op = Callable[[Tensor, tuple[tuple[int, int], ...], Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Comparison:
    """Errors of one tensor against float64, and the limits they must keep.

    Args:
        name: "output" or the name of the input whose gradient this is.
        max_error: largest absolute error.
        mean_error: mean absolute error.
        competitor_max_error: the same of the competitor.
        competitor_mean_error: the same of the competitor.
        max_limit: largest `max_error` allowed.
        mean_limit: largest `mean_error` allowed.
    """

    name: str
    max_error: float
    mean_error: float
    competitor_max_error: float
    competitor_mean_error: float
    max_limit: float
    mean_limit: float

    @property
    def passed(self) -> bool:
        """Whether both errors keep their limits; NaN does not."""
        return self.max_error <= self.max_limit and self.mean_error <= self.mean_limit


def compare(name: str, expected: Tensor, competitor: Tensor, actual: Tensor, bound: Bound) -> Comparison:
    """Measures `actual` and `competitor` against `expected`.

    Raises:
        ValueError: if shapes differ, or `actual` has another dtype than `competitor`.
    """
    if not expected.shape == competitor.shape == actual.shape:
        raise ValueError(
            f"{name} must have one shape in all results, got expected {tuple(expected.shape)}, competitor "
            f"{tuple(competitor.shape)}, actual {tuple(actual.shape)}; compare results of the same inputs"
        )
    if actual.dtype != competitor.dtype:
        raise ValueError(f"{name} must be {competitor.dtype} as the competitor, got {actual.dtype}; return that dtype")
    max_error, mean_error = _errors(actual, expected)
    competitor_max, competitor_mean = _errors(competitor, expected)
    max_scale, mean_scale = _errors(torch.zeros_like(expected), expected)
    return Comparison(
        name,
        max_error,
        mean_error,
        competitor_max,
        competitor_mean,
        bound.limit(competitor_max, max_scale, actual.dtype),
        bound.limit(competitor_mean, mean_scale, actual.dtype),
    )


def evaluate(op: Op, inputs: OpInputs, gradients: tuple[str, ...]) -> dict[str, Tensor]:
    """Runs an op forward and backward.

    Args:
        op: called with value, spatial_shapes, sampling_locations, attention_weights.
        inputs: what to call it with, and the upstream gradient.
        gradients: names of the inputs that need a gradient.

    Returns:
        "output" and the gradients by name of their input.
    """
    leaves = {name: getattr(inputs, name).detach().requires_grad_(name in gradients) for name in INPUT_NAMES}
    output = op(leaves["value"], inputs.spatial_shapes, leaves["sampling_locations"], leaves["attention_weights"])
    grads = torch.autograd.grad(output, [leaves[name] for name in gradients], inputs.grad_output)
    return {"output": output.detach(), **dict(zip(gradients, grads, strict=True))}


def compare_results(
    expected: Mapping[str, Tensor], competitor: Mapping[str, Tensor], actual: Mapping[str, Tensor]
) -> tuple[Comparison, ...]:
    """Compares the results of three runs of `evaluate`, tensor by tensor."""
    return tuple(
        compare(name, expected[name], competitor[name], actual[name], OUTPUT if name == "output" else GRADIENT)
        for name in expected
    )


def compare_op(
    op: Op, inputs: OpInputs, gradients: tuple[str, ...], options: Options = DEFAULT_OPTIONS
) -> tuple[Comparison, ...]:
    """Compares an op with the reference on the same inputs: output, then the gradients asked for.

    Args:
        op: what is judged; it knows the options itself.
        inputs: drawn for these options.
        gradients: names of the inputs that need a gradient.
        options: conventions and layouts of the reference.
    """
    reference = partial(ms_deform_attn_reference, options=options)
    return compare_results(
        evaluate(reference, inputs.double(), gradients),
        evaluate(reference, inputs, gradients),
        evaluate(op, inputs, gradients),
    )


def _errors(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """Returns the largest and the mean absolute difference; zero for empty tensors."""
    if expected.numel() == 0:
        return 0.0, 0.0
    difference = (actual.double() - expected).abs()
    return difference.max().item(), difference.mean().item()
