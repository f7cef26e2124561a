"""Refusals of settings; those that need the whole command are in tests/test_train.py."""

import pytest
import torch
from omegaconf import OmegaConf

from models.preflight import (
    check_resumption,
    check_run,
    describe_difference,
    device_type,
    match_categories,
    match_validation,
    resolve_checkpoint,
)

SETTINGS = {
    "mode": "train",
    "ckpt_path": None,
    "cuda_graphs": False,
    "compile": False,
    "deterministic": False,
    "model": {"weights": None, "transformer": {"gradient_checkpointing": False}},
    "backbone": {"norm": "batch", "weights": "none"},
    "op": {"backend": "reference"},
    "precision": {"lightning": "32-true"},
    "trainer": {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto"},
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
        ({"cuda_graphs": True}, ValueError, "cuda_graphs must be false without an NVIDIA GPU, got true"),
        (
            {"compile": True, "deterministic": True},
            ValueError,
            "compile must be false with deterministic=true, got true",
        ),
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


CATEGORIES = [{"id": 3, "name": "cat"}]


def save_checkpoint(path, epoch, is_last_batch, global_step):
    path.parent.mkdir(exist_ok=True)
    progress = {"fit_loop": {"epoch_loop.batch_progress": {"is_last_batch": is_last_batch}}}
    state = {"epoch": epoch, "global_step": global_step, "loops": progress}
    torch.save({**state, "state_dict": {}, "categories": CATEGORIES}, path)


def test_auto_takes_the_run_s_last_checkpoint_if_there_is_one(tmp_path):
    cfg = settings(ckpt_path="auto", run_dir=str(tmp_path))
    resolve_checkpoint(cfg)
    assert cfg.ckpt_path is None
    path = tmp_path / "checkpoints" / "last.ckpt"
    save_checkpoint(path, 0, True, 5)
    cfg.ckpt_path = "auto"
    resolve_checkpoint(cfg)
    assert cfg.ckpt_path == str(path)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_epochs": 2, "max_steps": -1}, "max_epochs must be above the 2 epochs of .* got 2: this run has ended"),
        ({"max_epochs": -1, "max_steps": 10}, "max_steps must be above the 10 steps of .* got 10: this run has ended"),
    ],
)
def test_a_run_that_has_ended_is_refused(tmp_path, limits, message):
    path = tmp_path / "run" / "last.ckpt"
    cfg = settings(ckpt_path=str(path), **{f"trainer__{name}": value for name, value in limits.items()})
    save_checkpoint(path, 1, True, 10)
    with pytest.raises(ValueError, match=message):
        check_resumption(cfg, CATEGORIES)
    save_checkpoint(path, 1, False, 9)
    check_resumption(cfg, CATEGORIES)


def rows(*names, first_id=1):
    return [{"id": number, "name": name} for number, name in enumerate(names, start=first_id)]


def test_a_training_goes_on_with_equal_categories_alone(tmp_path):
    path = tmp_path / "run" / "last.ckpt"
    save_checkpoint(path, 0, True, 1)
    with pytest.raises(ValueError, match=r"the 1 categories of .*last.ckpt, got 1 cat with id 4 instead of 3; repeat"):
        check_resumption(settings(ckpt_path=str(path)), [{"id": 4, "name": "cat"}])
    check_resumption(settings(ckpt_path=str(path), mode="validate"), [{"id": 4, "name": "cat"}])


@pytest.mark.parametrize(
    ("found", "places"),
    [
        (rows("cat", "dog", "cow"), [0, 1, 2]),
        (rows("cat", "dog", "cow", first_id=0), [0, 1, 2]),
        (rows("dog", "cow", "cat", first_id=7), [2, 0, 1]),
    ],
)
def test_categories_are_matched_by_name(found, places):
    assert match_categories(rows("cat", "dog", "cow"), found, source="a.ckpt", advice="stop") == places


def test_equal_categories_match_even_if_names_repeat():
    stored = rows("cat", "cat")
    assert match_categories(stored, rows("cat", "cat"), source="a.ckpt", advice="stop") == [0, 1]


@pytest.mark.parametrize(
    ("stored", "found", "difference"),
    [
        (rows("cat", "dog"), rows("cat"), "1 without dog"),
        (rows("cat"), rows("cat", "dog", "cow"), "3 with the new dog, cow"),
        (rows("cat", "dog"), rows("cow", "dog"), "2 without cat, with the new cow"),
        (rows("cat", "dog", "dog"), rows("dog", "cat", "dog"), "3 with the repeated dog"),
        (rows(*"abcdefg"), rows("a"), "1 without b, c, d, e, f and 1 more"),
    ],
)
def test_categories_that_do_not_match_are_named(stored, found, difference):
    message = f"the data must have the {len(stored)} categories of a.ckpt, got {difference}; stop"
    with pytest.raises(ValueError, match=f"^{message}$"):
        match_categories(stored, found, source="a.ckpt", advice="stop")


def test_an_order_that_differs_is_named():
    assert describe_difference(rows("cat", "dog"), rows("cat", "dog")[::-1]) == "2 in another order"


@pytest.mark.parametrize("key", ["ckpt_path", "model__weights"])
def test_validation_matches_the_categories_of_its_weights(tmp_path, key):
    path = tmp_path / "run" / "last.ckpt"
    save_checkpoint(path, 0, True, 1)
    cfg = settings(mode="validate", **{key: str(path)})
    assert match_validation(cfg, [{"id": 4, "name": "cat"}]) == [0]
    with pytest.raises(ValueError, match=r"got 1 without cat, with the new dog; validate on the data of its training"):
        match_validation(cfg, [{"id": 3, "name": "dog"}])
    torch.save({"model": {}}, path)
    assert match_validation(settings(mode="validate", model__weights=str(path)), rows("cat", "dog")) == [0, 1]


SHARDED = {"_target_": "lightning.pytorch.strategies.FSDPStrategy"}
COPIED = {"_target_": "lightning.pytorch.strategies.DDPStrategy"}
AVERAGING = {"_target_": "models.gradient_averaging.GradientAveragingStrategy"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__transformer__gradient_checkpointing": True}, "gradient_checkpointing=true"),
        ({"trainer__devices": 2}, "unless one process trains .* got true with trainer.devices=2"),
        ({"trainer__devices": -1}, "unless one process trains"),
        ({"trainer__num_nodes": 2}, "unless one process trains"),
        ({"trainer__strategy": SHARDED}, "unless one process trains"),
        ({"trainer__strategy": COPIED, "trainer__devices": 2}, "false, trainer=ddp_graphs or trainer=gpu$"),
        ({"trainer__strategy": AVERAGING, "trainer__devices": 2, "backbone__norm": "sync"}, "not be sync .* got sync"),
    ],
)
def test_cuda_graphs_are_refused_where_they_cannot_be_right(monkeypatch, changes, message):
    monkeypatch.setattr("models.preflight.device_type", lambda accelerator: "cuda")
    monkeypatch.setattr("models.preflight.msda_op.require_backend", lambda backend, device: None)
    check_run(settings(cuda_graphs=True))
    check_run(settings(cuda_graphs=True, trainer__devices=[3]))
    check_run(settings(cuda_graphs=True, backbone__norm="sync"))
    check_run(settings(cuda_graphs=True, trainer__devices=2, trainer__strategy=AVERAGING))
    with pytest.raises(ValueError, match=message):
        check_run(settings(cuda_graphs=True, **changes))


@pytest.mark.parametrize("strategy", [SHARDED, "fsdp", "fsdp_cpu_offload"])
@pytest.mark.parametrize("processes", [{"trainer__devices": 2}, {"trainer__devices": -1}, {"trainer__num_nodes": 2}])
def test_sharded_processes_with_statistics_of_their_own_are_refused(strategy, processes):
    with pytest.raises(ValueError, match=r"^backbone.norm must be .* got batch.*; use backbone.norm=sync$"):
        check_run(settings(trainer__strategy=strategy, **processes))


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer__strategy": COPIED},
        {"trainer__strategy": "ddp"},
        {"trainer__strategy": SHARDED, "backbone__norm": "sync"},
        {"trainer__strategy": SHARDED, "backbone__norm": "group"},
        {"trainer__strategy": SHARDED, "trainer__devices": 1},
    ],
)
def test_processes_with_shared_statistics_or_none_pass(changes):
    check_run(settings(**{"trainer__devices": 2, **changes}))


def test_sharded_processes_validate_with_statistics_of_a_checkpoint(tmp_path):
    (tmp_path / "last.ckpt").touch()
    weights = str(tmp_path / "last.ckpt")
    check_run(settings(mode="validate", ckpt_path=weights, trainer__devices=2, trainer__strategy=SHARDED))
