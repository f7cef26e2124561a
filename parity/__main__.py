"""Compares two ops: `python -m parity <op|model|trajectory|ensemble|evaluation|speed|sensitivity|all> [overrides]`."""

import sys

from parity.suite import LEVELS, answer, run_suite


def main(arguments: list[str]) -> int:
    """Runs the suite; returns 0 for PASS, 1 for FAIL, 2 for INCONCLUSIVE and 3 for settings that are wrong."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(f"{__doc__}\nlevels: {', '.join(LEVELS)}, all\noverrides: keys and groups of configs/parity.yaml")
        return 0 if arguments else 3
    return answer(lambda: run_suite(arguments[0], arguments[1:], lambda line: print(line, flush=True)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
