"""Imports run one way: msda_op <- models <- parity <- scripts, coco <- parity <- scripts, coco apart from models."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {
    "msda_op": set(),
    "models": {"msda_op"},
    "coco": set(),
    "parity": {"msda_op", "models", "coco"},
    "scripts": {"msda_op", "models", "coco", "parity"},
    "train.py": {"coco", "models"},
}


def imported_packages(source: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            names.add((node.module or "").split(".")[0])
    return names & {"msda_op", "models", "coco", "parity", "scripts", "train"}


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_run_one_way(room):
    path = ROOT / room
    files = [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))
    assert files
    for file in files:
        foreign = imported_packages(file.read_text()) - {room} - ALLOWED[room]
        assert not foreign, f"{file.relative_to(ROOT)} imports {sorted(foreign)}"


def test_a_wrong_import_is_seen():
    assert imported_packages("def f():\n    from models.boxes import area\n") == {"models"}


def test_files_stay_short():
    for room in ALLOWED:
        for file in [ROOT / room] if room.endswith(".py") else (ROOT / room).rglob("*.py"):
            assert len(file.read_text().splitlines()) <= 400, file
