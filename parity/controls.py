"""Judges named tensors of two runs by control runs whose weights were moved by one unit in the last place.

A sound op differs from another by rounding; so do the controls. What a control's rounding does to a tensor, times the
factor of `parity.tolerances`, is what an op may do to it.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.tolerances import GRADIENT, OUTPUT, Bound

# Group of tensors -> allowed multiple of the controls' error.
_BOUNDS: dict[str, Bound] = {
    "output": OUTPUT,
    "loss": OUTPUT,
    "gradient": GRADIENT,
    "updated parameter": GRADIENT,
}
GROUPS = {"output": "outputs", "loss": "losses", "gradient": "gradients", "updated parameter": "updated parameters"}
"""Groups of tensors and their plurals."""

Tensors = Mapping[tuple[str, str], Tensor]
"""Tensors by (group, name), the group one of `GROUPS`."""


@dataclass(frozen=True)
class Judged:
    """Difference of one tensor.

    Args:
        group: one of `GROUPS`.
        name: of the tensor.
        error: relative L2 difference from the base run.
        limit: the largest one allowed.
        cosine: of the angle between the tensor and its base.
    """

    group: str
    name: str
    error: float
    limit: float
    cosine: float

    @property
    def passed(self) -> bool:
        """Whether the error keeps its limit; NaN does not."""
        return self.error <= self.limit

    @property
    def ratio(self) -> float:
        """Error as a multiple of its limit; infinite where it is not a number."""
        return math.inf if math.isnan(self.error) else self.error / self.limit


def relative_errors(base: Tensors, other: Tensors) -> dict[tuple[str, str], float]:
    """Returns ||other - base|| / ||base|| of every tensor; the norm of `other` itself where the base is zero.

    Raises:
        ValueError: if the two do not hold the same tensors.
    """
    if base.keys() != other.keys():
        differing = sorted(" ".join(key) for key in base.keys() ^ other.keys())
        raise ValueError(
            f"runs must hold the same tensors, got only one with {', '.join(differing)}; compare one model"
        )
    errors = {}
    for key, tensor in base.items():
        norm = tensor.double().norm().item()
        difference = (other[key].double() - tensor.double()).norm().item()
        errors[key] = difference / norm if norm else difference
    return errors


def judge(base: Tensors, control_errors: Sequence[Mapping[tuple[str, str], float]], other: Tensors) -> list[Judged]:
    """Judges every tensor of a run, in the order of the base.

    A single number's control may be zero by chance, so that a loss is held against the largest error of all losses,
    and no tensor is held to less than the median of its group.

    Args:
        base: the run that is compared with.
        control_errors: `relative_errors` of each control.
        other: the run to judge.
    """
    largest = {key: max(errors[key] for errors in control_errors) for key in base}
    by_group: dict[str, list[float]] = defaultdict(list)
    for (group, _), error in largest.items():
        by_group[group].append(error)
    judged = []
    for (group, name), error in relative_errors(base, other).items():
        in_group = by_group[group]
        floor = max(in_group) if group == "loss" else statistics.median(in_group)
        limit = _BOUNDS[group].limit(max(largest[group, name], floor), scale=1.0, dtype=torch.float32)
        cosine = _cosine(base[group, name], other[group, name])
        judged.append(Judged(group, name, error, limit, cosine))
    return judged


def _cosine(first: Tensor, second: Tensor) -> float:
    """Returns the cosine between two tensors, 1 where both are zero."""
    first, second = first.double().flatten(), second.double().flatten()
    norms = first.norm() * second.norm()
    if norms == 0:
        return 1.0 if torch.equal(first, second) else 0.0
    return (first @ second / norms).item()
