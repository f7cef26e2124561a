"""Signals of a cluster; equality of stopped and whole runs is in tests/test_resuming.py."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from models.resuming import StepSeeds, StopCheckpoint


@pytest.fixture(autouse=True)
def interrupts_as_before():
    """Takes back what a test sets, and what Lightning does, which ignores further interrupts after one."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


class Signalled(pl.LightningModule):
    """Sends a signal to its own process in one batch, and notes a random number in each."""

    def __init__(self, number, at_batch):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.number = number
        self.at_batch = at_batch
        self.drawn = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        self.drawn.append(torch.rand(()).item())
        if batch_idx == self.at_batch:
            os.kill(os.getpid(), self.number)
        return self.layer(batch).sum()


def fit(module, folder, max_epochs=1, **settings):
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=max_epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[StopCheckpoint(str(folder / "last.ckpt")), StepSeeds(seed=1)],
        **settings,
    )
    trainer.fit(module, DataLoader(torch.ones(6, 1)))


@pytest.mark.parametrize(("at_batch", "is_saved"), [(3, True), (2, False)])
def test_sigterm_saves_where_no_gradient_is_lost(tmp_path, at_batch, is_saved):
    with pytest.raises(SIGTERMException):
        fit(Signalled(signal.SIGTERM, at_batch), tmp_path, accumulate_grad_batches=2)
    assert (tmp_path / "last.ckpt").is_file() == is_saved
    if is_saved:
        assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2


@pytest.mark.parametrize(("at_batch", "step"), [(3, 2), (2, 2), (4, 3), (5, 3)])
def test_an_interrupt_waits_for_the_gradients_at_hand_and_says_how_to_go_on(tmp_path, capsys, at_batch, step):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SIGTERMException):
        fit(Signalled(signal.SIGINT, at_batch), tmp_path, max_epochs=2, accumulate_grad_batches=2)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == step
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(
        rf"stopped and saved after {step} steps; to go on: python .* ckpt_path=\S+last\.ckpt", last_line
    )
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("limits", [{}, {"max_epochs": -1, "max_steps": 6}])
def test_a_signal_in_the_last_step_stops_nothing(tmp_path, capsys, number, limits):
    """The training has ended with it: there would be nothing to go on with."""
    fit(Signalled(number, 5), tmp_path, **limits)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 6
    assert "to go on" not in capsys.readouterr().err


def test_a_job_of_a_sweep_goes_on_alone(tmp_path, capsys, monkeypatch):
    words = ["-m", "seed=1,2", "data.batch_size=2", "ckpt_path=old.ckpt", "hydra.sweep.dir=here"]
    monkeypatch.setattr("sys.argv", ["train.py", *words])
    job = {"mode": RunMode.MULTIRUN, "overrides": {"task": ["seed=1", "data.batch_size=2", "ckpt_path=old.ckpt"]}}
    monkeypatch.setattr(HydraConfig.instance(), "cfg", OmegaConf.create({"hydra": job}))
    with pytest.raises(SIGTERMException):
        fit(Signalled(signal.SIGINT, 2), tmp_path)
    expected = r"to go on: python (-m )?\S+ hydra\.sweep\.dir=here seed=1 data\.batch_size=2 ckpt_path=\S+last\.ckpt\n$"
    assert re.search(expected, capsys.readouterr().err)


INTERRUPTED_TWICE = """
import os, signal, sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
spec = spec_from_file_location("resuming", sys.argv[1])
module = module_from_spec(spec)
spec.loader.exec_module(module)
class Twice(module.Signalled):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        os.kill(os.getpid(), signal.SIGINT)
        print("still here")
module.fit(Twice(signal.SIGINT, 0), Path(sys.argv[2]))
"""


def test_a_second_interrupt_ends_at_once(run_command, tmp_path):
    (tmp_path / "twice.py").write_text(INTERRUPTED_TWICE)
    result = run_command(str(tmp_path / "twice.py"), __file__, str(tmp_path), folder=tmp_path)
    assert result.returncode == -signal.SIGINT
    assert "Ctrl-C again ends at once" in result.stderr
    assert "still here" not in result.stdout
    assert not (tmp_path / "last.ckpt").exists()


def test_an_interrupt_before_the_first_step_is_python_s(tmp_path):
    class Early(Signalled):
        def on_fit_start(self):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(SystemExit) as caught:
        fit(Early(0, -1), tmp_path)
    assert isinstance(caught.value.__context__, KeyboardInterrupt)
    assert not (tmp_path / "last.ckpt").exists()


def test_a_run_in_the_background_goes_on_ignoring_interrupts(tmp_path):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fit(Signalled(signal.SIGINT, 2), tmp_path)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 6


def test_a_run_in_another_thread_leaves_signals_alone(tmp_path):
    with ThreadPoolExecutor(1) as threads:
        threads.submit(fit, Signalled(0, -1), tmp_path).result()
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 6


def test_slurm_s_signal_saves_and_requeues(tmp_path, monkeypatch):
    for name, value in {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    command = tmp_path / "scontrol"
    command.write_text(f"#!/bin/sh\necho $@ > {tmp_path / 'asked'}\n")
    command.chmod(0o755)
    fit(Signalled(signal.SIGUSR1, 2), tmp_path, plugins=[SLURMEnvironment(auto_requeue=True)])
    assert (tmp_path / "asked").read_text() == "requeue 77\n"
    assert [path.name for path in Path(tmp_path).glob("hpc_ckpt_*.ckpt")] == ["hpc_ckpt_1.ckpt"]


def test_random_numbers_follow_from_the_place_alone(tmp_path):
    first, second = Signalled(0, 2), Signalled(0, 5)
    fit(first, tmp_path)
    torch.rand(7)
    fit(second, tmp_path)
    assert first.drawn == second.drawn
    assert len(set(first.drawn)) == 6
