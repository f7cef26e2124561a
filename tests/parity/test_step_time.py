"""The speed level as a command: it ends once it has said what it found."""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 10
"""From the last line to the end; a third of what it takes if the end waits for the processes of three loaders."""

KEEPING = """
import atexit, multiprocessing, sys
import parity.training
from parity.__main__ import main

kept, build_loader = [], parity.training.build_loader


def keep_loader(*arguments):
    kept.append(build_loader(*arguments))
    return kept[-1]


def wait_for_workers():
    for process in multiprocessing.active_children():
        process.join(timeout=5)


parity.training.build_loader = keep_loader
status = main(sys.argv[1:])
atexit.register(wait_for_workers)
sys.exit(status)
"""
"""The command where closed generators keep their loaders (Python 3.12.3), and memory is pinned (PyTorch 2.11)."""


def test_a_run_ends_soon_after_its_last_line(overrides: list[str], tmp_path: Path) -> None:
    words = [*overrides, "data.num_workers=2", f"output={tmp_path}"]
    lines: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", KEEPING, "speed", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            said = time.monotonic()
        process.wait()
    assert time.monotonic() - said < _PATIENCE_S
    assert lines[-1].endswith(f"see {tmp_path / 'report.html'}\n")
    assert process.returncode in (0, 2), "inconclusive where the ratio of three steps of one op does not cover 1"
