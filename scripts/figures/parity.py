"""Verdicts of the parity suite, from `python -m parity` and `python -m parity.step_switches`."""

from collections.abc import Sequence

from scripts.figures.tables import NEW_LINE, Cells, Content, Kind, ResultsFile, Section, format_words, rows_with

PARITY_SECTION = Section(
    "Parity",
    "Does training with the first op come to the same as training with the second? [The method](docs/parity.md).",
    ("ops", "precision, preset", "verdict", "levels"),
)
SWITCHES_SECTION = Section(
    "Parity with what makes a step fast",
    "Levels of the parity suite with nothing of it turned on, with each alone (and with what it needs), and with all. "
    "Of a trajectory's steps 99 % must lie inside the envelope: of 40 none may lie outside, of 100 one "
    "([what follows](docs/parity.md#limits)).",
    ("settings of `python -m parity`", "turned on"),
)


def make_rows(content: Content) -> list[Cells]:
    """Returns a row: both ops, where, and the verdicts."""
    if not _is_report(content):
        return []
    manifest = content["manifest"]
    levels = ", ".join(f"{level['level']} {level['verdict']}" for level in content["levels"])
    ops = f"{manifest['op']}, {manifest['against']}"
    return [(ops, f"{manifest['precision']}, {manifest['preset']}", f"**{content['verdict']}**", levels)]


def make_switch_rows(content: Content) -> list[Cells]:
    """Returns a row with the verdicts for each of what was turned on."""
    verdicts: dict[str, list[str]] = {}
    for row in rows_with(content, "switches"):
        verdicts.setdefault(row["switches"], []).append(f"{row['level']} {row['verdict']}")
    lines = [f"{name}: {', '.join(found)}" for name, found in verdicts.items()]
    return [(format_words(content["overrides"]), NEW_LINE.join(lines))] if lines else []


def make_front(files: Sequence[ResultsFile]) -> list[Cells]:
    """Returns a row a file, verdicts first, then those where nothing but speed was asked for."""
    speeds = [file for file in files if _is_speed_alone(file.content)]
    verdicts = [file for file in files if file not in speeds]
    return [
        *(cells for file in verdicts for cells in file.sign([_verdict_cells(file.content)])),
        *(cells for file in speeds for cells in file.sign([_speed_cells(file.content)])),
    ]


def _is_report(content: Content) -> bool:
    return "levels" in content and "verdict" in content


def _is_speed_alone(content: Content) -> bool:
    """Whether a file says how fast steps are and nothing else; a time that does not count is a verdict, no speed."""
    return [level["level"] for level in content["levels"]] == ["speed"] and content["verdict"] == "PASS"


def _verdict_cells(content: Content) -> Cells:
    manifest = content["manifest"]
    levels = ", ".join(level["level"] for level in content["levels"])
    what = f"parity suite, {manifest['preset']}, {manifest['precision']}: {levels}"
    return what, f"op={manifest['op']} **{content['verdict']}**", f"op={manifest['against']}"


def _speed_cells(content: Content) -> Cells:
    manifest, data = content["manifest"], content["levels"][0]["data"]
    against_ms, ours_ms = (data["step_ms"][arm]["median"] for arm in ("A", "B"))
    ratio = data["ratios"]["A / B"]
    times = f"{ratio['ratio']:.2f} x, {ratio['low']:.2f} to {ratio['high']:.2f}"
    return (
        f"a step of the parity suite, {manifest['precision']}, nothing but the op exchanged",
        f"op={manifest['op']} {ours_ms:.0f} ms",
        f"op={manifest['against']} {against_ms:.0f} ms ({times})",
    )


PARITY = Kind(PARITY_SECTION, make_rows, make_front)
PARITY_SWITCHES = Kind(SWITCHES_SECTION, make_switch_rows)
