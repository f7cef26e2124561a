"""Refusals of settings; those that need the whole command are in tests/test_train.py."""

import pytest
from omegaconf import OmegaConf

from models.preflight import check_run, device_type

SETTINGS = {
    "mode": "train",
    "ckpt_path": None,
    "model": {"weights": None},
    "backbone": {"norm": "batch", "weights": "none"},
    "op": {"backend": "reference"},
    "precision": {"lightning": "32-true"},
    "trainer": {"accelerator": "cpu"},
}


def settings(**changes):
    cfg = OmegaConf.create(SETTINGS)
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value)
    return cfg


def test_good_settings_pass(tmp_path):
    check_run(settings())
    checkpoint = tmp_path / "last.ckpt"
    checkpoint.touch()
    check_run(settings(mode="validate", ckpt_path=str(checkpoint), backbone__norm="frozen"))
    without_norms = settings()
    del without_norms.backbone.norm
    check_run(without_norms)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"mode": "valdate"}, ValueError, "mode must be one of train, validate, got valdate"),
        ({"mode": "validate"}, ValueError, "set ckpt_path"),
        ({"ckpt_path": "absent.ckpt"}, FileNotFoundError, "ckpt_path must name a file, got absent.ckpt"),
        ({"model__weights": "absent.pth"}, FileNotFoundError, "model.weights must name a file, got absent.pth"),
        ({"model__weights": "a", "ckpt_path": "b"}, ValueError, "must not be combined"),
        ({"precision__lightning": "16-mixed"}, ValueError, "precision=fp16 must run on a GPU"),
        ({"backbone__norm": "frozen"}, ValueError, "must come with trained statistics"),
        ({"op__backend": "tritn"}, ValueError, "tritn"),
        ({"trainer__accelerator": "tpu"}, ValueError, "accelerator must be one of"),
    ],
)
def test_bad_settings_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        check_run(settings(**changes))


def test_the_original_op_is_refused_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr("msda_op.compat.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="op=cuda cannot run here"):
        check_run(settings(op__backend="cuda"))


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="use trainer=cpu"):
        device_type("gpu")
    assert device_type("auto") == "cpu"
