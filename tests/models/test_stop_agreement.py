"""Several processes stop together, whichever of them hears the signal."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from models.processes import LOST_PROCESS, explain_lost_process
from models.stop_agreement import StopAgreement

SAID = ([0, 0, 2, 0, 0], [0, 15, 0, 0, 0])
AGREED = [0, 0, 15, 2, 0]


def test_one_process_agrees_with_itself_at_once() -> None:
    agreement = StopAgreement()
    assert not agreement.is_shared
    assert [agreement.ask(number) for number in SAID[1]] == SAID[1]
    agreement.close()


def ask(rank: int, folder: Path) -> None:
    agreement = StopAgreement()
    assert agreement.is_shared
    answers = [agreement.ask(number) for number in SAID[rank]]
    agreement.close()
    (folder / f"{rank}.json").write_text(json.dumps(answers))


def test_processes_hear_of_each_other_one_call_later(run_group: Callable[..., None], tmp_path: Path) -> None:
    run_group(2, ask, tmp_path)
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)] == [AGREED, AGREED]


def ask_twice(agreement: StopAgreement) -> None:
    agreement.ask(0)
    agreement.ask(0)


def lose(rank: int, folder: Path) -> None:
    agreement = StopAgreement()
    assert agreement.is_shared
    agreement.ask(0)
    if rank == 0:
        with pytest.raises(RuntimeError) as caught:
            ask_twice(agreement)
        (folder / "explained").write_text(str(explain_lost_process(caught.value)))
    os._exit(0)  # without a farewell


def test_a_process_that_has_ended_is_told_of_in_a_line(run_group: Callable[..., None], tmp_path: Path) -> None:
    run_group(2, lose, tmp_path)
    assert (tmp_path / "explained").read_text() == LOST_PROCESS
    assert explain_lost_process(RuntimeError("shapes differ")) is None


WAITING = """
import os, signal, sys, threading
from datetime import timedelta
from types import SimpleNamespace
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from models.processes import SharedFate

def wait_for_one_that_never_comes(is_first):
    launcher = SimpleNamespace(kill=lambda number: os.write(1, b"killed by %d\\n" % number))
    strategy = SimpleNamespace(launcher=launcher, cluster_environment=LightningEnvironment())
    trainer = SimpleNamespace(world_size=2, is_global_zero=is_first, callbacks=[], strategy=strategy)
    with SharedFate(trainer) as fate:
        fate.on_train_start(trainer, None)  # with callbacks.stop_checkpoint=null
        dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=timedelta(seconds=60))

if os.fork() == 0:
    os.environ["LOCAL_RANK"] = "1"
    threading.Timer(0.5, os.kill, (os.getpid(), int(sys.argv[1]))).start()
    wait_for_one_that_never_comes(is_first=False)
wait_for_one_that_never_comes(is_first=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_where_nothing_saves_a_signal_to_one_process_ends_all_in_the_midst_of_an_exchange(
    run_command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "waiting.py").write_text(WAITING)
    result = run_command(str(tmp_path / "waiting.py"), str(int(number)), folder=tmp_path)
    assert result.returncode == 128 + number, result.stderr
    assert result.stderr.splitlines()[-1] == f"stopped by {number.name}; nothing is saved here"
    assert result.stdout.count("killed by 9") == 2


def test_two_processes_stop_at_the_same_step(
    run_command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """A signal of which all have heard only after the last step stops nothing."""
    result = run_command(str(Path(__file__).with_name("run_stopping.py")), str(tmp_path), folder=tmp_path)
    assert result.returncode == 0, result.stderr
    first, second = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    terminated = {
        "stopped_by": signal.SIGTERM,
        "step": 5,
        "saved": 5,
        "heard_sigterm": True,
        "asked_gpu": 0,
        "watched": 0,
    }
    ended = terminated | {"stopped_by": 0, "step": 10, "saved": 10, "heard_sigterm": False, "watched": 1}
    assert first == {
        "last": ended,
        "late": ended,
        "one": terminated,
        "starter": terminated,
        "window": terminated | {"step": 3, "saved": 3},
        "interrupt": terminated | {"stopped_by": signal.SIGINT},
    }
    unwatched = {name: result | {"watched": 0} for name, result in first.items()}
    assert second == unwatched | {"last": unwatched["last"] | {"heard_sigterm": True}}
    assert result.stderr.count("to go on: python") == 4
