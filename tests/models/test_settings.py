"""Numbers out of their range are refused in one line that names the setting."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from models.settings import RANGES, SHAPING, check_numbers, check_resumed_settings

CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"


@pytest.fixture(scope="module")
def config():
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train")


def changed(config, **values):
    cfg = config.copy()
    for key, value in values.items():
        OmegaConf.update(cfg, key, value)
    return cfg


@pytest.mark.parametrize("key", RANGES)
def test_the_default_passes_and_a_value_below_does_not(config, key):
    check_numbers(config)
    allowed = RANGES[key]
    assert OmegaConf.select(config, key, throw_on_missing=True) is not None or allowed.optional
    wrong = allowed.minimum if allowed.exclusive else allowed.minimum - 1
    with pytest.raises(ValueError, match=rf"{key} must be .*, got {wrong}; correct the override"):
        check_numbers(changed(config, **{key: wrong}))
    with pytest.raises(ValueError, match=rf"{key} must be .*, got many"):
        check_numbers(changed(config, **{key: "many"}))


def test_null_fraction_and_truth(config):
    check_numbers(changed(config, **{"trainer.gradient_clip_val": None, "optimizer.lr": 1}))
    for key, value in (("data.batch_size", None), ("data.batch_size", 1.5), ("data.batch_size", True)):
        with pytest.raises(ValueError, match=r"data.batch_size must be an integer of at least 1, got"):
            check_numbers(changed(config, **{key: value}))


def test_a_training_must_end(config):
    with pytest.raises(ValueError, match=r"trainer.max_epochs must be set unless trainer.max_steps is, got -1 and -1"):
        check_numbers(changed(config, **{"trainer.max_epochs": -1}))
    check_numbers(changed(config, **{"trainer.max_epochs": -1, "trainer.max_steps": 5}))


def test_a_run_is_resumed_with_its_own_network(config, tmp_path):
    path = tmp_path / "last.ckpt"
    torch.save({"loops": {}, "state_dict": {}, "config": OmegaConf.to_container(config, resolve=False)}, path)
    check_resumed_settings(config)
    check_resumed_settings(changed(config, ckpt_path=str(path)))
    for key in SHAPING:
        assert OmegaConf.select(config, key) is not None
    with pytest.raises(ValueError, match=r"model.transformer.d_model must be \d+ as in .*last.ckpt, got 8; repeat"):
        check_resumed_settings(changed(config, ckpt_path=str(path), **{"model.transformer.d_model": 8}))
