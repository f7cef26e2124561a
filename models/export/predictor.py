"""Detections of images of any size, from an artefact or a checkpoint."""

from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from models.environment import allow_tf32
from models.export import aoti, onnx
from models.export.artefact import Manifest, check_machine, check_origin, read_manifest
from models.export.buckets import Size, buckets_for, choose_bucket, pad_images, round_up
from models.export.certificate import Program
from models.export.cuda_graph import WEIGHTS_FILE, GraphedDetector
from models.export.inference import Outputs
from models.export.recipe import Precision, Recipe, Source, build_module, read_source
from models.structures import Detections
from models.weight_hash import hash_weights


class Predictor:
    """Pads images to a bucket, runs the program, and takes the detections apart.

    Attributes:
        recipe: how images are resized before, and the categories of the labels.
        batch_size: images of a call at most.
    """

    def __init__(
        self,
        program: Program,
        *,
        recipe: Recipe,
        buckets: tuple[Size, ...],
        batch_size: int,
        fills_batch: bool,
        size_divisor: int | None,
        input_device: torch.device,
    ) -> None:
        """Puts the parts together; `load_predictor` does it for a file.

        Args:
            program: maps batches to detections.
            recipe: of the detector.
            buckets: sizes of the batches.
            batch_size: images of a call at most.
            fills_batch: whether every call needs batch_size images; the last one is filled up with copies.
            size_divisor: images that no bucket holds are padded to multiples of it; None refuses them.
            input_device: where the program takes its inputs.
        """
        self.recipe = recipe
        self.batch_size = batch_size
        self._program = program
        self._buckets = buckets
        self._fills_batch = fills_batch
        self._size_divisor = size_divisor
        self._input_device = input_device

    def place(self, size_hw: Size) -> Size:
        """Returns the size that an image, already resized, is padded to; images of one size make a batch.

        Raises:
            ValueError: if no program takes it.
        """
        bucket = choose_bucket(size_hw, self._buckets)
        if bucket is not None:
            return bucket
        if self._size_divisor is None:
            raise ValueError(
                f"image must fit a bucket of {list(self._buckets)} after the resize, got {size_hw[0]}x{size_hw[1]}; "
                "export with a bucket that holds it"
            )
        return round_up(size_hw, self._size_divisor)

    @torch.no_grad()
    def __call__(self, images: Sequence[Tensor], original_sizes_hw: Sequence[Size]) -> Detections:
        """Detects objects in a batch.

        Args:
            images: uint8 [3, H, W] each, RGB, resized as the recipe says; 1 to batch_size of them, of one `place`.
            original_sizes_hw: (height, width) of each image before the resize.

        Returns:
            The detections, one row an image.

        Raises:
            ValueError: if there are too many images or none, or they do not share a place.
        """
        if not 1 <= len(images) <= self.batch_size:
            raise ValueError(f"images must be 1 to {self.batch_size}, got {len(images)}; split them")
        places = {self.place((image.shape[1], image.shape[2])) for image in images}
        if len(places) > 1:
            raise ValueError(f"images must share a place, got {sorted(places)}; sort them by Predictor.place")
        rows = self.batch_size if self._fills_batch else len(images)
        batch, sizes_hw = pad_images(images, places.pop(), rows)
        filling = [original_sizes_hw[0]] * (rows - len(images))
        originals = torch.tensor([*original_sizes_hw, *filling])
        outputs = self._program(*(tensor.to(self._input_device) for tensor in (batch, sizes_hw, originals)))
        scores, labels, boxes_xyxy = (tensor[: len(images)] for tensor in outputs)
        return Detections(scores, labels, boxes_xyxy)


class BucketPrograms:
    """The programs of all buckets as one."""

    def __init__(self, programs: dict[Size, Program]) -> None:
        self._programs = programs

    def __call__(self, images: Tensor, sizes_hw: Tensor, original_sizes_hw: Tensor) -> Outputs:
        """Runs the program of the images' bucket."""
        return self._programs[images.shape[2], images.shape[3]](images, sizes_hw, original_sizes_hw)


def load_predictor(
    path: Path, *, device: torch.device, precision: Precision, backend: str, batch_size: int, size_divisor: int
) -> Predictor:
    """Loads a checkpoint of `train.py`, to be run eagerly.

    Args:
        path: the file.
        device: where it runs.
        precision: number format; sets the process's switch for TF32.
        backend: backend of the attention, one of `msda_op.BACKENDS`.
        batch_size: images of a call at most.
        size_divisor: images are padded to multiples of it.

    Raises:
        ValueError: if the file is no such checkpoint.
    """
    source = read_source(path)
    allow_tf32(precision.allow_tf32)
    recipe = source.recipe
    return Predictor(
        build_module(source, precision=precision, backend=backend, fused=True, device=device, traced=False),
        recipe=recipe,
        buckets=buckets_for(recipe.size, recipe.max_size, size_divisor),
        batch_size=batch_size,
        fills_batch=False,
        size_divisor=size_divisor,
        input_device=device,
    )


def load_artefact(folder: Path, *, device: torch.device, origin: Source | None) -> Predictor:
    """Loads an artefact after checking that it holds here.

    Args:
        folder: as `models.export.build.export_detector` left it.
        device: where it is to run; ONNX runs on the CPU in any case.
        origin: a checkpoint that it must have been made of; None asks for none.

    Raises:
        ValueError: if files, versions, architecture or weights are not those of the export.
    """
    manifest = read_manifest(folder)
    check_machine(manifest, device)
    if origin is not None:
        check_origin(manifest, origin)
    allow_tf32(manifest.precision.allow_tf32)
    return Predictor(
        _load_program(manifest, folder, device),
        recipe=manifest.recipe,
        buckets=manifest.buckets,
        batch_size=manifest.batch_size,
        fills_batch=True,
        size_divisor=manifest.size_divisor if manifest.format == "cuda_graph" else None,
        input_device=device if manifest.format == "aoti" else torch.device("cpu"),
    )


def _load_program(manifest: Manifest, folder: Path, device: torch.device) -> Program:
    if manifest.format == "onnx":
        return BucketPrograms(onnx.load_programs(folder, manifest.buckets, manifest.batch_size))
    if manifest.format == "aoti":
        return BucketPrograms(aoti.load_programs(folder, manifest.buckets, manifest.batch_size))
    weights = safetensors.torch.load_file(folder / WEIGHTS_FILE)
    if hash_weights(weights) != manifest.weights_hash:
        raise ValueError(
            f"{WEIGHTS_FILE} must hold the weights of the manifest, got others; they are stale, export anew"
        )
    module = build_module(
        Source(manifest.recipe, weights, manifest.weights_hash),
        precision=manifest.precision,
        backend=manifest.backend,
        fused=manifest.fused,
        device=device,
        traced=False,
    )
    return GraphedDetector(module, buckets=manifest.buckets, batch_size=manifest.batch_size, **manifest.settings)
