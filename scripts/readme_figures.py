"""Writes the README's tables of measurements from results/*.json: `python -m scripts.readme_figures [--check]`.

Rows come from what `scripts.benchmark op`, `step` and `inference`, `scripts.scaling`, `python -m parity` and trainings
(their summary.json) wrote. The table in front has ours beside the most known others; all rows are folded away behind
it. Files of other kinds are named and left out. With --check nothing is written; the exit status is 1 if the tables
differ from the files.
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

HEADLINE_OTHERS = {"original CUDA op": "original CUDA op", "msda_op reference": "PyTorch `grid_sample`"}
HEADLINE_PRESETS = ("encoder", "decoder")
HEADLINE_DTYPE = "bf16"
"""Of the op's calls, what the table in front has."""
ARM_WORDS = ("op=", "precision=")
"""Words in which the two trainings of a row there differ."""
COCO_IMAGES = 118_287
PUBLISHED_EPOCHS = 50
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


HEADLINE = Section(
    "In short",
    "Medians; in brackets how many times ours. `by heart`: trained and evaluated on the same images, from the same "
    "random weights, as a check that nothing is lost on the way.",
    ("what", "triton-detr", "others"),
)
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
    f"extrapolated from two. `{PUBLISHED_EPOCHS} epochs`: of the {COCO_IMAGES:,} training images of COCO at this rate, "
    "if the loader keeps up.",
    ("code", "settings", "batch", "ms", "images/s", "peak memory", "largest batch", f"{PUBLISHED_EPOCHS} epochs"),
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
SECTIONS = (HEADLINE, PARITY, OP, STEP, INFERENCE, TRAINING, SCALING)


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
    tables: dict[Section, list[Cells]] = {section: [] for section in SECTIONS}
    trainings: dict[str, dict[str, Cells]] = {}
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
        source = (describe_machine(content), link)
        tables[section] += [(*cells, *source) for cells in rows]
        tables[HEADLINE] += [(*cells, *source) for cells in headline_rows(section, content)]
        if section is TRAINING:
            name, backend, result = _arm(content)
            trainings.setdefault(name, {})[backend] = (result, *source)
    tables[HEADLINE] += pair_trainings(trainings)
    front, *found = [format_section(section, rows) for section, rows in tables.items() if rows or section is HEADLINE]
    if not found:
        return NOTHING
    folded = "\n\n".join(("<details>\n<summary>All measurements</summary>", *found, "</details>"))
    return f"{front}\n\n{folded}" if tables[HEADLINE] else folded


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


def headline_rows(section: Section, content: dict[str, Any]) -> list[Cells]:
    """Returns what a file says to the table in front: ours beside the others, in one unit."""
    if section is PARITY:
        return [_parity_headline(content)]
    if section is STEP:
        return _step_headline(content["rows"])
    return _op_headline(content["rows"]) if section is OP else []


def pair_trainings(trainings: dict[str, dict[str, Cells]]) -> list[Cells]:
    """Returns a row for each training that was done with our op and with the reference.

    Args:
        trainings: result, machine and link of each op's, by what was trained.
    """
    both = {"triton", "reference"}
    pairs = [(name, arms["triton"], arms["reference"]) for name, arms in trainings.items() if both <= arms.keys()]
    return [
        (name, ours, f"PyTorch `grid_sample` {theirs}", machine, f"{link}, {other_link}")
        for name, (ours, machine, link), (theirs, _, other_link) in pairs
    ]


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


def _parity_headline(content: dict[str, Any]) -> Cells:
    """The verdict about a training, or, where nothing but speed was asked for, how many times as fast a step is."""
    manifest, levels = content["manifest"], content["levels"]
    ops = f"op={manifest['op']} beside op={manifest['against']}, {manifest['precision']}"
    if [level["level"] for level in levels] != ["speed"]:
        return f"parity of a training, {ops}", f"**{content['verdict']}**", ""
    ratio = levels[0]["data"]["ratios"]["A / B"]
    times = f"{ratio['ratio']:.2f} x as fast ({ratio['low']:.2f} to {ratio['high']:.2f})"
    return f"a step of the parity suite, nothing but the op exchanged, {ops}", times, "1"


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


def _op_headline(rows: Sequence[dict[str, Any]]) -> list[Cells]:
    """A row for the sum of both passes of each of `HEADLINE_PRESETS`."""
    cells: list[Cells] = []
    for preset in HEADLINE_PRESETS:
        calls = [row for row in rows if (row["preset"], row["dtype"]) == (preset, HEADLINE_DTYPE)]
        times = {row["implementation"]: sum(_op_times(row)) for row in calls[::-1] if row["status"] == "timed"}
        if OURS not in times:
            continue
        others = [
            f"{told} {times[name]:.2f} ms ({times[name] / times[OURS]:.2g} x)"
            for name, told in HEADLINE_OTHERS.items()
            if name in times
        ]
        what = f"the op, {preset}, {HEADLINE_DTYPE}, batch {calls[0]['batch']}, forward and backward"
        cells.append((what, f"{times[OURS]:.2f} ms", ", ".join(others)))
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
        f"{PUBLISHED_EPOCHS * COCO_IMAGES / row['images_per_s'] / 3600:.0f} h",
    )


def _step_headline(rows: Sequence[dict[str, Any]]) -> list[Cells]:
    """A row for our first step and those of other code."""
    ours, *rest = rows
    others = [row for row in rest if row["who"] != ours["who"]]
    if not others:
        return []
    height, width = ours["size_hw"]
    words = [word for word in ours["overrides"] if word.startswith(("model=", "precision="))]
    times = [f"{row['who']} {_step_result(row)} ({_step_ms(row) / _step_ms(ours):.2g} x)" for row in others]
    what = f"a training step, `{' '.join(words)}`, {ours['batch']} of {height} x {width}"
    return [(what, _step_result(ours), ", ".join(times))]


def _step_ms(row: dict[str, Any]) -> float:
    return float(row["step_ms"]["median"])


def _step_result(row: dict[str, Any]) -> str:
    memory = _format_gib(row.get("peak_gib", math.nan))
    return f"{_step_ms(row):.0f} ms{f' and {memory}' if memory else ''}"


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
    told = " ".join(_training_words(content))
    data = content["manifest"]["config"]["data"]
    images = "images" if data["limit_val"] is None else f"{data['limit_val']} images"
    scores = [content["validation"].get(f"val/{name}") for name in ("AP", "AP50")]
    return (
        f"`{told}`" if told else "as given",
        f"the {images} trained on" if _is_by_heart(data) else f"other {images}",
        *("" if score is None else f"{100 * score:.1f}" for score in scores),
        str(content["steps"]),
        f"{content['train_seconds'] / 60:.1f} min",
        f"{content['img_per_s_median']:.1f}",
        _format_gib(content["peak_memory_mib"] / 1024),
    )


def _training_words(content: dict[str, Any]) -> list[str]:
    """The words of a training's command that say what was trained."""
    words = shlex.split(content["manifest"]["environment"]["command"])[2:]
    return [word for word in words if not word.startswith(NOT_SAID)]


def _is_by_heart(data: dict[str, Any]) -> bool:
    """Whether a training was evaluated on its own images."""
    return all(data[f"train_{part}"] == data[f"val_{part}"] for part in ("json", "images"))


def _arm(content: dict[str, Any]) -> tuple[str, str, str]:
    """What was trained but for op and precision; the op; and what came out."""
    words = _training_words(content)
    kind = "AP by heart" if _is_by_heart(content["manifest"]["config"]["data"]) else "AP"
    rest = " ".join(word for word in words if not word.startswith(ARM_WORDS))
    backend, precision = (next((w.split("=")[1] for w in words if w.startswith(arm)), "default") for arm in ARM_WORDS)
    ap = 100 * content["validation"].get("val/AP", math.nan)
    memory = _format_gib(content["peak_memory_mib"] / 1024)
    return f"{kind}, `{rest}`", backend, f"{ap:.1f} in {content['train_seconds'] / 60:.1f} min, {precision}, {memory}"


if __name__ == "__main__":
    sys.exit(main())
