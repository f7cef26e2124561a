"""Is training right with what makes a step fast? Levels of the parity suite with each switch, alone and together.

    python -m parity.step_switches parity=full op=triton against=reference precision=bf16 backbone.norm=frozen
        backbone.weights=/path/to/resnet50.pt data.root=/path/to/coco parity.workers=6

The overrides are those of `python -m parity`, and stand in front of the options. Norms are fused and folded where they
are frozen, which wants weights: `imagenet`, or a file of torchvision's `resnet50().state_dict()`. A results file gets
the verdict of each level for each variant; the reports lie below the folder of `--reports`. Exit status: 0 for PASS, 1
for FAIL, 2 for INCONCLUSIVE, 3 for settings that are wrong.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any

from models.environment import cut_folders, describe_environment
from parity.recording import Progress
from parity.results import Verdict, combine, write_json
from parity.step_benchmark import SWITCHES
from parity.suite import LEVELS, answer, run_suite

ALL, NONE = "all", "none"
VARIANTS = (NONE, *SWITCHES, ALL)
SCHEMA = 1
_ON = ("cuda_graphs=true", "compile=true")
"""What is off by default; the other switches are on."""
_NEEDED = {"backbone.fused_norm": "channels_last"}
"""Switches that do nothing without another one."""

Run = Callable[[str, Sequence[str], Progress], Verdict]


def words_of(variant: str) -> list[str]:
    """Returns the overrides of a variant: all switches on, none, or one alone, with another one where it needs it.

    Args:
        variant: one of `VARIANTS`.
    """
    if variant == ALL:
        return list(_ON)
    kept = {SWITCHES[name][-1] for name in (variant, _NEEDED.get(variant)) if name in SWITCHES}
    off = [word for word in dict.fromkeys(chain(*SWITCHES.values())) if word not in kept]
    return [*(word for word in _ON if word.replace("true", "false") not in off), *off]


def run_variants(
    variants: Sequence[str],
    levels: Sequence[str],
    overrides: Sequence[str],
    reports: Path,
    out: Path,
    progress: Progress,
    run: Run = run_suite,
) -> Verdict:
    """Runs levels for variants and keeps the verdicts in a file, which is whole after each of them.

    Args:
        variants: of `VARIANTS`.
        levels: of `parity.suite.LEVELS`.
        overrides: of `configs/parity.yaml`, for all variants.
        reports: folder that gets one with the report of each variant and level.
        out: results file.
        progress: called with a line now and then.
        run: runs a level, see `parity.suite.run_suite`.

    Returns:
        The verdict of all together.

    Raises:
        ValueError: if a setting is wrong.
    """
    rows: list[dict[str, Any]] = []
    content = {"schema": SCHEMA, "environment": describe_environment(), "overrides": cut_folders(overrides)}
    out.parent.mkdir(parents=True, exist_ok=True)  # or fails before time is spent
    for variant, level in product(variants, levels):
        words = words_of(variant)
        progress(f"{variant}, {level}: {' '.join(words)}")
        begin = time.perf_counter()
        verdict = run(level, [*overrides, *words, f"output={reports / variant / level}"], progress)
        rows.append({"switches": variant, "level": level, "words": words, "verdict": str(verdict)})
        rows[-1]["seconds"] = round(time.perf_counter() - begin, 1)
        write_json(out, content | {"rows": rows})
    for row in rows:
        progress(f"{row['verdict']:12} {row['level']:10} {row['switches']} ({row['seconds']:.0f} s)")
    return combine(Verdict(row["verdict"]) for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m parity.step_switches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", help="keys and groups of configs/parity.yaml")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--levels", nargs="+", choices=list(LEVELS), default=["model", "trajectory"])
    parser.add_argument("--reports", type=Path, default=Path("runs/switches"), help="folder of the reports")
    parser.add_argument("--out", type=Path, default=Path("results/switches.json"), help="results file")
    options = parser.parse_intermixed_args(arguments)
    return answer(
        lambda: run_variants(
            options.variants,
            options.levels,
            options.overrides,
            options.reports,
            options.out,
            lambda line: print(line, flush=True),
        )
    )


if __name__ == "__main__":
    sys.exit(main())
