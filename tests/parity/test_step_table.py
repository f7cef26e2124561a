"""Which rows a table of training steps has."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from parity import step_table
from parity.step_benchmark import SWITCHES, StepCase
from parity.step_table import StepTable, format_row, measure_table

CPU = torch.device("cpu")
CASE = StepCase(("model=deformable_detr_tiny", "backbone=resnet18", "op=reference"), 1, 64, 96, 2)


def test_a_row_of_one_step() -> None:
    (row,) = measure_table(CASE, CPU, StepTable(repeats=2))
    assert row["size_hw"] == [64, 96]
    assert "batch 1 64x96" in format_row(row)


def test_switches_are_turned_off_one_at_a_time_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_table, "SyntheticStep", lambda case, device: case)
    monkeypatch.setattr(
        step_table, "measure_step", lambda step, case, warmup, repeats: {"overrides": list(case.overrides)}
    )
    rows = list(measure_table(CASE, CPU, StepTable(repeats=2, switches=True)))
    assert [tuple(row["overrides"][3:]) for row in rows[:-1]] == [(), *SWITCHES.values()]
    assert set(rows[-1]["overrides"][3:]) == {word for words in SWITCHES.values() for word in words}


def note(name: str, calls: list[str]) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        calls.append(name)
        return [{"who": name}] if name == "compare_steps" else {"who": name}

    return call


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"against": "official"}, ["start_peers", "compare_steps"]),
        ({"sizes": 7}, ["SyntheticStep", "measure_sizes"]),
        ({"data_workers": 3}, ["build_data", "SyntheticStep", "measure_data"]),
    ],
)
def test_rows_of_other_kinds_take_the_place_of_the_usual_ones(
    settings: dict[str, Any], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("start_peers", "compare_steps", "SyntheticStep", "measure_sizes", "build_data", "measure_data"):
        monkeypatch.setattr(step_table, name, note(name, calls))
    rows = list(measure_table(CASE, CPU, StepTable(repeats=2, **settings)))
    assert calls == expected
    assert rows == [{"who": expected[-1]}]
