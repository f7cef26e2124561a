"""A run that is killed, told to stop or finished, and resumed: bit for bit the run that was never stopped."""

import csv
import json
import os
import signal
from itertools import pairwise
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig, OmegaConf

import train
from models.divergence import TrainingDiverged

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
TINY = [
    "deterministic=true",
    "trainer=cpu",
    "logger=csv",
    "callbacks.progress=null",
    "callbacks.step_checkpoint.every_n_train_steps=1",
    "trainer.max_epochs=2",
    "trainer.log_every_n_steps=1",
    "trainer.num_sanity_val_steps=0",
    "data.image_size=64",
    "data.num_train=8",
    "data.num_val=2",
    "data.batch_size=2",
    "data.eval_batch_size=1",
    "data.num_workers=0",
    "model.transformer.num_queries=20",
    "model.transformer.num_encoder_layers=1",
    "model.transformer.dropout=0.1",
]


EVALUATION = "evaluation"


class Killed(Exception):
    """Stands in for a crash."""


class ActInEvaluation(pl.Callback):
    """Does something once, after the first batch of the first evaluation."""

    def __init__(self, action):
        self.action = action

    def on_validation_batch_end(self, trainer, pl_module, *arguments):
        action, self.action = self.action, lambda *_: None
        action(trainer, pl_module)


class ActAtStep(pl.Callback):
    """Does something once, after the forward and backward pass of an optimiser step."""

    def __init__(self, step, action):
        self.step = step
        self.action = action

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            self.step = -1
            self.action(trainer, pl_module)


def crash(trainer, pl_module):
    raise Killed


def kill(trainer, pl_module):
    os.kill(os.getpid(), signal.SIGKILL)


def terminate(trainer, pl_module):
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt(trainer, pl_module):
    os.kill(os.getpid(), signal.SIGINT)


def end(trainer, pl_module):
    trainer.should_stop = True


def composed(run_dir, cache, *overrides) -> DictConfig:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        words = [*TINY, f"data.cache_dir={cache}", *overrides]
        cfg = compose("train", overrides=words, return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    OmegaConf.set_struct(cfg, False)
    cfg.pop("hydra")
    OmegaConf.set_struct(cfg, True)
    cfg.run_dir = str(run_dir)
    return cfg


def fit(run_dir, cache, *overrides, action=None, step=None):
    """Trains and returns weights, optimiser state and the trainer."""
    cfg = composed(run_dir, cache, *overrides)
    detector, datamodule, trainer = train.build(cfg)
    if action is not None:
        trainer.callbacks.insert(0, ActInEvaluation(action) if step == EVALUATION else ActAtStep(step, action))
    try:
        trainer.fit(detector, datamodule, ckpt_path=cfg.ckpt_path)
    finally:
        torch.use_deterministic_algorithms(False)
    return detector, trainer


def checkpoint_of(run_dir):
    return torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)


def rows_of(run_dir):
    with (run_dir / "csv" / "metrics.csv").open() as file:
        return [
            {key: value for key, value in row.items() if "img_per_s" not in key and value}
            for row in csv.DictReader(file)
        ]


def flatten(value, name=""):
    """Lays nested dicts and lists out by the names of their leaves."""
    if isinstance(value, dict | list | tuple):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: leaf for part, inner in entries for key, leaf in flatten(inner, f"{name}.{part}").items()}
    return {name: value}


def differences(run_dir, expected_dir):
    """Names what differs in two runs' last checkpoints, paths and clocks aside."""
    actual, expected = checkpoint_of(run_dir), checkpoint_of(expected_dir)
    differing = []
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "current_model_state", "epoch", "global_step"):
        first, second = flatten(actual[key], key), flatten(expected[key], key)
        assert first.keys() == second.keys()
        for name, value in first.items():
            same = torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name]
            differing += [] if same else [name]
    return differing


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def whole(cache, tmp_path_factory):
    """A run of two epochs of four steps, with a moving average of the weights."""
    run_dir = tmp_path_factory.mktemp("whole")
    fit(run_dir, cache, "ema=exponential")
    return run_dir


@pytest.mark.parametrize(
    ("action", "error", "step", "saved"),
    [
        (terminate, SIGTERMException, 2, 2),
        (terminate, SIGTERMException, EVALUATION, 4),
        (interrupt, SIGTERMException, 3, 3),
        (interrupt, SIGTERMException, 4, 4),
        (interrupt, SIGTERMException, EVALUATION, 4),
        (crash, Killed, 5, 4),
    ],
)
def test_a_stopped_run_goes_on_as_if_it_had_not_been(whole, cache, tmp_path, action, error, step, saved):
    with pytest.raises(error):
        fit(tmp_path, cache, "ema=exponential", action=action, step=step)
    assert checkpoint_of(tmp_path)["global_step"] == saved
    fit(tmp_path, cache, "ema=exponential", "ckpt_path=auto", "data.num_workers=1")
    assert differences(tmp_path, whole) == []
    assert rows_of(tmp_path) == rows_of(whole)


@pytest.mark.parametrize("step", [2, 5])
def test_a_run_that_ends_between_evaluations_is_saved_and_goes_on(whole, cache, tmp_path, step):
    words = ["ema=exponential", "callbacks.step_checkpoint=null"]
    fit(tmp_path, cache, *words, action=end, step=step)
    assert checkpoint_of(tmp_path)["global_step"] == step
    fit(tmp_path, cache, *words, "ckpt_path=auto")
    assert differences(tmp_path, whole) == []


@pytest.mark.parametrize(("max_steps", "saved"), [(3, [3]), (4, [4, 4]), (6, [4, 4, 6])])
def test_the_end_is_saved_once(cache, tmp_path, monkeypatch, max_steps, saved):
    """An evaluation, after step 4, saves the best and the last checkpoint."""
    steps = []
    save = pl.Trainer.save_checkpoint
    monkeypatch.setattr(
        pl.Trainer,
        "save_checkpoint",
        lambda trainer, *arguments: (steps.append(trainer.global_step), save(trainer, *arguments)),
    )
    fit(tmp_path, cache, f"trainer.max_steps={max_steps}", "callbacks.step_checkpoint=null")
    assert steps == saved
    assert checkpoint_of(tmp_path)["global_step"] == max_steps


KILLED_AT_STEP_3 = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
import torch
spec = spec_from_file_location("resuming", sys.argv[1])
module = module_from_spec(spec)
spec.loader.exec_module(module)
torch.set_num_threads(1)
module.fit(Path(sys.argv[2]), Path(sys.argv[3]), "ema=exponential", action=module.kill, step=3)
"""


def test_a_run_killed_by_the_system_goes_on(run_command, whole, cache, tmp_path):
    (tmp_path / "killed.py").write_text(KILLED_AT_STEP_3)
    words = [str(tmp_path / "killed.py"), __file__, str(tmp_path), str(cache)]
    assert run_command(*words, folder=tmp_path).returncode == -signal.SIGKILL
    assert checkpoint_of(tmp_path)["global_step"] == 2
    fit(tmp_path, cache, "ema=exponential", "ckpt_path=auto")
    assert differences(tmp_path, whole) == []


def test_two_runs_of_one_seed_are_the_same_and_of_two_are_not(whole, cache, tmp_path):
    for seed in (42, 43):
        fit(tmp_path / str(seed), cache, "ema=exponential", f"seed={seed}", "trainer.max_epochs=1")
    assert_prefix(tmp_path / "42", whole)
    with pytest.raises(AssertionError):
        assert_prefix(tmp_path / "43", whole)


def assert_prefix(run_dir, longer_dir):
    """Checks that the losses of a run are, to every digit, the first ones of a longer run."""
    first, second = (
        [row["train/loss"] for row in rows_of(folder) if "train/loss" in row] for folder in (run_dir, longer_dir)
    )
    assert len(first) >= 3
    assert first == second[: len(first)]


def test_a_run_that_has_ended_says_so(whole, cache):
    with pytest.raises(ValueError, match=r"max_epochs must be above the 2 epochs of .*, got 2: this run has ended"):
        fit(whole, cache, "ema=exponential", "ckpt_path=auto")


def poison_gradients(detector, at_step):
    """Makes the gradient of one parameter infinite in one step."""
    parameter = next(p for p in detector.model.parameters() if p.requires_grad)
    parameter.register_hook(
        lambda gradient: gradient * float("inf") if detector.trainer.global_step == at_step else gradient
    )


@pytest.mark.parametrize("fused", ["true", "false"])
def test_a_bad_step_is_skipped_and_told_of(cache, tmp_path, fused):
    cfg = composed(tmp_path, cache, "callbacks.divergence.policy=skip", f"optimizer.fused={fused}")
    detector, datamodule, trainer = train.build(cfg)
    weights = []

    class Recorder(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            weights.append([p.detach().clone() for p in pl_module.model.parameters() if p.requires_grad])

    trainer.callbacks.insert(0, Recorder())
    poison_gradients(detector, at_step=1)
    try:
        trainer.fit(detector, datamodule)
    finally:
        torch.use_deterministic_algorithms(False)
    moved = [not all(map(torch.equal, a, b)) for a, b in pairwise(weights)]
    assert moved[0] is False  # the step that was withheld
    assert all(moved[1:])
    assert all(torch.isfinite(p).all() for p in weights[-1])
    report = json.loads((tmp_path / "divergence" / "step_1_rank0.json").read_text())
    assert len(report["image_ids"][0]) == 2
    assert report["grad_norm"] in ("inf", "nan")
    assert {"loss_ce", "loss_bbox", "loss_giou_0"} <= report["loss_terms"][0].keys()
    assert report["config"]["seed"] == 42


def test_divergence_stops_with_evidence_and_the_last_finite_weights(cache, tmp_path):
    cfg = composed(tmp_path, cache)
    detector, datamodule, trainer = train.build(cfg)
    poison_gradients(detector, at_step=2)
    try:
        with pytest.raises(TrainingDiverged, match=r"must be finite, got others in step 2 .*step_2_rank0\.json"):
            trainer.fit(detector, datamodule)
    finally:
        torch.use_deterministic_algorithms(False)
    checkpoint = torch.load(tmp_path / "divergence" / "step_2.ckpt", weights_only=True)
    assert all(torch.isfinite(value).all() for value in checkpoint["state_dict"].values())
    assert checkpoint["config"]["seed"] == 42


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_gpu_run_goes_on_bit_for_bit(cache, tmp_path, precision):
    """Or PyTorch raises an error that names the operation without a deterministic form."""
    words = ["trainer=gpu", "op=triton", f"precision={precision}", "ema=exponential"]
    fit(tmp_path / "whole", cache, *words)
    fit(tmp_path / "again", cache, *words)
    assert differences(tmp_path / "again", tmp_path / "whole") == []
    with pytest.raises(Killed):
        fit(tmp_path / "stopped", cache, *words, action=crash, step=3)
    fit(tmp_path / "stopped", cache, *words, "ckpt_path=auto")
    assert differences(tmp_path / "stopped", tmp_path / "whole") == []
