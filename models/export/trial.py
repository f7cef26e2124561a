"""The first answers of a compiled package, in a process of its own: code that crashes ends that process alone.

parent                                        child, `python -m models.export.trial`
inputs and switches  --- a file --->          loads the package and runs it
answers, or what to do  <--- a file ---       answers; a crash leaves Python's stack in a log instead
"""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from models.environment import allow_tf32, child_variables
from models.export.inference import Inputs, Outputs


def answer_apart(package: Path, inputs: Sequence[Inputs], device: torch.device) -> list[Outputs]:
    """Loads a package of AOTInductor in another process and runs it there.

    Args:
        package: the `.pt2` file.
        inputs: of the program, on any device.
        device: what the program was compiled for.

    Returns:
        The answers to each of the inputs, on the CPU.

    Raises:
        ValueError: if the process does not come to its end: compiled code has crashed, or an error was raised. What it
            said, after a crash Python's stack, is then in a log beside the package.
    """
    log = package.with_suffix(".log")
    with tempfile.TemporaryDirectory() as folder:
        given, answered = Path(folder, "given.pt"), Path(folder, "answered.pt")
        torch.save(
            {
                "inputs": [tuple(tensor.cpu() for tensor in each) for each in inputs],
                "device": str(device),
                "allow_tf32": torch.backends.cuda.matmul.allow_tf32,
            },
            given,
        )
        words = ["-P", "-X", "faulthandler", "-m", "models.export.trial", str(package), str(given), str(answered)]
        with log.open("wb") as messages:
            child = subprocess.run([sys.executable, *words], env=child_variables(), stdout=messages, stderr=messages)
        if child.returncode != 0:
            raise ValueError(
                f"{package.name} must load and answer in a process of its own, got "
                f"{_describe_end(child.returncode, log)} (see {str(log)!r}); set op=reference or another format"
            )
        log.unlink()
        answers: list[Outputs] = torch.load(answered)
        return answers


def _describe_end(status: int, log: Path) -> str:
    """Names the signal that ended a process, or says its status and the last line that it wrote."""
    if status < 0:
        return signal.Signals(-status).name
    return ": ".join([f"exit status {status}", *log.read_text(errors="replace").splitlines()[-1:]])


@torch.no_grad()
def _answer(package: str, given: str, answered: str) -> None:
    task = torch.load(given)
    allow_tf32(task["allow_tf32"])
    program = torch._inductor.aoti_load_package(package)
    answers = []
    for inputs in task["inputs"]:
        outputs = program(*(tensor.to(task["device"]) for tensor in inputs))
        answers.append(tuple(tensor.cpu() for tensor in outputs))
    torch.save(answers, answered)


if __name__ == "__main__":
    _answer(*sys.argv[1:])
