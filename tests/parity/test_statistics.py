"""Equivalence needs an interval inside the margin and enough pairs; intervals cover what they should."""

import math

import numpy as np
import pytest

from parity.results import Verdict
from parity.statistics import allowed_difference, bootstrap_band, bootstrap_ratio, paired_tost, simulate_power

EVEN = [-0.1, 0.1, -0.2, 0.2, 0.0, 0.05, -0.05, 0.0]


def test_interval_is_that_of_the_t_distribution():
    result = paired_tost([1.0, 2.0, 3.0], margin=5.0, confidence=0.90, min_pairs=3)
    reach = 2.919986 * 1.0 / math.sqrt(3)
    assert (result.mean, result.deviation) == (2.0, 1.0)
    assert result.low == pytest.approx(2 - reach, abs=1e-6)
    assert result.high == pytest.approx(2 + reach, abs=1e-6)


@pytest.mark.parametrize(
    ("differences", "margin", "min_pairs", "verdict"),
    [
        (EVEN, 0.5, 8, Verdict.PASS),
        (EVEN, 0.5, 9, Verdict.INCONCLUSIVE),
        (EVEN, 0.01, 8, Verdict.INCONCLUSIVE),
        ([value + 1 for value in EVEN], 0.5, 8, Verdict.FAIL),
        ([value - 1 for value in EVEN], 0.5, 8, Verdict.FAIL),
        ([value + 0.5 for value in EVEN], 0.5, 8, Verdict.INCONCLUSIVE),
        ([0.0] * 8, 0.5, 8, Verdict.PASS),
        ([0.7] * 8, 0.5, 8, Verdict.FAIL),
        ([*EVEN[:-1], math.nan], 0.5, 8, Verdict.FAIL),
        ([*EVEN[:-1], math.inf], 0.5, 8, Verdict.FAIL),
    ],
)
def test_verdicts(differences, margin, min_pairs, verdict):
    assert paired_tost(differences, margin, 0.90, min_pairs).verdict is verdict


def test_p_value_crosses_five_percent_where_the_interval_touches_the_margin():
    high = paired_tost(EVEN, 1.0, 0.90, 8).high
    assert paired_tost(EVEN, high, 0.90, 8).p_value == pytest.approx(0.05, abs=1e-9)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="at least 2 pairs"):
        paired_tost([1.0], 1.0, 0.9, 2)
    with pytest.raises(ValueError, match="margin must be > 0"):
        paired_tost(EVEN, 0.0, 0.9, 2)


@pytest.mark.parametrize(("pairs", "power"), [(8, 0.64), (10, 0.80), (12, 0.89), (13, 0.92)])
def test_power_at_a_margin_of_one_deviation(pairs, power):
    assert simulate_power(pairs, 1.0, 0.90, seed=0) == pytest.approx(power, abs=0.02)


def test_band_holds_the_mean_and_narrows_with_agreement():
    curves = np.random.default_rng(0).normal(size=(30, 5))
    mean, low, high = bootstrap_band(curves, 0.90, 500, seed=0)
    assert np.allclose(mean, curves.mean(0))
    assert ((low < mean) & (mean < high)).all()
    _, flat_low, flat_high = bootstrap_band(np.ones((4, 5)), 0.90, 50, seed=0)
    assert np.allclose(flat_low, 1)
    assert np.allclose(flat_high, 1)


def test_ratio_interval_covers_the_truth_and_not_another():
    generator = np.random.default_rng(0)
    slow, fast = generator.normal(20, 1, 40), generator.normal(10, 1, 40)
    ratio = bootstrap_ratio(slow, fast, 0.95, 1000, seed=0)
    assert ratio.low < 2 < ratio.high
    assert ratio.low > 1.5
    same = bootstrap_ratio(slow, slow, 0.95, 1000, seed=0)
    assert same.low <= 1 <= same.high
    with pytest.raises(ValueError, match="must not be empty"):
        bootstrap_ratio([], fast, 0.95, 10, seed=0)


def test_allowed_difference_is_exceeded_as_rarely_as_promised():
    draws = np.random.default_rng(0).normal(size=(4000, 16))
    exceeded = [
        abs(row[8:].mean() - row[:8].mean()) > allowed_difference(row[:8], num_others=8, confidence=0.95)
        for row in draws
    ]
    assert np.mean(exceeded) == pytest.approx(0.05, abs=0.015)
    assert allowed_difference([0.0, 0.0], 2, 0.99) == 0
    assert allowed_difference([1.0, 3.0], 2, 0.9) == pytest.approx(6.313752 * math.sqrt(2), abs=1e-5)


def test_allowed_difference_needs_values():
    with pytest.raises(ValueError, match="at least 2 values"):
        allowed_difference([1.0], 1, 0.9)
