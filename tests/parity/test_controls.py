"""Tensors are judged by what a nudge does to them; a control that hits zero by chance condemns nobody."""

import math

import pytest
import torch

from parity.controls import judge, relative_errors

BASE = {
    ("output", "logits"): torch.tensor([3.0, 4.0]),
    ("loss", "a"): torch.tensor(2.0),
    ("loss", "b"): torch.tensor(4.0),
    ("gradient", "w"): torch.ones(4),
    ("gradient", "zero"): torch.zeros(4),
}
CONTROLS = [dict.fromkeys(BASE, 1e-3) | {("loss", "b"): 0.0}]


def moved(**by_name: float) -> dict[tuple[str, str], torch.Tensor]:
    return {key: tensor + by_name.get(key[1], 0.0) for key, tensor in BASE.items()}


def failed(**by_name: float) -> list[str]:
    return [row.name for row in judge(BASE, CONTROLS, moved(**by_name)) if not row.passed]


def test_errors_are_relative_norms():
    errors = relative_errors(BASE, moved(a=0.2, zero=0.5))
    assert errors["loss", "a"] == pytest.approx(0.1)
    assert errors["gradient", "zero"] == pytest.approx(1.0)
    assert errors["output", "logits"] == 0.0


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [("a", 2 * 1.9e-3, 2 * 2.1e-3), ("b", 4 * 1.9e-3, 4 * 2.1e-3), ("w", 2.9e-3, 3.1e-3)],
)
def test_twice_the_control_passes_for_losses_and_three_times_for_gradients(name, allowed, refused):
    assert failed(**{name: allowed}) == []
    assert failed(**{name: refused}) == [name]


def test_what_is_not_a_number_fails():
    row = next(row for row in judge(BASE, CONTROLS, moved(w=math.nan)) if row.name == "w")
    assert not row.passed
    assert row.ratio == math.inf


def test_cosine_is_one_for_equal_tensors_and_minus_one_for_opposite_ones():
    other = moved() | {("gradient", "w"): -torch.ones(4)}
    cosines = {row.name: row.cosine for row in judge(BASE, CONTROLS, other)}
    assert cosines["w"] == pytest.approx(-1.0)
    assert cosines["zero"] == 1.0


def test_runs_of_two_models_are_refused():
    with pytest.raises(ValueError, match="only one with gradient w"):
        relative_errors(BASE, {key: tensor for key, tensor in BASE.items() if key[1] != "w"})
