"""Verdicts, the results of the levels, and the versioned JSON document that holds them."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
_DOCUMENT_KEYS = ("schema_version", "verdict", "levels", "manifest")
_LEVEL_KEYS = ("level", "question", "verdict", "checks", "margins", "data")


class Verdict(StrEnum):
    """Answer of a check, a level or a whole run."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"

    @property
    def exit_code(self) -> int:
        """0 for a pass, 1 for a failure, 2 for neither."""
        return (Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE).index(self)


def combine(verdicts: Iterable[Verdict]) -> Verdict:
    """Returns FAIL if there is one, else INCONCLUSIVE if there is one or nothing at all, else PASS."""
    found = set(verdicts)
    if Verdict.FAIL in found:
        return Verdict.FAIL
    return Verdict.PASS if found == {Verdict.PASS} else Verdict.INCONCLUSIVE


def judge(passed: bool) -> Verdict:
    """Returns PASS or FAIL."""
    return Verdict.PASS if passed else Verdict.FAIL


@dataclass(frozen=True)
class Check:
    """One question with its answer.

    Args:
        name: what is checked.
        verdict: the answer.
        detail: one sentence with the numbers.
        guards: whether this is a condition under which the level compares anything at all; where it is not met, the
            level is void, whatever its other checks say.
    """

    name: str
    verdict: Verdict
    detail: str
    guards: bool = False


def guard(name: str, met: bool, detail: str) -> Check:
    """Makes a check of a condition that the level needs to compare anything."""
    return Check(name, Verdict.PASS if met else Verdict.INCONCLUSIVE, detail, guards=True)


@dataclass(frozen=True)
class LevelResult:
    """What one level found.

    Args:
        level: its word on the command line.
        question: what it answers.
        checks: conditions and comparisons.
        margins: bounds that were declared before the run, by name.
        data: numbers for tables and plots, plain JSON values.
    """

    level: str
    question: str
    checks: tuple[Check, ...]
    margins: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """INCONCLUSIVE where a condition is not met, else what the checks say together."""
        if any(check.guards and check.verdict is not Verdict.PASS for check in self.checks):
            return Verdict.INCONCLUSIVE
        return combine(check.verdict for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields and the verdict as plain JSON values."""
        checks = [asdict(check) for check in self.checks]
        fields = {"level": self.level, "question": self.question, "verdict": self.verdict, "checks": checks}
        return fields | {"margins": dict(self.margins), "data": dict(self.data)}


def build_document(levels: Iterable[LevelResult], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the document of a run: version of the schema, overall verdict, levels, manifest."""
    levels = list(levels)
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": combine(level.verdict for level in levels),
        "levels": [level.to_json() for level in levels],
        "manifest": dict(manifest),
    }


def check_document(document: Any, source: str) -> dict[str, Any]:
    """Returns a document that has this version and all keys.

    Raises:
        ValueError: if it does not.
    """
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(f"{source} must have schema_version {SCHEMA_VERSION}, got {version}; run the suite again")
    missing = [key for key in _DOCUMENT_KEYS if key not in document]
    missing += [key for level in document.get("levels", ()) for key in _LEVEL_KEYS if key not in level]
    if missing:
        raise ValueError(f"{source} must hold all keys of its schema, got none called {', '.join(missing)}")
    return document


def write_text_atomically(path: Path, text: str) -> None:
    """Writes aside and renames, so that an interruption leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    aside.write_text(text)
    aside.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON atomically; numbers that are not finite become null, which JSON has and NaN it has not."""
    write_text_atomically(path, json.dumps(_finite(value), indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
