"""The folder that an export leaves: programs or weights, and a manifest that says what they are and where they hold.

manifest.json                     this module
weights.safetensors               cuda_graph
detector_<height>x<width>.pt2     aoti, a program a bucket
detector_<height>x<width>.onnx    onnx, a program a bucket
"""

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from models.environment import package_versions
from models.export.buckets import Size
from models.export.certificate import Measurement, Tolerance
from models.export.recipe import Precision, Recipe, Source

SCHEMA = 1
MANIFEST = "manifest.json"
PINNED_PACKAGES = {"cuda_graph": ("torch", "triton"), "aoti": ("torch", "triton"), "onnx": ()}
"""Packages of each format whose versions must be those of the export."""


@dataclass(frozen=True)
class Manifest:
    """What an artefact says of itself.

    Attributes:
        format: one of `PINNED_PACKAGES`.
        recipe: detector, preparation of its images, categories.
        precision: number format of its programs.
        backend: backend of the attention.
        fused: whether the op takes offsets and logits.
        device: "cuda" or "cpu".
        architecture: see `architecture_of`.
        packages: versions at the export.
        batch_size: images of a call.
        buckets: sizes that its programs take.
        size_divisor: sizes outside the buckets are rounded up to multiples of it (cuda_graph).
        settings: of the format.
        weights_hash: hash of the weights that it was made of.
        files: SHA-256 of each file.
        certificate: tolerance and measurements at the export.
        environment: software, hardware and source at the export.
    """

    format: str
    recipe: Recipe
    precision: Precision
    backend: str
    fused: bool
    device: str
    architecture: str
    packages: dict[str, str]
    batch_size: int
    buckets: tuple[Size, ...]
    size_divisor: int
    settings: dict[str, Any]
    weights_hash: str
    files: dict[str, str]
    certificate: dict[str, Any]
    environment: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Returns plain values, the schema's number first."""
        plain = dict(vars(self))
        plain["recipe"] = self.recipe.to_json()
        plain["precision"] = self.precision.to_json()
        plain["buckets"] = [list(bucket) for bucket in self.buckets]
        return {"schema": SCHEMA, **plain}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Manifest":
        """Reads what `to_json` wrote.

        Raises:
            ValueError: if it is of another schema, or incomplete.
        """
        if content.get("schema") != SCHEMA:
            raise ValueError(
                f"manifest must have schema {SCHEMA}, got {content.get('schema')}; export with this version of the code"
            )
        fields = {key: value for key, value in content.items() if key != "schema"}
        if fields.keys() != cls.__dataclass_fields__.keys():
            differing = sorted(fields.keys() ^ cls.__dataclass_fields__.keys())
            raise ValueError(
                f"manifest must have the keys of its schema, got others or too few: {differing}; export anew"
            )
        fields["recipe"] = Recipe.from_json(fields["recipe"])
        fields["precision"] = Precision.from_json(fields["precision"])
        fields["buckets"] = tuple((height, width) for height, width in fields["buckets"])
        return cls(**fields)


def make_certificate(tolerance: Tolerance, measurements: list[Measurement], *, needs_equality: bool) -> dict[str, Any]:
    """Returns the certificate of programs that keep the tolerance.

    Args:
        tolerance: of the differences from the eager detector.
        measurements: one a bucket.
        needs_equality: whether the numbers must be the same bits.

    Raises:
        ValueError: if a program does not keep it, or does not look at its input.
    """
    for each in measurements:
        name = f"the program of bucket {each.bucket[0]}x{each.bucket[1]}"
        if not each.depends_on_input:
            raise ValueError(f"{name} must depend on its input, got equal answers for two images; it is not usable")
        if needs_equality and not each.difference.bitwise_equal:
            raise ValueError(f"{name} must equal the eager detector bit for bit, got {each.difference}; report it")
        if not each.difference.within(tolerance):
            raise ValueError(
                f"{name} must keep {tolerance}, got {each.difference}; "
                "export in another precision, or say a tolerance that you can bear as tolerance.score, tolerance.box_px"
            )
    return {
        "against": "the eager detector of the same precision, on noise that fills the bucket and slopes with padding",
        "tolerance": vars(tolerance),
        "measurements": [each.to_json() for each in measurements],
    }


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest of a folder."""
    (folder / MANIFEST).write_text(json.dumps(manifest.to_json(), indent=2) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a folder and checks that the files are those that it was written for.

    Raises:
        ValueError: if there is none, or it or a file is not what the export wrote.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"artefact must be a folder with {MANIFEST}, got {str(folder)!r} without; export a checkpoint")
    try:
        content = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"manifest must be JSON, got {str(path)!r} ({error}); export anew") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"manifest must be a JSON object, got a {type(content).__name__} in {str(path)!r}; export anew"
        )
    manifest = Manifest.from_json(content)
    for name, expected in manifest.files.items():
        file = folder / name
        if not file.is_file() or hash_file(file) != expected:
            state = "another" if file.is_file() else "none"
            raise ValueError(
                f"{name} must be the file that the manifest was written for, got {state} in {str(folder)!r}; "
                "weights or programs are stale or damaged, export anew"
            )
    return manifest


def check_machine(manifest: Manifest, device: torch.device) -> None:
    """Checks that an artefact holds on this machine.

    Raises:
        ValueError: if device, architecture or versions differ from those of the export.
    """
    if manifest.format not in PINNED_PACKAGES:
        raise ValueError(f"format must be one of {', '.join(PINNED_PACKAGES)}, got {manifest.format!r}; export anew")
    if manifest.format == "onnx":
        return
    if device.type != manifest.device:
        raise ValueError(
            f"artefact must run on the device type of its export, {manifest.device}, got {device.type}; "
            "choose that device or export for this one"
        )
    if architecture_of(device) != manifest.architecture:
        raise ValueError(
            f"artefact must run on the architecture of its export, {manifest.architecture}, got "
            f"{architecture_of(device)}; export on this machine"
        )
    installed = package_versions()
    for package in PINNED_PACKAGES[manifest.format]:
        if installed[package] != manifest.packages[package]:
            raise ValueError(
                f"{package} must have the version of the export, {manifest.packages[package]}, got "
                f"{installed[package]}; install that version or export anew"
            )


def check_origin(manifest: Manifest, source: Source) -> None:
    """Checks that an artefact was made of a checkpoint's weights.

    Raises:
        ValueError: if it is stale.
    """
    if manifest.weights_hash != source.weights_hash:
        raise ValueError(
            f"artefact must be made of the given weights {source.weights_hash}, got one of {manifest.weights_hash}; "
            "it is stale, export the checkpoint anew"
        )


def architecture_of(device: torch.device) -> str:
    """Returns what compiled code depends on: "sm_90", or machine and vector instructions of a CPU."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm_{major}{minor}"
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def hash_file(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
