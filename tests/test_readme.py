"""The commands of the README do what it says: each runs, shrunk to seconds, or needs a GPU and composes."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from coco.synthetic import SyntheticSpec, write_synthetic_dataset

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(bash|python)\n(.*?)```", TEXT, flags=re.DOTALL)
LINES = [line for language, block in BLOCKS if language == "bash" for line in block.splitlines()]
MAKE_TARGETS = [shlex.split(line, comments=True)[1] for line in LINES if line.startswith("make ")]
COMMANDS = [line for line in LINES if line.startswith("python train.py")]
ON_CPU = [line for line in COMMANDS if "# GPU" not in line and "--help" not in line]
ON_GPU = [line for line in COMMANDS if "# GPU" in line]
TOOLS = [line for line in LINES if line.startswith(("python -m scripts.export", "python -m scripts.predict"))]
SHRINK = [
    "trainer.limit_train_batches=1",
    "trainer.limit_val_batches=1",
    "trainer.num_sanity_val_steps=0",
    "trainer.max_epochs=2",
    "data.batch_size=2",
    "data.num_workers=0",
    "data.eval_transform.size=64",
    "callbacks.plots=null",
    "callbacks.evaluation_plots=null",
]
SYNTHETIC = ["data.num_train=4", "data.num_val=2", "data.image_size=64"]


def arguments(line: str, data: Path, run_dir: Path) -> list[str]:
    line = line.replace("/path/to/my_data", str(data)).replace("/path/to/coco", str(data / "coco"))
    return shlex.split(line.replace("runs/<run>", str(run_dir)), comments=True)[2:]


def start_training(overrides: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_DETR_CACHE": str(cwd)}
    command = [sys.executable, str(ROOT / "train.py"), *overrides]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return tmp_path_factory.mktemp("readme")


@pytest.fixture(scope="module")
def data(workspace):
    """A data set in COCO's format, under its own names and, in coco/, under COCO's."""
    folder = write_synthetic_dataset(SyntheticSpec(num_train=4, num_val=2, image_size=64, seed=0), workspace)
    coco = folder / "coco"
    (coco / "annotations").mkdir(parents=True)
    for split in ("train", "val"):
        (coco / f"{split}2017").symlink_to(folder / split)
        source = folder / "annotations" / f"instances_{split}.json"
        (coco / "annotations" / f"instances_{split}2017.json").symlink_to(source)
    return folder


@pytest.fixture(scope="module")
def first_run(workspace, data):
    run_dir = workspace / "first_run"
    result = start_training([*SHRINK, *SYNTHETIC, "trainer.max_epochs=1", f"hydra.run.dir={run_dir}"], workspace)
    assert result.returncode == 0, result.stderr
    return run_dir


def test_the_readme_has_commands():
    assert MAKE_TARGETS == ["train", "test"]
    assert len(ON_CPU) >= 6
    assert len(ON_GPU) >= 3


@pytest.mark.parametrize("target", MAKE_TARGETS)
def test_make_target_exists(target):
    subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("line", ON_CPU)
def test_command_runs(run_command, line, workspace, data, first_run):
    given = [word for word in arguments(line, data, first_run) if not word.startswith("trainer.max_epochs=")]
    shrink = SHRINK if "data=coco" in given else [*SHRINK, *SYNTHETIC]
    kept = [override for override in shrink if override.split("=")[0] not in {item.split("=")[0] for item in given}]
    run_dir = workspace / f"run_{ON_CPU.index(line)}"
    words = [*given, *kept, f"hydra.run.dir={run_dir}"]
    result = run_command(str(ROOT / "train.py"), *words, folder=workspace, TRITON_DETR_CACHE=str(workspace))
    assert result.returncode == 0, result.stderr
    assert (run_dir / "per_class_ap.csv").is_file()


@pytest.mark.parametrize("line", ON_GPU)
def test_gpu_command_composes(line, data):
    given = [item for item in arguments(line, data, data) if item != "-m"]
    parsed = OverridesParser.create().parse_overrides(given)
    first_choice = [
        f"{item.key_or_group}={next(iter(item.sweep_iterator()))}" if item.is_sweep_override() else item.input_line
        for item in parsed
    ]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        trainer = compose("train", overrides=first_choice).trainer
    assert max(trainer.max_epochs, trainer.max_steps) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("line", [line for line in ON_GPU if "ddp" not in line and "bccd" not in line])
def test_gpu_command_runs(line, workspace, data):
    given = arguments(line, data, data)
    shrink = SHRINK if "data=coco" in given else [*SHRINK, *SYNTHETIC]
    result = start_training([*given, *shrink, f"hydra.run.dir={workspace / 'gpu'}"], workspace)
    assert result.returncode == 0, result.stderr


def test_export_and_prediction_run(run_command, workspace, data, first_run):
    """In the README's order: a prediction reads what the export before has written."""
    on_cpu = [arguments(line, data, first_run) for line in TOOLS if "# GPU" not in line]
    assert [words[0] for words in on_cpu] == ["scripts.export", "scripts.predict", "scripts.predict"]
    for words in on_cpu:
        result = run_command("-m", *words, folder=workspace)
        assert result.returncode == 0, result.stderr
    assert (workspace / "found" / "detections.json").is_file()
    assert len(list((workspace / "found" / "pictures").iterdir())) == 2


@pytest.mark.parametrize("line", [line for line in TOOLS if "# GPU" in line])
def test_gpu_export_composes(line, data):
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = compose("export", overrides=arguments(line, data, data)[1:])
    assert config.format.writer["_target_"].startswith("models.export.")


def test_python_examples_run():
    examples = [block for language, block in BLOCKS if language == "python"]
    assert examples
    for example in examples:
        names: dict = {}
        exec(example, names)
        assert names["output"].shape == torch.Size([2, 100, 256])
