"""Every configuration file composes, and everything it describes can be built."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, MissingConfigException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
GROUPS = sorted(folder.name for folder in CONFIGS.iterdir() if folder.is_dir())
OPTIONS = [f"{group}={file.stem}" for group in GROUPS for file in sorted((CONFIGS / group).glob("*.yaml"))]
COCO_ROOT = "data.root=/path/to/coco"


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        groups = {override.split("=")[0] for override in overrides}
        name = "parity" if "parity" in groups else "export" if "format" in groups else "train"
        cfg = compose(name, overrides=list(overrides), return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    OmegaConf.set_struct(cfg, False)
    cfg.pop("hydra")
    OmegaConf.set_struct(cfg, True)
    cfg.run_dir = "runs/test"
    return cfg


def needs_coco_root(option: str) -> bool:
    group = option.split("=")[0]
    return option == "data=coco" or group == "experiment"


@pytest.mark.parametrize("option", OPTIONS)
def test_option_composes_resolves_and_instantiates(option, tmp_path):
    cfg = composed(option, *([COCO_ROOT] if needs_coco_root(option) else []))
    cfg.num_classes = 5
    assert OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    cfg.run_dir = str(tmp_path)
    if cfg.backbone.weights == "imagenet":
        cfg.backbone.weights = "none"
    with torch.device("meta"):
        assert instantiate(cfg.model) is not None
    for name in ("data", "criterion", "normalizer", "optimizer", "schedule"):
        assert instantiate(cfg[name]) is not None
    for callback in cfg.callbacks.values():
        assert callback is None or instantiate(callback) is not None
    if option.startswith("format=") and option != "format=cuda_graph":
        assert instantiate(cfg.format.writer).name == cfg.format.name
    if option.startswith("trainer=") and option not in ("trainer=gpu", "trainer=ddp", "trainer=fsdp"):
        assert instantiate(cfg.trainer).max_epochs == cfg.trainer.max_epochs


def test_a_wrong_option_lists_the_right_ones():
    with pytest.raises(MissingConfigException, match=r"(?s)Available options.*reference.*triton"):
        composed("op=tritn")


def test_an_unknown_key_is_refused():
    with pytest.raises(ConfigCompositionException, match="learning_rate"):
        composed("optimizer.learning_rate=1")


def test_the_default_model_follows_the_data():
    assert composed().model.transformer.d_model < composed("data=coco", COCO_ROOT).model.transformer.d_model


def test_a_named_model_wins_over_the_default_for_the_data():
    cfg = composed("data=coco", COCO_ROOT, "model=deformable_detr_two_stage", "backbone=resnet18")
    assert cfg.model.transformer.two_stage
    assert cfg.backbone.name == "resnet18"


@pytest.mark.parametrize(
    ("experiment", "box_refine", "two_stage"),
    [
        ("deformable_detr_r50", False, False),
        ("deformable_detr_r50_refine", True, False),
        ("deformable_detr_r50_two_stage", True, True),
    ],
)
def test_published_recipes(experiment, box_refine, two_stage):
    cfg = composed(f"experiment={experiment}", COCO_ROOT)
    assert (cfg.model.box_refine, cfg.model.transformer.two_stage) == (box_refine, two_stage)
    assert (cfg.optimizer.lr, cfg.optimizer.backbone_lr, cfg.optimizer.slow_factor) == (2e-4, 2e-5, 0.1)
    assert (cfg.trainer.max_epochs, cfg.schedule.milestones, cfg.trainer.gradient_clip_val) == (50, [40], 0.1)
    assert (cfg.backbone.weights, cfg.backbone.norm) == ("imagenet", "frozen")
    network = cfg.model.transformer
    assert (network.num_queries, network.dim_feedforward, network.dropout) == (300, 1024, 0.1)
    assert cfg.detector.top_k == 100


@pytest.mark.parametrize(
    ("experiment", "epochs", "drop", "levels", "finest_stride", "batch_size"),
    [
        ("dino_r50_4scale_12ep", 12, 11, 4, 8, 2),
        ("dino_r50_4scale_24ep", 24, 20, 4, 8, 2),
        ("dino_r50_4scale_36ep", 36, 30, 4, 8, 2),
        ("dino_r50_5scale_12ep", 12, 11, 5, 4, 1),
    ],
)
def test_published_dino_recipes(experiment, epochs, drop, levels, finest_stride, batch_size):
    cfg = composed(f"experiment={experiment}", COCO_ROOT)
    assert (cfg.optimizer.lr, cfg.optimizer.backbone_lr, cfg.optimizer.slow_modules) == (1e-4, 1e-5, [])
    assert (cfg.trainer.max_epochs, cfg.schedule.milestones, cfg.schedule.gamma) == (epochs, [drop], 0.1)
    assert (cfg.optimizer.weight_decay, cfg.trainer.gradient_clip_val) == (1e-4, 0.1)
    assert (cfg.backbone.weights, cfg.backbone.norm) == ("imagenet", "frozen")
    network = cfg.model.transformer
    assert (network.num_queries, network.dim_feedforward, network.dropout) == (900, 2048, 0.0)
    assert (network.num_feature_levels, cfg.backbone.finest_stride) == (levels, finest_stride)
    assert (cfg.data.batch_size, cfg.detector.top_k) == (batch_size, 300)


def test_settings_of_dino_on_which_sources_disagree():
    cfg = composed("model=dino_4scale")
    assert cfg.model.transformer.inverse_sigmoid_eps == 1e-3
    assert (cfg.model.position_encoding.temperature, cfg.model.position_encoding.offset) == (20, 0.0)
    assert cfg.criterion.loss_weights == {"loss_ce": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}
    assert (cfg.criterion.matcher.cost_class, cfg.criterion.matcher.cost_bbox) == (2.0, 5.0)
    denoising = cfg.model.denoising
    assert (denoising.num_queries, denoising.max_queries) == (100, 400)
    assert (denoising.label_noise_ratio, denoising.box_noise_scale) == (0.5, 1.0)


def test_dino_brings_its_criterion_and_optimiser():
    cfg = composed("experiment=overfit_subset", COCO_ROOT, "model=dino_4scale")
    assert cfg.model._target_ == "models.dino.Dino"
    assert (cfg.criterion.loss_weights.loss_ce, cfg.optimizer.slow_modules, cfg.detector.top_k) == (1.0, [], 300)
    assert composed("experiment=overfit_subset", COCO_ROOT).criterion.loss_weights.loss_ce == 2.0
    named = composed("model=dino_4scale", "criterion=deformable_detr", "optimizer=adamw", "detector.top_k=100")
    assert (named.criterion.loss_weights.loss_ce, named.detector.top_k) == (2.0, 100)
    assert named.optimizer.slow_modules == ["reference_points", "sampling_offsets"]


@pytest.mark.parametrize("group", ["op", "precision"])
def test_every_key_of_a_plain_group_is_read(group):
    """Groups without `_target_` are read by name, so that a key that nobody reads would go unseen."""
    root = CONFIGS.parent
    sources = [*CONFIGS.rglob("*.yaml"), root / "train.py", *(root / "models").glob("*.py")]
    text = "\n".join(file.read_text() for file in sources)
    for file in (CONFIGS / group).glob("*.yaml"):
        for key in OmegaConf.load(file):
            assert f"{group}.{key}" in text, f"nobody reads {group}.{key}"
