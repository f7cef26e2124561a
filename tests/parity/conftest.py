"""An experiment small enough for tests: the quick preset with fewer steps."""

from pathlib import Path

import pytest
import torch

from parity.arms import Experiment, load_experiment

torch.set_num_threads(1)  # tensors this small only wait for a second thread

FEWER = (
    "op=reference",
    "against=reference",
    "parity.model.controls=2",
    "parity.trajectory.steps=4",
    "parity.trajectory.trained_steps=3",
    "parity.trajectory.controls=2",
    "parity.ensemble.pairs=3",
    "parity.ensemble.steps=3",
    "parity.ensemble.last_steps=2",
    "parity.evaluation.steps=2",
    "parity.speed.warmup=1",
    "parity.speed.repeats=3",
    "parity.speed.split_repeats=1",
    "parity.sensitivity.steps=3",
    "data.num_train=16",
    "data.num_val=4",
    "data.image_size=64",
    "data.limit_val=4",
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all tests, so that arms are trained once."""
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="session")
def overrides(folder: Path) -> list[str]:
    """Overrides of an experiment that compares the reference with itself."""
    return [*FEWER, f"data.cache_dir={folder / 'data'}", f"output={folder / 'output'}"]


@pytest.fixture(scope="session")
def experiment(overrides: list[str]) -> Experiment:
    """The reference against itself."""
    return load_experiment(overrides)
