"""What a run ran on: versions, hardware, commit; and the switch for TF32."""

import importlib.metadata
import logging
import os
import platform
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("triton-detr", "torch", "torchvision", "triton", "lightning", "hydra-core", "pycocotools", "numpy", "scipy")


def package_versions() -> dict[str, str]:
    """Returns the installed version of each package that a result depends on, or "not installed"."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def source_commit() -> dict[str, Any]:
    """Returns the checkout's commit and whether files differ from it.

    For a copy of the sources outside its checkout (on a cluster, say) the environment variable TRITON_DETR_COMMIT tells
    the commit, and `dirty` is None; without it both are.
    """
    if told := os.environ.get("TRITON_DETR_COMMIT"):
        return {"commit": told, "dirty": None}
    root = Path(__file__).resolve().parent.parent
    git = ["git", "-C", str(root)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": bool(status.strip())}


def running_command() -> str:
    """Returns the command line that runs, without the folder of the installation: `-m package.module` for a module."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = Path(sys.argv[0]).name if spec is None else f"-m {spec.name.removesuffix('.__main__')}"
    return " ".join(["python", program, *sys.argv[1:]])


def describe_environment() -> dict[str, Any]:
    """Describes software, hardware and source of the running process, ready for JSON."""
    return {
        "command": running_command(),
        "python": platform.python_version(),
        "packages": package_versions(),
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "cpu_threads": torch.get_num_threads(),
        "cpu_cores": os.cpu_count(),
        "tf32": {"matmul": torch.backends.cuda.matmul.allow_tf32, "cudnn": torch.backends.cudnn.allow_tf32},
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        **source_commit(),
    }


def allow_tf32(allowed: bool) -> None:
    """Lets float32 matrix products and convolutions use TF32, or forbids both.

    PyTorch's own defaults differ between the two (convolutions yes, products no), so that "fp32" would not be fp32.
    """
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def silence_dependencies() -> None:
    """Hides messages of dependencies that a user cannot act on; everything else stays visible."""
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")  # inside Lightning
    warnings.filterwarnings("ignore", message=r"The '\w+' does not have many workers")  # data.num_workers is explicit
    warnings.filterwarnings("ignore", message=r"The number of training batches \(\d+\) is smaller than the logging")
    warnings.filterwarnings("ignore", message=r"You're resuming from a checkpoint that ended before")  # ours can
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(lambda record: not record.getMessage().startswith("💡"))  # advertisements
