"""From a trained detector to an artefact with its certificate."""

import re
from pathlib import Path
from typing import Any, Protocol

import torch

from models.environment import allow_tf32, describe_environment, package_versions
from models.export.artefact import (
    MANIFEST,
    Manifest,
    architecture_of,
    hash_file,
    make_certificate,
    write_manifest,
)
from models.export.buckets import Size
from models.export.certificate import Tolerance, collect_answers, compare_answers
from models.export.cuda_graph import WEIGHTS_FILE
from models.export.inference import InferenceModule, Outputs
from models.export.recipe import Precision, Source, build_module

_PROGRAM = re.compile(r"detector_\d+x\d+\.(pt2|onnx|log)")


class Format(Protocol):
    """How programs are stored.

    Attributes:
        name: one of `models.export.artefact.PINNED_PACKAGES`.
        needs_equality: whether programs must equal the eager detector bit for bit.
        traces: whether a compiler makes programs of the eager detector, instead of recording what it runs.
        settings: for the manifest, plain values.
    """

    name: str
    needs_equality: bool
    traces: bool
    settings: dict[str, Any]

    @property
    def device(self) -> torch.device:
        """Where the programs run."""

    def check(self, precision: Precision, backend: str) -> None:
        """Refuses, as ValueError, what the format cannot hold."""

    def write(
        self, source: Source, module: InferenceModule, buckets: tuple[Size, ...], batch_size: int, folder: Path
    ) -> dict[Size, list[Outputs]]:
        """Writes files into a folder, and returns what the program of each bucket, loaded from them, answers.

        To the inputs, and in the order, of `models.export.certificate.collect_answers`.
        """


def export_detector(
    source: Source,
    format: Format,
    folder: Path,
    *,
    precision: Precision,
    backend: str,
    fused: bool,
    buckets: tuple[Size, ...],
    size_divisor: int,
    batch_size: int,
    tolerance: Tolerance,
) -> Manifest:
    """Writes an artefact.

    Args:
        source: recipe and weights.
        format: how programs are stored.
        folder: new, empty or an artefact, which is replaced.
        precision: number format; sets the process's switch for TF32.
        backend: backend of the attention, one of `msda_op.BACKENDS`.
        fused: whether the op takes offsets and logits.
        buckets: heights and widths of the programs.
        size_divisor: sizes outside the buckets are rounded up to multiples of it.
        batch_size: images of a call.
        tolerance: of the differences from the eager detector.

    Returns:
        The manifest, which has been written last: an interrupted export leaves a folder that no loader takes.

    Raises:
        ValueError: if the format cannot hold this detector, the folder holds something else, or a program does not
            keep the tolerance, or crashes.
    """
    format.check(precision, backend)
    _clear(folder)
    allow_tf32(precision.allow_tf32)
    module = build_module(
        source, precision=precision, backend=backend, fused=fused, device=format.device, traced=format.traces
    )
    measurements = []
    for bucket, answers in format.write(source, module, buckets, batch_size, folder).items():
        expected = collect_answers(module, bucket, batch_size, format.device)
        measurements.append(compare_answers(expected, answers, bucket, tolerance.min_score))
    manifest = Manifest(
        format=format.name,
        recipe=source.recipe,
        precision=precision,
        backend=backend,
        fused=fused,
        device=format.device.type,
        architecture=architecture_of(format.device),
        packages=package_versions(),
        batch_size=batch_size,
        buckets=buckets,
        size_divisor=size_divisor,
        settings=format.settings,
        weights_hash=source.weights_hash,
        files={file.name: hash_file(file) for file in sorted(folder.iterdir())},
        certificate=make_certificate(tolerance, measurements, needs_equality=format.needs_equality),
        environment=describe_environment(),
    )
    write_manifest(folder, manifest)
    return manifest


def _clear(folder: Path) -> None:
    """Makes a folder, and removes what an earlier export left in it."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out must be a folder, got the file {str(folder)!r}; choose another")
    folder.mkdir(parents=True, exist_ok=True)
    strangers = [
        file.name
        for file in folder.iterdir()
        if file.name not in (MANIFEST, WEIGHTS_FILE) and not _PROGRAM.fullmatch(file.name)
    ]
    if strangers:
        raise ValueError(
            f"out must be a new folder or an artefact, got {str(folder)!r} with {', '.join(sorted(strangers)[:3])}; "
            "choose another"
        )
    for file in folder.iterdir():
        file.unlink()
