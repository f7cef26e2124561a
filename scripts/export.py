"""Turns a checkpoint into an artefact for detection: `python -m scripts.export ckpt=... [group=option] [key=value]`.

    python -m scripts.export ckpt=runs/<run>/checkpoints/best.ckpt format=cuda_graph precision=bf16
    python -m scripts.export ckpt=runs/<run>/checkpoints/best.ckpt format=aoti buckets=[[800,1333],[1333,800]]
    python -m scripts.export ckpt=runs/<run>/checkpoints/best.ckpt format=onnx out=artefacts/detector

Every artefact carries a certificate: how far its programs are from the eager detector. `configs/export.yaml` explains
all keys.
"""

import sys
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from models.environment import silence_dependencies
from models.export.buckets import Size, buckets_for, check_buckets
from models.export.build import export_detector
from models.export.certificate import Tolerance
from models.export.recipe import Precision, Recipe, Source, read_source, source_of

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="export")
def main(cfg: DictConfig) -> None:
    """Exports one checkpoint."""
    silence_dependencies()
    try:
        run_export(cfg)
    except ValueError as error:
        sys.exit(f"error: {error}")
    except InstantiationException as error:
        if not isinstance(error.__cause__, ValueError):
            raise
        sys.exit(f"error: {error.__cause__}")


def run_export(cfg: DictConfig) -> None:
    """Reads the source, writes the artefact and says what its certificate found.

    Raises:
        ValueError: if settings, weights and machine do not fit together, or a program does not keep the tolerance.
    """
    for name in ("batch_size", "size_divisor"):
        if not (isinstance(cfg[name], int) and cfg[name] >= 1):
            raise ValueError(f"{name} must be a whole number from 1 on, got {cfg[name]}; set for example {name}=64")
    precision = Precision.from_config(cfg.precision)
    writer = instantiate(cfg.format.writer)
    source = _find_source(cfg)
    folder = Path(cfg.out)
    manifest = export_detector(
        source,
        writer,
        folder,
        precision=precision,
        backend=cfg.op.backend,
        fused=cfg.op.fused,
        buckets=_choose_buckets(cfg, source.recipe),
        size_divisor=cfg.size_divisor,
        batch_size=cfg.batch_size,
        tolerance=Tolerance(**cfg.tolerance[precision.name]),
    )
    for each in manifest.certificate["measurements"]:
        height, width = each["bucket"]
        found = each["difference"]
        words = "bitwise" if found["bitwise_equal"] else "scores {score:.1e}, boxes {box_px:.1e} px".format(**found)
        print(f"bucket {height}x{width} against eager {precision.name}: {words}")
    print(f"wrote {folder}, made of weights {manifest.weights_hash}")


def _find_source(cfg: DictConfig) -> Source:
    """Reads the checkpoint of train.py, or other weights with the composed configuration."""
    if (cfg.ckpt is None) == (cfg.model.weights is None):
        raise ValueError("ckpt or model.weights must be given, one of them; set ckpt=runs/<run>/checkpoints/best.ckpt")
    if cfg.ckpt is not None:
        return read_source(cfg.ckpt)
    datamodule = instantiate(cfg.data)
    datamodule.check()
    categories = [{"id": category.id, "name": category.name} for category in datamodule.categories]
    cfg.num_classes = len(categories)
    config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    return source_of(Recipe.from_config(config, categories), cfg.model.weights)


def _choose_buckets(cfg: DictConfig, recipe: Recipe) -> tuple[Size, ...]:
    if cfg.buckets is None:
        return buckets_for(recipe.size, recipe.max_size, cfg.size_divisor)
    return check_buckets(cfg.buckets, cfg.size_divisor)


if __name__ == "__main__":
    main()
