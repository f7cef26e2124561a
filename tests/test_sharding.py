"""Training that is spread over processes by FSDP, against DDP; on two CPU processes."""

import csv
import os
from pathlib import Path

import pytest
import torch

from parity.tolerances import FLOAT32_ROUNDOFF

ROOT = Path(__file__).resolve().parent.parent
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
    "data.num_train=8",
    "data.num_val=2",
    "data.batch_size=2",
    "backbone.norm=group",
    "model.transformer.num_queries=20",
    "trainer.accelerator=cpu",
    "trainer.max_epochs=2",
]
SHARDED_ON_CPU = """
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, _optim_utils

gather = _optim_utils._unflatten_orig_param_states

def gather_and_copy(info, states, name, *settings):
    gather(info, states, name, *settings)
    for state in states.values():
        if name in state:
            state[name] = state[name].clone()

_optim_utils._unflatten_orig_param_states = gather_and_copy

class ShardedOnCPU(FSDPStrategy):
    def _setup_model(self, model):
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)
"""
"""What PyTorch's sharding lacks on a CPU: Lightning passes the number of a GPU, and the moments of all parameters are
gathered in one buffer, one kind after the other, which a GPU's are copied from and a CPU's would be left in."""

FSDP = ["trainer=fsdp", "trainer.strategy._target_=sharded_on_cpu.ShardedOnCPU"]


@pytest.fixture(scope="module")
def train(run_command, tmp_path_factory):
    """Trains with words in a folder of a name, which it returns."""
    folder = tmp_path_factory.mktemp("sharding")
    (folder / "sharded_on_cpu.py").write_text(SHARDED_ON_CPU)
    path = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])

    def run(name, *words):
        command = [str(ROOT / "train.py"), *words, *WORDS, f"hydra.run.dir={folder / name}"]
        result = run_command(*command, folder=folder, TRITON_DETR_CACHE=str(folder), PYTHONPATH=path)
        assert result.returncode == 0, result.stderr
        return folder / name

    return run


@pytest.fixture(scope="module")
def sharded(train):
    """A run of two epochs of two steps."""
    return train("sharded", *FSDP)


def last_of(run_dir):
    return torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)


def logged(run_dir, name):
    with (run_dir / "csv" / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def test_it_learns_as_ddp_does_and_saves_whole_checkpoints(train, sharded):
    copied = train("copied", "trainer=ddp")
    weights, expected = last_of(sharded)["state_dict"], last_of(copied)["state_dict"]
    assert weights.keys() == expected.keys()
    for name in ("train/loss", "train/grad_norm"):
        assert logged(sharded, name) == pytest.approx(logged(copied, name), rel=2**7 * FLOAT32_ROUNDOFF)
    first = torch.load(sharded / "checkpoints" / "step=2.ckpt", weights_only=True)["state_dict"]
    for name, value in expected.items():
        moved = (value - first[name]).abs().max()
        assert (weights[name] - value).abs().max() <= 0.01 * moved + 8 * FLOAT32_ROUNDOFF * value.abs().max()
    assert any(not torch.equal(first[name], value) for name, value in expected.items())


def test_a_sharded_run_goes_on_bit_for_bit(train, sharded):
    resumed = train("resumed", *FSDP, f"ckpt_path='{sharded / 'checkpoints' / 'step=2.ckpt'}'")
    actual, expected = last_of(resumed), last_of(sharded)
    assert actual["global_step"] == expected["global_step"] == 4
    for name, value in expected["state_dict"].items():
        assert torch.equal(actual["state_dict"][name], value)
    moments, expected_moments = (entry["optimizer_states"][0]["state"] for entry in (actual, expected))
    assert moments.keys() == expected_moments.keys()
    for key, state in expected_moments.items():
        assert all(torch.equal(moments[key][name], value) for name, value in state.items())
