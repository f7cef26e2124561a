"""Every row of docs/robustness.md names tests, and all of them exist."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "robustness.md"
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def rows_of(text):
    """Symptom, behaviour and tests of each row, without headings."""
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:2] == "| "]
    return [row for row in cells if row[0] not in ("symptom", "---")]


def absent_tests(row):
    for name, function in NAMED.findall(row[2]):
        path = TESTS / name
        tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
        if function not in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]:
            yield f"{name}::{function}"


def test_every_row_names_tests_that_exist():
    rows = rows_of(PAGE.read_text())
    assert len(rows) >= 25
    for row in rows:
        assert len(row) == 3
        assert re.fullmatch(rf"{NAMED.pattern}(, {NAMED.pattern})*", row[2])
        assert list(absent_tests(row)) == []


def test_an_absent_test_is_seen():
    text = "| a | b | `test_docs.py::test_nothing`, `test_docs.py::test_relative_links_resolve`, `no.py::test_x` |"
    (row,) = rows_of(text)
    assert list(absent_tests(row)) == ["test_docs.py::test_nothing", "no.py::test_x"]
