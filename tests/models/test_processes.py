"""Errors and slow starts of several processes; each in processes of their own, which end without Python's way out."""

import json
import os
import signal
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
def test_an_error_of_one_process_ends_all(run_command, tmp_path, faulty, error):
    (tmp_path / "faulty.py").write_text(FAULTY)
    words = [f"+callbacks.faulty.{key}={value}" for key, value in {"faulty": faulty, "error": error}.items()]
    words += [f"+callbacks.faulty.pids={tmp_path}", f"hydra.run.dir={tmp_path / 'run'}"]
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    command = [str(ROOT / "train.py"), *WORDS, *words]
    result = run_command(*command, folder=tmp_path, TRITON_DETR_CACHE=str(tmp_path), PYTHONPATH=path)
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
import json, os, sys, time
from types import SimpleNamespace
from models import processes
from lightning.pytorch.utilities.exceptions import SIGTERMException

processes.START_SECONDS = 0.2

def wait_for_the_others():
    time.sleep(0.7)

def enter(body, world_size):
    launcher = SimpleNamespace(kill=lambda number: print("killed by", number))
    trainer = SimpleNamespace(world_size=world_size, callbacks=[], strategy=SimpleNamespace(launcher=launcher))
    with processes.SharedFate(trainer):
        exec(body, globals() | {"trainer": trainer})
    print("after")

def end_of(number, body, world_size):
    child = os.fork()
    if child == 0:
        for stream in (1, 2):
            os.dup2(os.open(f"{number}.{stream}", os.O_WRONLY | os.O_CREAT), stream)
        enter(body, world_size)
        sys.stdout.flush()
        os._exit(0)  # Python's way out takes a second
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

cases = json.loads(sys.argv[1])
ends = [end_of(number, *case) for number, case in enumerate(cases)]
print(json.dumps(ends))
"""
LATER = "SimpleNamespace(launcher=SimpleNamespace(kill=lambda number: None))"
BODIES = {
    "slow start": ("wait_for_the_others()", 2),
    "on_train_batch_end": (
        "trainer.callbacks[-1].on_train_batch_end(trainer, None, None, None, 0); wait_for_the_others()",
        2,
    ),
    "on_validation_batch_end": (
        "trainer.callbacks[-1].on_validation_batch_end(trainer, None, None, None, 0); wait_for_the_others()",
        2,
    ),
    "alone": ("wait_for_the_others(); print(trainer.callbacks); sys.exit('error: x')", 1),
    "error": ("raise ValueError('x')", 2),
    "words": ("sys.exit('error: x')", 2),
    "status": ("sys.exit(143)", 2),
    "Ctrl-C": ("try: raise KeyboardInterrupt\nexcept BaseException: sys.exit(130)", 2),
    "SIGTERM": ("try: raise SIGTERMException\nexcept BaseException: sys.exit(143)", 2),
    "second job": (
        f"again = processes.SharedFate(SimpleNamespace(world_size=2, callbacks=[], strategy={LATER}))\n"
        "again.__enter__().__exit__(ValueError, ValueError('x'), None)",
        2,
    ),
}
"""What is done within `SharedFate`, and the number of processes."""


@pytest.fixture(scope="module")
def ends(run_command, tmp_path_factory):
    """Exit status, standard output and standard error of a process for each of `BODIES`, forked from one."""
    folder = tmp_path_factory.mktemp("ends")
    (folder / "context.py").write_text(CONTEXT)
    result = run_command(str(folder / "context.py"), json.dumps(list(BODIES.values())), folder=folder)
    assert result.returncode == 0, result.stderr
    return {
        name: (status, *((folder / f"{number}.{stream}").read_text() for stream in (1, 2)))
        for number, (name, status) in enumerate(zip(BODIES, json.loads(result.stdout), strict=True))
    }


def test_a_slow_start_says_where_it_stands(ends):
    status, output, error = ends["slow start"]
    assert (status, output) == (0, "after\n")
    assert error.count("in wait_for_the_others") >= 2


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_batch_end"])
def test_after_the_first_batch_nothing_is_said(ends, hook):
    assert ends[hook] == (0, "after\n", "")


def test_one_process_is_left_alone(ends):
    assert ends["alone"] == (1, "[]\n", "error: x\n")


@pytest.mark.parametrize(
    ("name", "expected", "killed", "words"),
    [
        ("error", 1, True, "ValueError: x"),
        ("words", 1, True, "error: x"),
        ("status", 143, True, ""),
        ("Ctrl-C", 130, False, ""),
        ("SIGTERM", 143, False, ""),
    ],
)
def test_errors_kill_what_was_started_and_signals_do_not(ends, name, expected, killed, words):
    status, output, error = ends[name]
    assert (status, output) == (expected, "killed by 9\n" if killed else "")
    assert error.strip().endswith(words)
    assert bool(error) == bool(words)


def test_of_several_jobs_the_first_has_started_the_processes(ends):
    assert ends["second job"][:2] == (1, "killed by 9\n")
