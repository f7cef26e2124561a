"""Equivalence tests and bootstrap intervals."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from parity.results import Verdict


@dataclass(frozen=True)
class Equivalence:
    """Outcome of a paired TOST.

    Args:
        verdict: PASS where the interval lies inside the margin, FAIL where it lies outside, else INCONCLUSIVE.
        mean: mean difference.
        low: lower end of the interval.
        high: upper end of the interval.
        margin: largest difference that counts as equivalent.
        deviation: standard deviation of the differences.
        p_value: the larger of the two one-sided p-values.
        num_pairs: number of differences.
    """

    verdict: Verdict
    mean: float
    low: float
    high: float
    margin: float
    deviation: float
    p_value: float
    num_pairs: int


def paired_tost(differences: ArrayLike, margin: float, confidence: float, min_pairs: int) -> Equivalence:
    """Tests whether paired differences are equivalent to zero by two one-sided t-tests (Schuirmann 1987).

    Both tests reject at level (1 - confidence) / 2 exactly where the interval of that confidence lies within
    (-margin, margin).

    Args:
        differences: one a pair; a number that is not finite (an arm diverged) fails.
        margin: above 0, declared before the run.
        confidence: of the interval, e.g. 0.90 for two tests at 5 %.
        min_pairs: fewer pairs never pass.

    Raises:
        ValueError: if there are fewer than two pairs, or margin or confidence is out of range.
    """
    values = np.asarray(differences, dtype=np.float64)
    if values.ndim != 1 or len(values) < 2:
        raise ValueError(f"differences must hold at least 2 pairs, got shape {values.shape}; run more seeds")
    if margin <= 0 or not 0 < confidence < 1:
        raise ValueError(f"margin must be > 0 and confidence in 0..1, got {margin} and {confidence}; change them")
    num_pairs = len(values)
    if not np.isfinite(values).all():
        nan = float("nan")
        return Equivalence(Verdict.FAIL, nan, nan, nan, margin, nan, 1.0, num_pairs)
    mean, deviation = float(values.mean()), float(values.std(ddof=1))
    error = deviation / np.sqrt(num_pairs)
    reach = float(stats.t.ppf(0.5 + confidence / 2, num_pairs - 1) * error)
    low, high = mean - reach, mean + reach
    if error > 0:
        p_value = float(stats.t.sf((margin - abs(mean)) / error, num_pairs - 1))
    else:
        p_value = 0.0 if abs(mean) < margin else 1.0
    if low >= margin or high <= -margin:
        verdict = Verdict.FAIL
    elif -margin < low and high < margin and num_pairs >= min_pairs:
        verdict = Verdict.PASS
    else:
        verdict = Verdict.INCONCLUSIVE
    return Equivalence(verdict, mean, low, high, margin, deviation, p_value, num_pairs)


def allowed_difference(values: ArrayLike, num_others: int, confidence: float) -> float:
    """Returns how far the mean of other values may lie from that of these where both come from one distribution.

    Half the width of the t-interval of a difference of means, with the deviation of the first sample alone, so that
    the second, which is in question, cannot widen it.

    Args:
        values: the first sample, at least two values.
        num_others: values of the second.
        confidence: of the interval, two-sided, e.g. 0.99.

    Raises:
        ValueError: if there are fewer than two values, or none of the second sample.
    """
    if np.size(values) < 2 or num_others < 1:
        raise ValueError(
            f"samples must hold at least 2 values and 1, got {np.size(values)} and {num_others}; measure more"
        )
    sample = np.asarray(values, dtype=np.float64)
    error = sample.std(ddof=1) * np.sqrt(1 / len(sample) + 1 / num_others)
    return float(stats.t.ppf(0.5 + confidence / 2, len(sample) - 1) * error)


def simulate_power(
    num_pairs: int, margin_deviations: float, confidence: float, seed: int, draws: int = 20_000
) -> float:
    """Returns how often a paired TOST passes where there is no true difference and differences are normal.

    Args:
        num_pairs: pairs of one experiment.
        margin_deviations: margin in standard deviations of the paired difference.
        confidence: of the interval.
        seed: of the simulation.
        draws: simulated experiments.
    """
    samples = np.random.default_rng(seed).standard_normal((draws, num_pairs))
    reach = stats.t.ppf(0.5 + confidence / 2, num_pairs - 1) * samples.std(1, ddof=1) / np.sqrt(num_pairs)
    return float((np.abs(samples.mean(1)) + reach < margin_deviations).mean())


def bootstrap_band(
    curves: ArrayLike, confidence: float, resamples: int, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Returns the mean of curves `[n, steps]` and the ends of its pointwise percentile interval over resampled rows."""
    values = np.asarray(curves, dtype=np.float64)
    generator = np.random.default_rng(seed)
    rows = generator.integers(len(values), size=(resamples, len(values)))
    # Weights of the rows rather than the rows themselves: resamples x n numbers in place of resamples x n x steps.
    weights = np.stack([np.bincount(row, minlength=len(values)) for row in rows]) / len(values)
    low, high = np.quantile(weights @ values, (0.5 - confidence / 2, 0.5 + confidence / 2), axis=0)
    return values.mean(0), low, high


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians with its percentile interval."""

    ratio: float
    low: float
    high: float


def bootstrap_ratio(
    numerators: ArrayLike, denominators: ArrayLike, confidence: float, resamples: int, seed: int
) -> Ratio:
    """Returns median(numerators) / median(denominators) with a bootstrap interval; the two are resampled apart.

    Raises:
        ValueError: if either is empty, or a denominator is not positive.
    """
    above, below = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if not len(above) or not len(below) or below.min() <= 0:
        raise ValueError(
            f"samples must not be empty and denominators be > 0, got {len(above)} and {len(below)}; measure again"
        )
    generator = np.random.default_rng(seed)
    medians = [np.median(generator.choice(values, (resamples, len(values))), axis=1) for values in (above, below)]
    low, high = np.quantile(medians[0] / medians[1], (0.5 - confidence / 2, 0.5 + confidence / 2))
    return Ratio(float(np.median(above) / np.median(below)), float(low), float(high))
