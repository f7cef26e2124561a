"""Writes the README's tables of measurements from results/*.json: `python -m scripts.readme_figures [--check]`.

Rows come from what `scripts.benchmark op`, `step` and `inference`, `scripts.scaling`, `python -m parity`,
`parity.step_switches` and trainings (their summary.json) wrote; `scripts/figures/` has a module for each kind of file.
The table in front has ours beside the most known others; all rows are folded away behind it. Files of other kinds are
named and left out. With --check nothing is written; the exit status is 1 if the tables differ from the files.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.figures.inference import INFERENCE
from scripts.figures.op import OP
from scripts.figures.parity import PARITY, PARITY_SWITCHES
from scripts.figures.steps import STEP, STEP_SWITCHES
from scripts.figures.streams import MANY_SIZES, REAL_DATA
from scripts.figures.tables import Cells, Kind, ResultsFile, Section, format_section
from scripts.figures.trainings import SCALING, TRAINING

BEGIN, END = "<!-- figures: python -m scripts.readme_figures -->", "<!-- end of figures -->"
NOTHING = (
    "Nothing has been measured into `results/` yet; `python -m scripts.benchmark op` and `step` on a GPU begin it."
)
FRONT = Section(
    "In short",
    "Medians; in brackets how many times ours, with a confidence interval where there is one. `by heart`: trained and "
    "evaluated on the same images, from the same random weights, as a check that nothing is lost on the way. Commits "
    "are links to the files.",
    ("what", "triton-detr", "beside it"),
)
KINDS = (
    OP,
    STEP,
    STEP_SWITCHES,
    REAL_DATA,
    MANY_SIZES,
    INFERENCE,
    PARITY,
    PARITY_SWITCHES,
    TRAINING,
    SCALING,
)
"""In the order in which a person asks."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrites the tables and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readme", type=Path, default=Path("README.md"))
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    options = parser.parse_args(arguments)
    text = options.readme.read_text()
    try:
        written = replace_tables(text, make_tables(options.results))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not options.check:
        options.readme.write_text(written)
    elif written != text:
        print(f"error: {options.readme} must show what {options.results} holds; run this without --check")
        return 1
    return 0


def replace_tables(text: str, tables: str) -> str:
    """Returns the text with other tables between its markers.

    Raises:
        ValueError: The markers are not there once each, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"README must hold {BEGIN} and {END} once, in this order; put them back")
    return f"{text[: text.index(BEGIN)]}{BEGIN}\n{tables}\n{text[text.index(END) :]}"


def make_tables(folder: Path) -> str:
    """Returns the tables of all figures in a folder, all but the first folded, or a sentence where there are none.

    Raises:
        ValueError: A file is no JSON.
    """
    files: dict[Kind, list[ResultsFile]] = {kind: [] for kind in KINDS}
    rows: dict[Kind, list[Cells]] = {kind: [] for kind in KINDS}
    for path in sorted(folder.rglob("*.json")):
        file = read_file(path, folder)
        found = {} if file is None else {kind: cells for kind in KINDS if (cells := kind.rows(file.content))}
        if file is None or not found:
            print(f"{path}: no figure for the README")
            continue
        for kind, cells in found.items():
            files[kind].append(file)
            rows[kind] += file.sign(cells)
    sections = [format_section(kind.section, cells) for kind, cells in rows.items() if cells]
    if not sections:
        return NOTHING
    folded = "\n\n".join(("<details>\n<summary>All measurements</summary>", *sections, "</details>"))
    front = [cells for kind in KINDS if files[kind] for cells in kind.front(files[kind])]
    return f"{format_section(FRONT, front)}\n\n{folded}" if front else folded


def read_file(path: Path, folder: Path) -> ResultsFile | None:
    """Reads a file below a folder; None where it holds no object.

    Raises:
        ValueError: It is no JSON.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"results must be JSON, got {path} ({error}); measure again") from error
    name = path.relative_to(folder).as_posix()
    return ResultsFile(content, f"{folder.name}/{name}") if isinstance(content, dict) else None


if __name__ == "__main__":
    sys.exit(main())
