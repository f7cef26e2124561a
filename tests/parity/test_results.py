"""Verdicts combine to the worst, a condition that is not met voids a level, and JSON holds no NaN."""

import json

import pytest

from parity.results import (
    Check,
    LevelResult,
    Verdict,
    build_document,
    check_document,
    combine,
    guard,
    write_json,
    write_text_atomically,
)

PASSED = Check("a", Verdict.PASS, "")
FAILED = Check("b", Verdict.FAIL, "")


def level(*checks):
    return LevelResult("op", "right?", checks)


def test_exit_codes():
    assert [verdict.exit_code for verdict in (Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE)] == [0, 1, 2]


def test_the_worst_verdict_wins_and_nothing_proves_nothing():
    assert combine([Verdict.PASS, Verdict.PASS]) is Verdict.PASS
    assert combine([Verdict.PASS, Verdict.INCONCLUSIVE]) is Verdict.INCONCLUSIVE
    assert combine([Verdict.INCONCLUSIVE, Verdict.FAIL]) is Verdict.FAIL
    assert combine([]) is Verdict.INCONCLUSIVE


def test_an_unmet_condition_voids_a_level():
    assert level(PASSED).verdict is Verdict.PASS
    assert level(PASSED, FAILED).verdict is Verdict.FAIL
    assert level(PASSED, guard("data", True, "")).verdict is Verdict.PASS
    assert level(PASSED, FAILED, guard("data", False, "")).verdict is Verdict.INCONCLUSIVE


def test_a_document_keeps_its_schema():
    document = json.loads(json.dumps(build_document([level(PASSED)], {"op": "triton"})))
    assert check_document(document, "file")["verdict"] == "PASS"
    with pytest.raises(ValueError, match="schema_version 1, got 0"):
        check_document({**document, "schema_version": 0}, "file")
    del document["levels"][0]["margins"]
    with pytest.raises(ValueError, match="none called margins"):
        check_document(document, "file")


def test_numbers_that_are_not_finite_become_null(tmp_path):
    write_json(tmp_path / "file.json", {"curve": [1.0, float("nan"), float("-inf")], 3: (2.5,)})
    assert json.loads((tmp_path / "file.json").read_text()) == {"curve": [1.0, None, None], "3": [2.5]}


def test_writing_leaves_no_part_behind(tmp_path):
    path = tmp_path / "deep" / "file.txt"
    write_text_atomically(path, "first")
    write_text_atomically(path, "second")
    assert path.read_text() == "second"
    assert [file.name for file in path.parent.iterdir()] == ["file.txt"]
