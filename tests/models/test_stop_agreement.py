"""Several processes stop together, whichever of them hears the signal."""

import json
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

from models.stop_agreement import StopAgreement

SAID = ([0, 0, 2, 0, 0], [0, 15, 0, 0, 0])
AGREED = [0, 0, 15, 2, 0]


def test_one_process_agrees_with_itself_at_once() -> None:
    agreement = StopAgreement()
    assert not agreement.is_shared
    assert [agreement.ask(number) for number in SAID[1]] == SAID[1]
    agreement.close()


def ask(rank: int, port: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    agreement = StopAgreement()
    assert agreement.is_shared
    answers = [agreement.ask(number) for number in SAID[rank]]
    agreement.close()
    (folder / f"{rank}.json").write_text(json.dumps(answers))
    dist.destroy_process_group()


def test_processes_hear_of_each_other_one_call_later(tmp_path: Path) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    mp.start_processes(ask, (port, tmp_path), nprocs=2, start_method="fork")
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)] == [AGREED, AGREED]


def test_two_processes_stop_at_the_same_step(
    run_command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    result = run_command(str(Path(__file__).with_name("run_stopping.py")), str(tmp_path), folder=tmp_path)
    assert result.returncode == 0, result.stderr
    first, second = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    terminated = {"stopped_by": signal.SIGTERM, "step": 5, "saved": 5, "heard_sigterm": True, "asked_gpu": 0}
    assert first == {
        "one": terminated,
        "starter": terminated,
        "window": terminated | {"step": 3, "saved": 3},
        "last": terminated | {"stopped_by": 0, "step": 10, "saved": 10, "heard_sigterm": False},
        "interrupt": terminated | {"stopped_by": signal.SIGINT},
    }
    assert second == first | {"last": first["last"] | {"heard_sigterm": True}}
    assert result.stderr.count("to go on: python") == 4
