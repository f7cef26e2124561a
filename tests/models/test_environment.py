import importlib.machinery
import json
import logging
import shlex
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

from models.environment import (
    allow_tf32,
    cut_folders,
    describe_environment,
    name_folder,
    relative_path,
    running_command,
    silence_dependencies,
    source_commit,
)


def test_description_names_versions_and_commit():
    description = json.loads(json.dumps(describe_environment()))
    assert torch.__version__.startswith(description["packages"]["torch"].split("+")[0])
    assert set(description) >= {"command", "python", "gpus", "commit", "dirty", "tf32"}


@pytest.fixture
def tf32_flags():
    """Puts PyTorch's process-wide switches back after the test."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.usefixtures("tf32_flags")
@pytest.mark.parametrize("allowed", [True, False])
def test_tf32_switch_reaches_products_and_convolutions(allowed):
    allow_tf32(not allowed)
    allow_tf32(allowed)
    assert torch.backends.cuda.matmul.allow_tf32 is allowed
    assert torch.backends.cudnn.allow_tf32 is allowed


@pytest.mark.parametrize(
    ("spec", "expected"), [(None, "python run.py op=triton"), ("parity.__main__", "python -m parity op=triton")]
)
def test_command_names_no_folder_of_the_machine(monkeypatch, spec, expected):
    module = types.ModuleType("__main__")
    module.__spec__ = None if spec is None else importlib.machinery.ModuleSpec(spec, None)
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.setattr(sys, "argv", ["/somewhere/else/run.py", "op=triton"])
    assert running_command() == expected


def test_command_is_typed_again_as_it_was(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", ["train.py", 'data.root="/a b"', "trainer.max_epochs=2", "ckpt_path=/c/last.ckpt"])
    command = running_command(without=("ckpt_path=", "trainer."))
    assert shlex.split(command) == ["python", "train.py", 'data.root="/a b"']


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("/somewhere/x.json", "x.json"),
        ("--out=/somewhere/x.json", "--out=x.json"),
        ("data.root=/data/coco/", "data.root=coco"),
        ('data.root="/data/my coco"', 'data.root="my coco"'),
        ("files=[/a/b,/c/d]", "files=[b,d]"),
        ("op={path:/a/b,more:/c}", "op={path:b,more:c}"),
        ("results/x.json", "results/x.json"),
        ("op=triton", "op=triton"),
        ("url=https://host/file", "url=https://host/file"),
    ],
)
def test_absolute_paths_are_cut_to_their_last_component(word, expected):
    assert cut_folders([word]) == [expected]


def test_description_names_no_folder_of_the_machine(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/benchmark.py", "--out", "/elsewhere/x.json", "data.root=/data/coco"])
    command = describe_environment()["command"]
    assert command.endswith("--out x.json data.root=coco")
    assert "where" not in command


def test_paths_are_relative_where_they_can_be():
    assert relative_path(Path.cwd() / "runs" / "a") == "runs/a"
    assert relative_path(Path("/elsewhere/a")) == "/elsewhere/a"


def test_a_copy_of_the_sources_is_told_its_commit(monkeypatch):
    def no_git(*args, **kwargs):
        raise FileNotFoundError("git")

    monkeypatch.setenv("TRITON_DETR_COMMIT", "abc123")
    assert source_commit() == {"commit": "abc123", "dirty": None}
    monkeypatch.delenv("TRITON_DETR_COMMIT")
    monkeypatch.setattr(subprocess, "run", no_git)
    assert source_commit() == {"commit": None, "dirty": None}


def test_the_folder_of_a_job_is_short_enough_for_a_file_system():
    assert name_folder("op=triton,precision=bf16", 3) == "op=triton,precision=bf16"
    many = ",".join(f"data.batch_size={number}" for number in range(30))
    first, second = (name_folder(many, number) for number in (0, 1))
    assert first.startswith("0_data.batch_size=0,")
    assert first != second
    assert len(name_folder("é" * 200, 12).encode()) < 255


def test_only_the_listed_messages_are_silenced(caplog):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        silence_dependencies()
        warnings.warn("The 'train_dataloader' does not have many workers which may be a bottleneck.", stacklevel=1)
        warnings.warn("the loss is not finite", stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["the loss is not finite"]
    logger = logging.getLogger("lightning.pytorch.trainer.connectors.checkpoint_connector")
    for needless in ("💡 Tip: buy this", "GPU available: True, used: True", "`weights_only` was not set, defaulting"):
        assert not logger.filter(logging.makeLogRecord({"msg": needless}))
    assert logger.filter(logging.makeLogRecord({"msg": "Restored all states from the checkpoint at last.ckpt"}))
