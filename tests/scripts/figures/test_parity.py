"""Verdicts in front and of the switches."""

import pytest

from parity.results import Verdict
from parity.step_switches import run_variants
from scripts.figures.parity import PARITY, PARITY_SWITCHES
from scripts.figures.tables import ResultsFile

SPEED = {
    "step_ms": {"A": {"median": 30.0}, "B": {"median": 20.0}},
    "ratios": {"A / B": {"ratio": 1.5, "low": 1.4, "high": 1.6}},
}
MANIFEST = {"op": "triton", "against": "cuda", "precision": "bf16-mixed", "preset": "full"}


def report(verdict, *levels):
    found = [{"level": level, "verdict": verdict, "data": SPEED} for level in levels]
    return ResultsFile({"verdict": verdict, "levels": found, "manifest": MANIFEST}, "results.json")


def test_a_file_says_of_which_levels_its_verdict_is():
    ((what, ours, beside, *_),) = PARITY.front([report("FAIL", "op", "speed")])
    assert (what, ours, beside) == (
        "parity suite, full, bf16-mixed: op, speed",
        "op=triton **FAIL**",
        "op=cuda",
    )


@pytest.mark.parametrize(("verdict", "ours"), [("PASS", "op=triton 20 ms"), ("INCONCLUSIVE", "**INCONCLUSIVE**")])
def test_times_that_do_not_count_are_not_told(verdict, ours):
    ((_, told, *_),) = PARITY.front([report(verdict, "speed")])
    assert ours in told
    assert ("ms" in told) == (verdict == "PASS")


def test_verdicts_stand_before_speeds():
    rows = PARITY.front([report("PASS", "speed"), report("PASS", "op")])
    assert ["step" in cells[0] for cells in rows] == [False, True]


def test_a_file_of_the_switches_has_the_verdicts_of_each(tmp_path):
    import json

    out = tmp_path / "switches.json"

    def run(level, overrides, progress):
        return Verdict.FAIL if level == "trajectory" and "compile=true" in overrides else Verdict.PASS

    words = ["parity=full", "op=triton", f"data.root={tmp_path}"]
    run_variants(["fused_norm", "all"], ["model", "trajectory"], words, tmp_path, out, lambda line: None, run)
    content = json.loads(out.read_text())
    verdicts = "fused_norm: model PASS, trajectory PASS<br>all: model PASS, trajectory FAIL"
    assert PARITY_SWITCHES.rows(content) == [("`parity=full op=triton`", verdicts)]
    assert PARITY.rows(content) == []
