"""Errors and slow starts of several processes; each in processes of their own, which end without Python's way out."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAULTY = """
import os, pathlib, signal, time
from lightning.pytorch import Callback
from coco.errors import DataError

class Faulty(Callback):
    def __init__(self, faulty, error, pids):
        self.faulty, self.error, self.pids = faulty, error, pathlib.Path(pids)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        (self.pids / str(trainer.global_rank)).write_text(str(os.getpid()))
        if trainer.global_rank != self.faulty:
            time.sleep(120)  # as in an exchange that nobody completes
        while not (self.pids / str(1 - self.faulty)).exists():
            time.sleep(0.05)
        raise {"data": DataError, "other": KeyError}[self.error]("a broken image")
"""
WORDS = [
    "debug=smoke",
    "logger=csv",
    *(f"callbacks.{name}=null" for name in ("progress", "plots", "evaluation_plots", "panels")),
    "data.image_size=64",
    "data.num_train=4",
    "data.num_val=2",
    "data.batch_size=2",
    "model.transformer.num_queries=20",
    "trainer=ddp",
    "trainer.accelerator=cpu",
    "+callbacks.faulty._target_=faulty.Faulty",
]


def is_alive(pid):
    """Whether a process runs; one that has ended and that nobody has asked for its status does not."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="asks Linux")
@pytest.mark.parametrize(("faulty", "error"), [(0, "data"), (0, "other"), (1, "data")])
def test_an_error_of_one_process_ends_all(tmp_path, faulty, error):
    (tmp_path / "faulty.py").write_text(FAULTY)
    words = [f"+callbacks.faulty.{key}={value}" for key, value in {"faulty": faulty, "error": error}.items()]
    words += [f"+callbacks.faulty.pids={tmp_path}", f"hydra.run.dir={tmp_path / 'run'}"]
    settings = {"OMP_NUM_THREADS": "1", "TRITON_DETR_CACHE": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(ROOT / "train.py"), *WORDS, *words]
    result = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **settings}, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == (1 if faulty == 0 else -signal.SIGKILL), result.stderr
    pids = [int((tmp_path / rank).read_text()) for rank in "01"]
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    said = [line for line in result.stderr.splitlines() if line.startswith(("error: ", "KeyError: "))]
    assert said == ["error: a broken image" if error == "data" else "KeyError: 'a broken image'"]
    assert ("Traceback" in result.stderr) == (error == "other")


CONTEXT = """
import sys, time
from types import SimpleNamespace
from models import processes
from lightning.pytorch.utilities.exceptions import SIGTERMException

processes.START_SECONDS = 0.2
launcher = SimpleNamespace(kill=lambda number: print("killed by", number))
trainer = SimpleNamespace(world_size={world_size}, callbacks=[], strategy=SimpleNamespace(launcher=launcher))

def wait_for_the_others():
    time.sleep(0.7)

with processes.SharedFate(trainer):
    {body}
print("after")
"""


def enter(body, world_size=2):
    program = CONTEXT.format(body=body, world_size=world_size)
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_a_slow_start_says_where_it_stands():
    result = enter("wait_for_the_others()")
    assert result.returncode == 0
    assert result.stderr.count("in wait_for_the_others") >= 2
    assert result.stdout == "after\n"


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_batch_end"])
def test_after_the_first_batch_nothing_is_said(hook):
    result = enter(f"trainer.callbacks[-1].{hook}(trainer, None, None, None, 0); wait_for_the_others()")
    assert (result.returncode, result.stderr, result.stdout) == (0, "", "after\n")


def test_one_process_is_left_alone():
    result = enter("wait_for_the_others(); print(trainer.callbacks); sys.exit('error: x')", world_size=1)
    assert (result.returncode, result.stderr, result.stdout) == (1, "error: x\n", "[]\n")


@pytest.mark.parametrize(
    ("body", "status", "killed"),
    [
        ("raise ValueError('x')", 1, True),
        ("sys.exit('error: x')", 1, True),
        ("sys.exit(143)", 143, True),
        ("exec('try: raise KeyboardInterrupt\\nexcept BaseException: sys.exit(130)')", 130, False),
        ("exec('try: raise SIGTERMException\\nexcept BaseException: sys.exit(143)')", 143, False),
    ],
)
def test_errors_kill_what_was_started_and_signals_do_not(body, status, killed):
    result = enter(body)
    assert result.returncode == status
    assert result.stdout == ("killed by 9\n" if killed else "")
    assert ("x" in result.stderr) == ("x'" in body)


def test_of_several_jobs_the_first_has_started_the_processes():
    later = "SimpleNamespace(launcher=SimpleNamespace(kill=lambda number: None))"
    again = f"processes.SharedFate(SimpleNamespace(world_size=2, callbacks=[], strategy={later})).__enter__()"
    result = enter(f"{again}.__exit__(ValueError, ValueError('x'), None)")
    assert (result.returncode, result.stdout) == (1, "killed by 9\n")
