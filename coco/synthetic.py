"""A deterministic COCO-format data set of drawn shapes, written once into a cache folder and read like COCO itself."""

import hashlib
import json
import logging
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from pycocotools import mask as coco_mask

from coco.shapes import SHAPES, SceneObject, draw_scene

GENERATOR_VERSION = 4
"""Part of the folder's name: raise it with every change of what is drawn."""

CATEGORY_IDS = (1, 2, 5, 7, 10, 20)
"""Ids with gaps, as in COCO, so that the mapping to contiguous labels is always exercised."""

SPLITS = ("train", "val")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SyntheticSpec:
    """What identifies a synthetic data set.

    Attributes:
        num_train: Number of training images.
        num_val: Number of validation images.
        image_size: Longer side of each image in pixels, at least 32; the shorter side is 75 to 100 % of it.
        seed: Seed of the drawing.
    """

    num_train: int
    num_val: int
    image_size: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("num_train", "num_val"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}; ask for one image or more")
        if self.image_size < 32:
            raise ValueError(f"image_size must be at least 32 pixels, got {self.image_size}; ask for larger images")

    @property
    def folder_name(self) -> str:
        """A name that changes with any parameter and with the generator."""
        text = json.dumps({"version": GENERATOR_VERSION, **asdict(self)}, sort_keys=True)
        return f"shapes_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def write_synthetic_dataset(spec: SyntheticSpec, cache_dir: Path) -> Path:
    """Writes the data set unless it is there already.

    The folder holds `train/`, `val/` and `annotations/instances_{train,val}.json`. It is written aside and renamed when
    complete: an interrupted run leaves nothing behind that looks finished, and of several processes writing at once
    the first to finish wins, with the same bytes.

    Args:
        spec: What to draw.
        cache_dir: Folder of all synthetic data sets; created if absent.

    Returns:
        The data set's folder.
    """
    target = cache_dir / spec.folder_name
    if target.is_dir():
        return target
    logger.info("Drawing %d synthetic images into %s", spec.num_train + spec.num_val, target)
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{spec.folder_name}.", dir=cache_dir) as aside_name:
        aside = Path(aside_name) / spec.folder_name
        (aside / "annotations").mkdir(parents=True)
        for split, num_images in zip(SPLITS, (spec.num_train, spec.num_val), strict=True):
            _write_split(spec, split, num_images, aside)
        try:
            aside.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    return target


def _write_split(spec: SyntheticSpec, split: str, num_images: int, folder: Path) -> None:
    """Writes the images of one split and its annotation file."""
    (folder / split).mkdir()
    images: list[dict[str, object]] = []
    annotations: list[dict[str, object]] = []
    for image_id in range(1, num_images + 1):
        rng = np.random.default_rng((spec.seed, SPLITS.index(split), image_id))
        shorter = int(rng.integers(3 * spec.image_size // 4, spec.image_size + 1))
        height, width = (spec.image_size, shorter) if rng.random() < 0.5 else (shorter, spec.image_size)
        pixels, objects = draw_scene(rng, height, width)
        file_name = f"{image_id:012d}.jpg"
        Image.fromarray(pixels).save(folder / split / file_name, quality=92)
        images.append({"id": image_id, "file_name": file_name, "height": height, "width": width})
        for item in objects:
            annotations.append(_annotate(item, len(annotations) + 1, image_id))
    content = {
        "info": {"description": f"Synthetic shapes, generator {GENERATOR_VERSION}, {asdict(spec)}"},
        "categories": [
            {"id": category_id, "name": shape.name, "supercategory": "shape"}
            for category_id, shape in zip(CATEGORY_IDS, SHAPES, strict=True)
        ],
        "images": images,
        "annotations": annotations,
    }
    (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))


def _annotate(item: SceneObject, annotation_id: int, image_id: int) -> dict[str, object]:
    """A COCO annotation; box, area and segmentation are those of the visible part, as in COCO."""
    rows, columns = np.flatnonzero(item.visible.any(axis=1)), np.flatnonzero(item.visible.any(axis=0))
    run_lengths = coco_mask.encode(np.asfortranarray(item.visible, dtype=np.uint8))
    return {
        "id": annotation_id,
        "image_id": image_id,
        "category_id": CATEGORY_IDS[item.label],
        "iscrowd": int(item.is_crowd),
        "area": int(item.visible.sum()),
        "bbox": [
            int(columns[0]),
            int(rows[0]),
            int(columns[-1] - columns[0] + 1),
            int(rows[-1] - rows[0] + 1),
        ],
        "segmentation": {"size": run_lengths["size"], "counts": run_lengths["counts"].decode("ascii")},
    }
