"""Writes the README's table of measurements from results/*.json: `python -m scripts.readme_figures [--check]`.

Rows come from what `scripts.benchmark op` and `step`, `scripts.scaling`, `python -m parity` and trainings (their
summary.json) wrote. Files of other kinds are named and left out. With --check nothing is written; the exit status is 1
if the table differs from the files.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- figures: python -m scripts.readme_figures -->", "<!-- end of figures -->"
HEAD = "| measured | result | machine | file |\n| --- | --- | --- | --- |"
NOTHING = (
    "Nothing has been measured into `results/` yet; `python -m scripts.benchmark op` and `step` on a GPU begin it."
)

Row = tuple[str, str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrites the table and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readme", type=Path, default=Path("README.md"))
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    options = parser.parse_args(arguments)
    text = options.readme.read_text()
    try:
        written = replace_table(text, make_table(options.results))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not options.check:
        options.readme.write_text(written)
    elif written != text:
        print(f"error: {options.readme} must show what {options.results} holds; run this without --check")
        return 1
    return 0


def replace_table(text: str, table: str) -> str:
    """Returns the text with another table between its markers.

    Raises:
        ValueError: The markers are not there once each, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"README must hold {BEGIN} and {END} once, in this order; put them back")
    return f"{text[: text.index(BEGIN)]}{BEGIN}\n{table}\n{text[text.index(END) :]}"


def make_table(folder: Path) -> str:
    """Returns the table of all figures in a folder, or a sentence where there are none.

    Raises:
        ValueError: A file is no JSON.
    """
    lines = []
    for path in sorted(folder.rglob("*.json")):
        try:
            content = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"results must be JSON, got {path} ({error}); measure again") from error
        rows = read_figures(content)
        if not rows:
            print(f"{path}: no figure for the README")
        link = f"[{path.relative_to(folder)}]({(folder.name / path.relative_to(folder)).as_posix()})"
        lines += [f"| {what} | {result} | {describe_machine(content)} | {link} |" for what, result in rows]
    return "\n".join([HEAD, *lines]) if lines else NOTHING


def read_figures(content: Any) -> list[Row]:
    """Returns what is measured and the result, for every figure of a results file; nothing for files of other kinds."""
    if not isinstance(content, dict):
        return []
    if "levels" in content and "verdict" in content:
        levels = ", ".join(f"{level['level']} {level['verdict']}" for level in content["levels"])
        return [("parity", f"**{content['verdict']}** ({levels})")]
    if "speed_up" in content:
        return [(f"training on {content['gpus']} GPUs", f"{content['speed_up']:.2f} times one GPU")]
    if "validation" in content and "img_per_s_median" in content:
        return _run_figures(content)
    rows = content.get("rows", [])
    if any("step_ms" in row for row in rows):
        return [_step_figure(row) for row in rows if "step_ms" in row]
    return _op_figures([row for row in rows if row.get("status") == "timed"])


def describe_machine(content: dict[str, Any]) -> str:
    """Returns GPU and commit, as far as the file says."""
    manifest = content.get("manifest", content)
    environment = manifest.get("environment", manifest)
    gpus = environment.get("gpus") or ["CPU"]
    commit = environment.get("commit")
    return gpus[0] if commit is None else f"{gpus[0]}, {commit[:7]}"


def _op_figures(rows: Sequence[dict[str, Any]]) -> list[Row]:
    """A row a workload: device times, forward + backward, of every implementation."""
    workloads: dict[str, list[str]] = {}
    for row in rows:
        name = f"op, {row['preset']}, batch {row['batch']}, {row['dtype']}: forward + backward, ms"
        times = f"{row['forward_device_ms_median']:.3g} + {row['backward_device_ms_median']:.3g}"
        workloads.setdefault(name, []).append(f"{row['implementation']} {times}")
    return [(name, "; ".join(dict.fromkeys(results))) for name, results in workloads.items()]


def _step_figure(row: dict[str, Any]) -> Row:
    """A row a training step."""
    height, width = row["size_hw"]
    words = " ".join(row["overrides"])
    what = f"training step, {row['who']}, batch {row['batch']} of {height} x {width}"
    result = f"{row['step_ms']['median']:.0f} ms, {row['images_per_s']:.1f} images/s"
    return f"{what} (`{words}`)" if words else what, result


def _run_figures(content: dict[str, Any]) -> list[Row]:
    """A row a training: AP, steps, time."""
    scores = ", ".join(
        f"{name.removeprefix('val/')} {100 * content['validation'][name]:.1f}"
        for name in ("val/AP", "val/AP50")
        if name in content["validation"]
    )
    command = content["manifest"]["environment"]["command"]
    return [(f"training, `{command}`", f"{scores or 'not evaluated'} after {content['steps']} steps")]


if __name__ == "__main__":
    sys.exit(main())
