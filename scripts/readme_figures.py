"""Writes the README's tables of measurements from results/*.json: `python -m scripts.readme_figures [--check]`.

Rows come from what `scripts.benchmark op`, `step` and `inference`, `scripts.scaling`, `python -m parity` and trainings
(their summary.json) wrote. Files of other kinds are named and left out. With --check nothing is written; the exit
status is 1 if the tables differ from the files.
"""

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- figures: python -m scripts.readme_figures -->", "<!-- end of figures -->"
NOTHING = (
    "Nothing has been measured into `results/` yet; `python -m scripts.benchmark op` and `step` on a GPU begin it."
)
OURS, FUSED, COMPOSED = "msda_op triton", "msda_op triton, fused", "softmax + locations + msda_op triton"
"""Implementations as `parity.peers` names them: ours, and the two that take raw offsets and logits."""
NOT_SAID = ("data.root", "data.train_", "data.val_", "callbacks.", "logger=", "hydra.", "trainer.devices")
"""Words of a command that do not tell what was trained: where files lie and how much is printed."""

Cells = tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """A table of the README.

    Args:
        title: what was measured.
        note: how to read it.
        columns: names of all columns but the last two, which are machine and file.
    """

    title: str
    note: str
    columns: Cells


PARITY = Section(
    "Parity",
    "Does training with the first op come to the same as training with the second? [The method](docs/parity.md).",
    ("ops", "precision, preset", "verdict", "levels"),
)
OP = Section(
    "One call of the op",
    "GPU time of forward + backward in ms, and how many times ours the sum is. Levels are those of an 800 x 1333 image "
    "(`large`: 1333 x 2000); an `encoder` has a query for each of their 22,223 pixels, a `decoder` 300 queries, `dino` "
    "1,100. `msda_op reference` is `grid_sample` in PyTorch. Refused: errors against float64 are beyond the bounds of "
    "`parity/tolerances.py`, so that nothing was timed.",
    ("call", "ours", "others"),
)
STEP = Section(
    "A training step",
    "Forward, loss, backward and update on random images that lie on the GPU; largest batches by trying, or about, "
    "extrapolated from two.",
    ("code", "settings", "batch", "ms", "images/s", "peak memory", "largest batch"),
)
INFERENCE = Section(
    "Inference",
    "From uint8 images on the GPU to boxes, median wall time of a call in ms.",
    ("detector", "batch", "time"),
)
TRAINING = Section(
    "Trainings",
    "AP in percent, of few images: not to be compared with published ones, and with each other at equal commits alone.",
    ("settings of `train.py`", "evaluated on", "AP", "AP50", "steps", "time", "images/s", "peak memory"),
)
SCALING = Section("Several GPUs", "Images per second of a training.", ("GPUs", "times one GPU"))
SECTIONS = (PARITY, OP, STEP, INFERENCE, TRAINING, SCALING)


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
    """Returns the tables of all figures in a folder, or a sentence where there are none.

    Raises:
        ValueError: A file is no JSON.
    """
    tables: dict[Section, list[Cells]] = {section: [] for section in SECTIONS}
    for path in sorted(folder.rglob("*.json")):
        try:
            content = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"results must be JSON, got {path} ({error}); measure again") from error
        section, rows = read_figures(content)
        if section is None or not rows:
            print(f"{path}: no figure for the README")
            continue
        link = f"[{path.relative_to(folder)}]({(folder.name / path.relative_to(folder)).as_posix()})"
        tables[section] += [(*cells, describe_machine(content), link) for cells in rows]
    found = [format_section(section, rows) for section, rows in tables.items() if rows]
    return "\n\n".join(found) or NOTHING


def format_section(section: Section, rows: Sequence[Cells]) -> str:
    """Returns title, note and table in Markdown."""
    columns = (*section.columns, "machine", "file")
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, ("---",) * len(columns), *rows)]
    return f"**{section.title}.** {section.note}\n\n" + "\n".join(lines)


def read_figures(content: Any) -> tuple[Section | None, list[Cells]]:
    """Returns the section that a results file belongs to and its rows; no section for files of other kinds."""
    if not isinstance(content, dict):
        return None, []
    if "levels" in content and "verdict" in content:
        return PARITY, [_parity_cells(content)]
    if "speed_up" in content:
        return SCALING, [(str(content["gpus"]), f"{content['speed_up']:.2f}")]
    if "validation" in content and "img_per_s_median" in content:
        return TRAINING, [_training_cells(content)]
    rows = content.get("rows", [])
    if any("step_ms" in row for row in rows):
        return STEP, [_step_cells(row) for row in rows]
    if any("contender" in row for row in rows):
        return INFERENCE, _inference_cells(rows)
    if any("forward_device_ms_median" in row for row in rows):
        return OP, _op_cells(rows)
    return None, []


def describe_machine(content: dict[str, Any]) -> str:
    """Returns GPU, version of torch and commit, as far as the file says."""
    manifest = content.get("manifest", content)
    environment = manifest.get("environment", manifest)
    words = [(environment.get("gpus") or ["CPU"])[0]]
    if torch_version := environment.get("packages", {}).get("torch"):
        words.append(f"torch {torch_version}")
    if commit := environment.get("commit"):
        words.append(commit[:7])
    return ", ".join(words)


def _parity_cells(content: dict[str, Any]) -> Cells:
    """Both ops, where, and the verdicts."""
    manifest = content["manifest"]
    levels = ", ".join(f"{level['level']} {level['verdict']}" for level in content["levels"])
    ops = f"{manifest['op']}, {manifest['against']}"
    return ops, f"{manifest['precision']}, {manifest['preset']}", f"**{content['verdict']}**", levels


def _op_cells(rows: Sequence[dict[str, Any]]) -> list[Cells]:
    """A row a workload and boundary of the op: ours, which was measured first, and every other implementation."""
    calls: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        fused = row["implementation"] in (FUSED, COMPOSED)
        call = f"{row['preset']}, batch {row['batch']}, {row['dtype']}{', from offsets and logits' if fused else ''}"
        calls.setdefault(call, {}).setdefault(row["implementation"], row)
    cells: list[Cells] = []
    for call, found in calls.items():
        ours = found.get(OURS) or found.get(FUSED)
        if ours is None or ours["status"] != "timed":
            continue
        others = [_describe_peer(row, sum(_op_times(ours))) for row in found.values() if row is not ours]
        cells.append((call, _format_times(ours), "; ".join(others)))
    return cells


def _describe_peer(row: dict[str, Any], ours_ms: float) -> str:
    """Name, times and their ratio to ours, or why there is none."""
    name = row["implementation"].replace(f"{OURS}, ", "ours, ")
    if row["status"] != "timed":
        return f"{name} {row['status']}"
    return f"{name} {_format_times(row)} ({sum(_op_times(row)) / ours_ms:.2g} x)"


def _op_times(row: dict[str, Any]) -> tuple[float, float]:
    return row["forward_device_ms_median"], row["backward_device_ms_median"]


def _format_times(row: dict[str, Any]) -> str:
    forward_ms, backward_ms = _op_times(row)
    return f"{forward_ms:#.3g} + {backward_ms:#.3g}"


def _step_cells(row: dict[str, Any]) -> Cells:
    """A row a training step."""
    height, width = row["size_hw"]
    largest = {card: f"about {batch}" for card, batch in row.get("largest_batch", {}).items()}
    largest |= {card: str(batch) for card, batch in row.get("largest_batch_found", {}).items()}
    return (
        row["who"],
        f"`{' '.join(row['overrides'])}`" if row["overrides"] else "as given",
        f"{row['batch']} of {height} x {width}",
        f"{row['step_ms']['median']:.0f}",
        f"{row['images_per_s']:.1f}",
        _format_gib(row.get("peak_gib", math.nan)),
        ", ".join(f"{batch} in {card} GiB" for card, batch in largest.items()),
    )


def _format_gib(memory_gib: float) -> str:
    """Nothing where it was not measured, as on a CPU."""
    return f"{memory_gib:.1f} GiB" if math.isfinite(memory_gib) else ""


def _inference_cells(rows: Sequence[dict[str, Any]]) -> list[Cells]:
    """A row a detector and batch: every form that was timed."""
    calls: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        height, width = row["size_hw"]
        call = (f"{row['model']}, {row['precision']}", f"{row['batch_size']} of {height} x {width}")
        time = f"{row['wall_ms_p50']:.1f}" if row["status"] == "timed" else row["status"]
        calls.setdefault(call, []).append(f"{row['contender']} {time}")
    return [(*call, ", ".join(times)) for call, times in calls.items()]


def _training_cells(content: dict[str, Any]) -> Cells:
    """What was trained, on what it was evaluated, and what came out."""
    manifest = content["manifest"]
    words = shlex.split(manifest["environment"]["command"])[2:]
    told = " ".join(word for word in words if not word.startswith(NOT_SAID))
    data = manifest["config"]["data"]
    seen = all(data[f"train_{part}"] == data[f"val_{part}"] for part in ("json", "images"))
    images = "images" if data["limit_val"] is None else f"{data['limit_val']} images"
    scores = [content["validation"].get(f"val/{name}") for name in ("AP", "AP50")]
    return (
        f"`{told}`" if told else "as given",
        f"the {images} trained on" if seen else f"other {images}",
        *("" if score is None else f"{100 * score:.1f}" for score in scores),
        str(content["steps"]),
        f"{content['train_seconds'] / 60:.1f} min",
        f"{content['img_per_s_median']:.1f}",
        _format_gib(content["peak_memory_mib"] / 1024),
    )


if __name__ == "__main__":
    sys.exit(main())
