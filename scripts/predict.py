"""Detects objects in images: `python -m scripts.predict SOURCE --model MODEL [--out FOLDER]`.

    python -m scripts.predict photo.jpg --model runs/<run>/checkpoints/best.ckpt
    python -m scripts.predict photos/ --model artefacts/onnx --out found
    python -m scripts.predict "photos/2024-*.jpg" --model artefacts/cuda_graph
    python -m scripts.predict val2017/ --model artefacts/aoti --annotations instances_val2017.json
    python -m scripts.predict val2017/ --model artefacts/onnx --compare found_by_the_checkpoint/detections.json

SOURCE is an image, a folder (searched with its subfolders for files that end like images) or a glob pattern in quotes.
MODEL is an artefact of `scripts.export` or a checkpoint of `train.py`. The output folder gets `detections.json`, COCO's
results format with each image's file name added, and `pictures/`, the images with labelled boxes under their names.
A camera's orientation tag (EXIF) is applied. A file that cannot be read is named and skipped.

Exit status: 0, or 1 where a file was skipped, nothing was found to read, or the model could not be loaded.
"""

import argparse
import glob
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from PIL import Image
from pycocotools.coco import COCO
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors

import msda_op
from coco.annotations import Category, read_annotations
from coco.callbacks import LOGGED_METRICS
from coco.drawing import DrawnBox, draw_boxes
from coco.evaluator import CocoEvaluator, ImageDetections
from coco.images import RGB, read_image_rgb
from coco.transforms import evaluation_transform
from models.environment import silence_dependencies
from models.export.agreement import Row, compare_results, describe_difference, read_results
from models.export.predictor import Predictor, load_artefact, load_predictor
from models.export.programs import choose_device
from models.export.recipe import Precision, Recipe, read_source
from models.preflight import match_categories

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
RESULTS = "detections.json"
PICTURES = "pictures"
SIZE_DIVISOR = 64
"""The coarsest level's stride: padded to multiples of it, an image keeps its boxes."""


Skip = Callable[[Path, str], None]
"""Names a file that is left out, and why."""


@dataclass(frozen=True)
class LoadedImage:
    """A file that was read, or the reason why it was not.

    Attributes:
        path: the file.
        pixels: uint8 [H, W, 3], upright; nothing where there is a problem.
        resized: uint8 [3, h, w], as the detector wants it.
        problem: why there are no pixels, empty if there are.
    """

    path: Path
    pixels: RGB
    resized: Tensor
    problem: str = ""


class ImageFiles(Dataset[LoadedImage]):
    """Reads and resizes files; one that cannot be read becomes its problem.

    Args:
        paths: The files.
        sizes_hw: Recorded (height, width) of the files that an annotation file lists, which decide about orientation.
        recipe: Says how large the detector wants them.
    """

    def __init__(self, paths: Sequence[Path], sizes_hw: Mapping[Path, tuple[int, int]], recipe: Recipe) -> None:
        self._paths = paths
        self._sizes_hw = sizes_hw
        self._resize = evaluation_transform(size=recipe.size, max_size=recipe.max_size)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> LoadedImage:
        path = self._paths[index]
        try:
            pixels = read_image_rgb(path, self._sizes_hw.get(path))
        except (ValueError, SyntaxError, Image.DecompressionBombError) as error:  # what Pillow's decoders raise
            return LoadedImage(path, np.zeros((0, 0, 3), np.uint8), torch.zeros(3, 0, 0), str(error))
        image = tv_tensors.Image(torch.from_numpy(pixels).permute(2, 0, 1))
        resized, _ = self._resize(image, {})
        return LoadedImage(path, pixels, resized.as_subclass(Tensor))


class Painter:
    """Draws boxes into pictures, JPEG files of the size and under the names of the images.

    The folders of the images are kept from the deepest one on that holds all of them, so that no picture takes the
    place of another.

    Args:
        folder: Where the pictures go.
        paths: All images.
        names: Of the classes.
        min_score: Lowest score of a box that is drawn.
    """

    def __init__(self, folder: Path, paths: Sequence[Path], names: Sequence[str], min_score: float) -> None:
        self._folder = folder
        self._root = os.path.commonpath([path.parent for path in paths])
        self._names = names
        self._min_score = min_score

    def __call__(self, image: LoadedImage, found: ImageDetections) -> None:
        """Draws the picture of an image."""
        rows = zip(found.scores.tolist(), found.labels.tolist(), found.boxes_xyxy.tolist(), strict=True)
        boxes = [
            DrawnBox(tuple(box), label, f"{self._names[label]} {score:.2f}")
            for score, label, box in rows
            if score >= self._min_score
        ]
        target = self._folder / image.path.relative_to(self._root)
        if target.suffix.lower() not in (".jpg", ".jpeg"):
            target = target.with_name(f"{target.name}.jpg")
        target.parent.mkdir(parents=True, exist_ok=True)
        draw_boxes(Image.fromarray(image.pixels), boxes).save(target, quality=92)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit status."""
    options = build_parser().parse_args(arguments)
    console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    silence_dependencies()
    try:
        predictor = load_model(options)
        annotations = COCO() if options.annotations is None else read_annotations(options.annotations, None)
        expected = None if options.compare is None else read_results(options.compare)
        paths = find_images(options.source)
        entries = list_entries(paths, annotations)
        categories = find_categories(predictor.recipe, annotations, options.model)
        make_folder(options.out)
    except ValueError as error:
        console.print(f"error: {error}", style="red")
        return 1
    skipped: list[Path] = []
    names = [category["name"] for category in predictor.recipe.categories]
    paint = None if options.no_pictures else Painter(options.out / PICTURES, paths, names, options.score)

    def skip(path: Path, reason: str) -> None:
        console.print(f"skipped {path}: {reason}", style="yellow")
        skipped.append(path)

    evaluator = CocoEvaluator(annotations=annotations, categories=categories)
    sizes_hw = {path: (entry["height"], entry["width"]) for path, entry in entries.items() if "height" in entry}
    loader = DataLoader(ImageFiles(paths, sizes_hw, predictor.recipe), batch_size=None, num_workers=options.workers)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("images", total=len(paths))
        for batch in draw_batches(loader, predictor, skip):
            predict_batch(batch, predictor, evaluator, entries, paint, skip)
            progress.update(task, completed=len(evaluator.detections) + len(skipped))
        progress.update(task, completed=len(paths))
    file_names = {entry["id"]: str(path) for path, entry in entries.items()}
    rows = [{**row, "file_name": file_names[row["image_id"]]} for row in evaluator.coco_results()]
    (options.out / RESULTS).write_text(json.dumps(rows) + "\n")
    done = len(evaluator.detections)
    pictures = "" if paint is None or not done else f", pictures in {options.out / PICTURES}"
    console.print(f"{done} images, {len(skipped)} skipped; detections in {options.out / RESULTS}{pictures}")
    if options.annotations is not None and done:
        metrics = evaluator.evaluate().metrics
        print("  ".join(f"{name} {100 * metrics[name]:.2f}" for name in LOGGED_METRICS))
    return 1 if skipped or not done or not report_agreement(expected, rows, console) else 0


def report_agreement(expected: Sequence[Row] | None, rows: Sequence[Row], console: Console) -> bool:
    """Prints how far the detections are from expected ones, if there are any; returns whether they can be compared."""
    if expected is None:
        return True
    try:
        print(describe_difference(compare_results(expected, rows)))
    except ValueError as error:
        console.print(f"error: {error}", style="red")
        return False
    return True


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.predict", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="image, folder or glob pattern")
    parser.add_argument("--model", type=Path, required=True, help="artefact or checkpoint")
    parser.add_argument("--out", type=Path, default=Path("predictions"), help="folder of the results")
    parser.add_argument("--score", type=parse_score, default="0.3", help="lowest score of a box in a picture, 0..1")
    parser.add_argument("--no-pictures", action="store_true", help="write the detections alone")
    parser.add_argument("--annotations", type=Path, help="COCO file that gives image ids; prints the AP too")
    parser.add_argument("--compare", type=Path, help="earlier detections of the same images; prints the differences")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument(
        "--workers", type=partial(parse_count, 0), default="2", help="processes that read images; 0 reads in this one"
    )
    parser.add_argument("--made-of", type=Path, help="refuse an artefact that was not made of this checkpoint")
    checkpoint = parser.add_argument_group("for a checkpoint (an artefact has them inside)")
    checkpoint.add_argument("--batch-size", type=partial(parse_count, 1))
    checkpoint.add_argument("--precision", choices=PRECISIONS)
    checkpoint.add_argument("--op", choices=msda_op.BACKENDS)
    return parser


def parse_count(least: int, text: str) -> int:
    """Reads a whole number that may not be too small."""
    if not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"number must be a whole one from {least} on, got {text!r}; correct it")
    return int(text)


def parse_score(text: str) -> float:
    """Reads a score, a number from 0 to 1."""
    if not 0 <= float(text) <= 1:
        raise argparse.ArgumentTypeError(f"score must be a number from 0 to 1, got {text!r}; pass for example 0.3")
    return float(text)


def make_folder(folder: Path) -> None:
    """Makes the folder of the results.

    Raises:
        ValueError: If there is a file in its place, or it cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"out must be a folder that can be made, got {str(folder)!r} ({error}); choose another"
        ) from error


def load_model(options: argparse.Namespace) -> Predictor:
    """Loads the artefact or the checkpoint that the command line names.

    Raises:
        ValueError: If it cannot be loaded here, or an option does not belong to it.
    """
    device = choose_device(options.device)
    given = {"--batch-size": options.batch_size, "--precision": options.precision, "--op": options.op}
    if options.model.is_dir():
        strangers = [name for name, value in given.items() if value is not None]
        if strangers:
            raise ValueError(f"{', '.join(strangers)} must come with a checkpoint, got an artefact; leave it out")
        origin = None if options.made_of is None else read_source(options.made_of)
        return load_artefact(options.model, device=device, origin=origin)
    if options.made_of is not None:
        raise ValueError("--made-of must come with an artefact, got a checkpoint; leave it out")
    name = options.precision or PRECISIONS[0]
    precision = cast(DictConfig, OmegaConf.load(CONFIGS / "precision" / f"{name}.yaml"))
    backend = options.op or msda_op.BACKENDS[0]
    try:
        msda_op.require_backend(backend, device.type)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    return load_predictor(
        options.model,
        device=device,
        precision=Precision.from_config({str(key): value for key, value in precision.items()}),
        backend=backend,
        batch_size=options.batch_size or 1,
        size_divisor=SIZE_DIVISOR,
    )


def find_images(source: str) -> list[Path]:
    """Returns the files that SOURCE means, in order of their names.

    Raises:
        ValueError: If there is none.
    """
    if Path(source).is_dir():
        endings = {ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN}
        found = [path for path in Path(source).rglob("*") if path.suffix.lower() in endings]
    elif Path(source).is_file():
        found = [Path(source)]
    else:
        found = [Path(name) for name in glob.glob(source, recursive=True)]
    files = sorted(path for path in found if not path.is_dir())  # a link to nowhere too, to be named
    if not files:
        raise ValueError(f"source must be an image, a folder with images or a pattern that some match, got {source!r}")
    return files


def list_entries(paths: Sequence[Path], annotations: COCO) -> dict[Path, dict[str, Any]]:
    """Returns the annotation file's entry of each image, or numbers the images from 1 where there is no such file.

    Raises:
        ValueError: If an image is not listed.
    """
    if not annotations.dataset:
        return {path: {"id": number} for number, path in enumerate(paths, start=1)}
    by_name = {Path(entry["file_name"]).name: entry for entry in annotations.dataset["images"]}
    strangers = [str(path) for path in paths if path.name not in by_name]
    if strangers:
        raise ValueError(
            f"images must be listed in the annotation file, got {len(strangers)} others, e.g. {strangers[0]}; "
            "narrow SOURCE or leave --annotations out"
        )
    return {path: by_name[path.name] for path in paths}


def find_categories(recipe: Recipe, annotations: COCO, model: Path) -> tuple[Category, ...]:
    """Returns the category of each class: of the annotation file, by name, or of the detector's training without one.

    Raises:
        ValueError: If the annotation file has categories of other names.
    """
    rows = recipe.categories
    if annotations.dataset:
        found = annotations.dataset["categories"]
        advice = "give an annotation file with categories of these names or leave --annotations out"
        rows = [found[place] for place in match_categories(rows, found, source=str(model), advice=advice)]
    return tuple(Category(each["id"], each["name"]) for each in rows)


def draw_batches(images: Iterable[LoadedImage], predictor: Predictor, skip: Skip) -> Iterator[list[LoadedImage]]:
    """Sorts images by the size that they are padded to, and yields what fills a batch, in the end the rest."""
    waiting: dict[tuple[int, int], list[LoadedImage]] = defaultdict(list)
    for image in images:
        if image.problem:
            skip(image.path, image.problem)
            continue
        try:
            place = predictor.place((image.resized.shape[1], image.resized.shape[2]))
        except ValueError as error:
            skip(image.path, str(error))
            continue
        waiting[place].append(image)
        if len(waiting[place]) == predictor.batch_size:
            yield waiting.pop(place)
    yield from waiting.values()


def predict_batch(
    batch: Sequence[LoadedImage],
    predictor: Predictor,
    evaluator: CocoEvaluator,
    entries: Mapping[Path, Mapping[str, Any]],
    paint: Painter | None,
    skip: Skip,
) -> None:
    """Detects, collects, and draws the pictures; a batch that the detector refuses is skipped."""
    ids = [entries[image.path]["id"] for image in batch]
    try:
        detections = predictor([image.resized for image in batch], [image.pixels.shape[:2] for image in batch])
        evaluator.update(ids, detections)
    except ValueError as error:
        for image in batch:
            skip(image.path, str(error))
        return
    if paint is not None:
        for image, image_id in zip(batch, ids, strict=True):
            paint(image, evaluator.detections[image_id])


if __name__ == "__main__":
    sys.exit(main())
