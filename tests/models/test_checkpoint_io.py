import os
import random
import signal
import time
import zipfile

import pytest
import torch

from models.checkpoint_io import AtomicCheckpointIO, read_checkpoint


def content(number):
    """A checkpoint of some megabytes in which every value is `number`."""
    weights = {str(place): torch.full((64, 1024), float(number)) for place in range(16)}
    return {"loops": {}, "state_dict": weights, "global_step": number}


def save_for_ever(path):
    number = 0
    while True:
        number += 1
        AtomicCheckpointIO().save_checkpoint(content(number), path)


def test_a_run_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    moments = random.Random(0)
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(content(0), path)
    seen = set()
    for _ in range(20):
        child = os.fork()
        if child == 0:
            save_for_ever(path)
        time.sleep(moments.uniform(0.02, 0.1))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        checkpoint = read_checkpoint(path)
        number = checkpoint["global_step"]
        assert all((value == number).all() for value in checkpoint["state_dict"].values())
        seen.add(number)
    assert len(seen) > 1


class DyingFile:
    """Stands in for torch.save in a process that dies half way through it."""

    def __call__(self, checkpoint, file):
        file.write(b"half a file")
        raise KeyboardInterrupt


def test_half_a_file_never_has_the_name(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(content(1), path)
    monkeypatch.setattr(torch, "save", DyingFile())
    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint(content(2), path)
    assert read_checkpoint(path)["global_step"] == 1
    with pytest.raises(ValueError, match="must be a whole file"):
        read_checkpoint(tmp_path / ".last.ckpt.partial")


class Surprise:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return (os.getenv, ("HOME",))


@pytest.mark.parametrize("lazy", [False, True])
def test_a_checkpoint_that_would_run_code_is_refused(tmp_path, lazy):
    path = tmp_path / "evil.ckpt"
    torch.save({"loops": {}, "state_dict": Surprise()}, path)
    with pytest.raises(ValueError, match=r"plain values alone, got .*evil\.ckpt, which would run code") as caught:
        read_checkpoint(path, lazy=lazy)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="would run code"):
        AtomicCheckpointIO().load_checkpoint(path, weights_only=False)


@pytest.mark.parametrize("names", [[], ["notes.txt"], ["archive/data.pkl"], ["archive/version", "archive/notes.txt"]])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_zip_file_of_something_else_is_refused(tmp_path, names, lazy):
    path = tmp_path / "notes.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "3")
    with pytest.raises(ValueError, match=r"checkpoint must .*notes\.ckpt"):
        read_checkpoint(path, lazy=lazy)


def test_weights_alone_are_no_run(tmp_path):
    path = tmp_path / "weights.pth"
    torch.save({"model": {}}, path)
    with pytest.raises(ValueError, match=r"without the run's progress; start from its weights with model\.weights"):
        read_checkpoint(path)
