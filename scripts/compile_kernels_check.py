"""Compiles every shipped kernel for each NVIDIA architecture and judges the machine code; needs no GPU.

    python -m scripts.compile_kernels_check [--targets 80,86,89,90,100] [--only PATTERN] [--jobs N] [--json FILE]

Prints atomics (from PTX and SASS), registers, spills, shared memory, barriers and loads of each variant. Exits 1 when a
default has a compare-and-swap loop, an atomic that is not relaxed, a spill, or a scalar atomic where a vector exists.
Kernels are found by running the launch module: `parity/shipped_calls.py` says how to add a path.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from models.environment import describe_environment
from parity.assembly import KernelReport

SCHEMA = 1


def leave_interpreter() -> None:
    """Starts this command anew without TRITON_INTERPRET, which replaces the kernels when Triton is imported."""
    if os.environ.pop("TRITON_INTERPRET", None):
        os.execv(sys.executable, [sys.executable, "-m", "scripts.compile_kernels_check", *sys.argv[1:]])


def parse_targets(text: str) -> tuple[int, ...]:
    """Reads compute capabilities such as "80,90".

    Raises:
        argparse.ArgumentTypeError: if one is not a number of an NVIDIA architecture from sm_80 on.
    """
    words = text.split(",")
    if not all(word.isdigit() and int(word) >= 80 for word in words):
        raise argparse.ArgumentTypeError(
            f"targets must be compute capabilities from 80 on, got {text!r}; pass for example 80,90"
        )
    return tuple(int(word) for word in words)


def format_report(report: KernelReport) -> str:
    """Returns one report as a few lines of text."""

    def counts(numbers: dict[str, int]) -> str:
        return ", ".join(f"{number} {name}" for name, number in numbers.items()) or "none"

    lines = [
        f"sm_{report.architecture} {report.kernel}: {report.variant}",
        f"    warps {report.num_warps}, registers {report.registers}, spills {report.spill_bytes} bytes "
        f"({report.local_accesses} accesses), shared {report.shared_bytes} bytes, barriers {report.barriers}",
        f"    loads {counts(report.loads)}",
        f"    atomics in PTX {counts(report.ptx_atomics)}; in SASS {counts(report.sass_atomics)}",
        *(f"    PROBLEM {problem}" for problem in report.problems),
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Runs the check and returns the exit status."""
    leave_interpreter()
    from parity.compilation import ARCHITECTURES, compile_shipped  # imports Triton

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=parse_targets, default=ARCHITECTURES, help="compute capabilities")
    parser.add_argument("--only", default="", help="regular expression that variants must contain")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="architectures compiled at a time")
    parser.add_argument("--json", type=Path, help="file for the reports")
    options = parser.parse_args(arguments)

    reports = compile_shipped(options.targets, options.only, options.jobs)
    if not reports:
        parser.error(f"--only must match a variant, got {options.only!r}; leave it out to see their names")
    for report in reports:
        print(format_report(report))
    if options.json is not None:
        content = {
            "schema": SCHEMA,
            "environment": describe_environment(),
            "kernels": [report.to_json() for report in reports],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    failed = sum(bool(report.problems) for report in reports)
    print(f"{len(reports)} compiled variants, {failed} with problems")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
