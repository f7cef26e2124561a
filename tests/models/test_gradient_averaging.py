"""Gradients averaged over two processes after the backward pass, against DistributedDataParallel."""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parity.tolerances import FLOAT32_ROUNDOFF

ROOT = Path(__file__).resolve().parents[2]
WORDS = [
    "debug=smoke",
    "logger=csv",
    "deterministic=true",
    "callbacks.progress=null",
    "callbacks.plots=null",
    "callbacks.evaluation_plots=null",
    "callbacks.step_checkpoint.every_n_train_steps=2",
    'callbacks.step_checkpoint.filename="{step}"',
    "+callbacks.step_checkpoint.save_top_k=-1",
    "data.image_size=64",
    "data.num_train=16",
    "data.num_val=2",
    "data.data_seed=2",  # with images without boxes
    "data.batch_size=1",
    "backbone.norm=batch",
    "model.transformer.num_queries=20",
    "trainer.accelerator=cpu",
    "trainer.accumulate_grad_batches=2",
    "trainer.log_every_n_steps=1",
]
Command = Callable[..., subprocess.CompletedProcess[str]]
SMALL_STEPS = 3
NUM_PARAMETERS = 3 * 2 * 2 * 2 + 3 + 3 + 2 * 3 + 2


def same_state(actual: dict[str, Tensor], expected: dict[str, Tensor], *, but: str = " ") -> bool:
    """Whether all values that are not named so are the same bit for bit."""
    assert actual.keys() == expected.keys()
    return all(torch.equal(actual[name], value) for name, value in expected.items() if but not in name)


@pytest.fixture(scope="module")
def small(run_command: Command, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """For each process what a small network ended with, by the way in which it was trained."""
    folder = tmp_path_factory.mktemp("small")
    script = Path(__file__).with_name("run_gradient_averaging.py")
    result = run_command(str(script), str(folder), folder=folder)
    assert result.returncode == 0, result.stderr
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.parametrize("way", ["averaged", "graphs"])
def test_weights_are_those_of_ddp_bit_for_bit(small: list[dict[str, Any]], way: str) -> None:
    """Graphs add their gradients to buffers of their own, which hold the average afterwards."""
    first, second = small
    assert first[way]["captures"] == (2 if way == "graphs" else 0)
    assert same_state(first[way]["state"], first["ddp"]["state"])
    assert same_state(second[way]["state"], first[way]["state"]), "weights or statistics differ between processes"
    assert torch.equal(first[way]["norms"], first["ddp"]["norms"])
    assert first[way]["steps"] == SMALL_STEPS


def test_gradients_that_are_not_averaged_are_seen(small: list[dict[str, Any]]) -> None:
    first, second = (results["left_out"]["state"] for results in small)
    assert not same_state(first, second)
    assert not same_state(first, small[0]["ddp"]["state"])
    assert torch.equal(first["frozen"], second["frozen"]), "weights were not handed out"


def test_all_gradients_are_exchanged_once_a_step(small: list[dict[str, Any]]) -> None:
    """In one piece, with the count of those that are absent; none within a window of accumulated gradients."""
    assert [results["averaged"]["exchanged"] for results in small] == 2 * [SMALL_STEPS * [NUM_PARAMETERS + 1]]


def test_a_gradient_that_overflows_on_one_process_is_skipped_by_all(small: list[dict[str, Any]]) -> None:
    for results in small:
        scaled = results["scaled"]
        assert same_state(scaled["state"], results["scaled_ddp"]["state"], but="running")
        assert scaled["scale"] == results["scaled_ddp"]["scale"] == 2.0**9
        assert scaled["norms"].isfinite().tolist() == [True, True, False, True, True, True]
    assert same_state(*(results["scaled"]["state"] for results in small))


@pytest.mark.parametrize(("way", "steps"), [("absent", 3), ("absent_at_last", 6)])
def test_an_absent_gradient_ends_the_training_on_all_processes(
    small: list[dict[str, Any]], way: str, steps: int
) -> None:
    start = "every trained parameter must have a gradient on every process, got none for "
    assert small[0][way]["message"].startswith(f"{start}some on another process; set requires_grad=False")
    assert small[1][way]["message"].startswith(f"{start}head.weight, head.bias; set requires_grad=False")
    assert [results[way]["steps"] for results in small] == [steps, steps]
    assert all(results["averaged"]["message"] is None for results in small)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("averaging")


def train(run: Command, folder: Path, name: str, *words: str) -> Path:
    command = [str(ROOT / "train.py"), *WORDS, *words, f"hydra.run.dir={folder / name}"]
    result = run(*command, folder=folder, TRITON_DETR_CACHE=str(folder))
    assert result.returncode == 0, result.stderr
    return folder / name


@pytest.fixture(scope="module")
def averaged(run_command: Command, folder: Path) -> Path:
    """A run of four steps of two batches of two processes."""
    return train(run_command, folder, "averaged", "trainer=ddp_graphs")


def last_of(run_dir: Path) -> dict[str, Any]:
    return torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)


def logged(run_dir: Path, name: str) -> list[str]:
    with (run_dir / "csv" / "metrics.csv").open() as file:
        return [row[name] for row in csv.DictReader(file) if row.get(name)]


def test_a_detector_learns_as_with_ddp_bit_for_bit(run_command: Command, folder: Path, averaged: Path) -> None:
    """Statistics of batch norms are those of the first process; some images have no boxes."""
    content = json.loads(next(folder.rglob("instances_train.json")).read_text())
    assert {row["image_id"] for row in content["annotations"]} < {image["id"] for image in content["images"]}
    wrapped = train(run_command, folder, "wrapped", "trainer=ddp")
    actual, expected = last_of(averaged), last_of(wrapped)
    assert actual["global_step"] == expected["global_step"] == 4
    assert same_state(actual["state_dict"], expected["state_dict"])
    for name in ("train/loss", "train/grad_norm"):
        assert len(logged(averaged, name)) >= 4
        assert logged(averaged, name) == logged(wrapped, name)
    first = torch.load(averaged / "checkpoints" / "step=2.ckpt", weights_only=True)
    assert not same_state(first["state_dict"], expected["state_dict"])


def test_a_run_goes_on_bit_for_bit(run_command: Command, folder: Path, averaged: Path) -> None:
    checkpoint = averaged / "checkpoints" / "step=2.ckpt"
    resumed = train(run_command, folder, "resumed", "trainer=ddp_graphs", f"ckpt_path='{checkpoint}'")
    actual, expected = last_of(resumed), last_of(averaged)
    assert actual["global_step"] == expected["global_step"] == 4
    assert same_state(actual["state_dict"], expected["state_dict"])
    moments, expected_moments = (entry["optimizer_states"][0]["state"] for entry in (actual, expected))
    assert moments.keys() == expected_moments.keys()
    assert all(same_state(moments[key], state) for key, state in expected_moments.items())


def start(*words: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process that no other has prepared."""
    given = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run([sys.executable, *words], cwd=folder, env=given, capture_output=True, text=True, timeout=300)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_graphs_on_two_gpus_learn_as_ddp_does(folder: Path) -> None:
    words = ["trainer.accelerator=gpu", "data.size_divisor=64"]
    replayed = train(start, folder, "graphs_on_gpus", "trainer=ddp_graphs", "cuda_graphs=true", *words)
    wrapped = train(start, folder, "ddp_on_gpus", "trainer=ddp", *words)
    actual, expected = last_of(replayed), last_of(wrapped)
    assert actual["global_step"] == expected["global_step"] == 4
    first = torch.load(wrapped / "checkpoints" / "step=2.ckpt", weights_only=True)["state_dict"]
    for name, value in expected["state_dict"].items():
        moved = (value - first[name]).abs().max()
        bound = 0.01 * moved + 8 * FLOAT32_ROUNDOFF * value.abs().max()
        assert (actual["state_dict"][name] - value).abs().max() <= bound, name
    for name in ("train/loss", "train/grad_norm"):
        found, wanted = ([float(value) for value in logged(run_dir, name)] for run_dir in (replayed, wrapped))
        assert found == pytest.approx(wanted, rel=2**7 * FLOAT32_ROUNDOFF)
