"""Every bound of the comparisons, each with its reason."""

from dataclasses import dataclass

import torch

FLOAT32_ROUNDOFF = torch.finfo(torch.float32).eps / 2


@dataclass(frozen=True)
class Bound:
    """Allowed error: `factor` times the competitor's error, plus a floor relative to the size of the expected numbers.

    Args:
        factor: multiple of the error that the reference makes in the same precision.
        reason: why this factor.
    """

    factor: float
    reason: str

    def limit(self, competitor_error: float, scale: float, dtype: torch.dtype) -> float:
        """Returns the largest error allowed.

        The floor is one unit in the last place of the result's dtype (either neighbour of the exact number is a fair
        answer: a competitor may happen to hit it, and Triton's interpreter truncates bfloat16), and four float32
        roundings inside (sums of bilinear products differ in order).

        Args:
            competitor_error: error of the competitor against float64.
            scale: size of the expected numbers, in the same norm as the error.
            dtype: dtype of the result.
        """
        return self.factor * competitor_error + (torch.finfo(dtype).eps + 4 * FLOAT32_ROUNDOFF) * scale


OUTPUT = Bound(2.0, "one rounding of the result; twice leaves room for another order of the sums")
GRADIENT = Bound(3.0, "longer sums than the output's, added up by atomics in any order")

NAIVE_FLOAT64 = 1e-12  # absolute, for numbers of size one: thousands of float64 roundings, none of float32
