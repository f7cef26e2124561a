"""What a run ran on: versions, hardware, commit; and the switch for TF32."""

import importlib.metadata
import logging
import os
import platform
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

PACKAGES = ("triton-detr", "torch", "torchvision", "triton", "lightning", "hydra-core", "pycocotools", "numpy", "scipy")
_NEEDLESS = (
    "💡",  # advertisements
    "GPU available: ",  # the first panel names the device
    "TPU available: ",
    "Loading `train_dataloader` to estimate",
    "`weights_only` was not set",  # of a checkpoint that is written
)
"""How messages of Lightning begin that say nothing to a person."""
_TALKERS = (
    "lightning.pytorch.utilities.rank_zero",
    "lightning.fabric.utilities.rank_zero",
    "lightning.pytorch.trainer.connectors.checkpoint_connector",
)
"""Its loggers that they come from."""
_LONGEST_NAME = 200
"""Bytes; file systems take 255."""
_ABSOLUTE_PATH = re.compile(r"""(?:^|(?<=[=:,\[({"']))/(?!/)[^,\])}"']*""")


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


def running_command(*, without: tuple[str, ...] = ()) -> str:
    """Returns the command line that runs, quoted so that a shell takes it again.

    The folder of the installation is left out (`-m package.module` for a module), and so are arguments that begin with
    one of `without`.
    """
    return shlex.join([*_program(), *(word for word in sys.argv[1:] if not word.startswith(without))])


def cut_folders(words: Iterable[str]) -> list[str]:
    """Returns a command's words with absolute paths cut to their last component, for records that are passed on.

    A path counts at the beginning of a word, and behind `=`, `:`, a comma, a bracket or a quote: `--out /a/b.json`,
    `data.root=/a/b`, `files=[/a/b,/a/c]`; not behind `//`, as in an address.
    """
    return [_ABSOLUTE_PATH.sub(lambda found: Path(found[0]).name, word) for word in words]


def child_variables() -> dict[str, str]:
    """Returns variables for a process of ours: from any folder it finds this project, and what this one was given."""
    root = Path(__file__).resolve().parents[1]
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    path = os.pathsep.join(dict.fromkeys([str(root), *map(os.path.abspath, given)]))
    return {**os.environ, "PYTHONPATH": path}


def relative_path(path: Path) -> str:
    """Returns a path as a person would type it: relative where it lies below the working folder."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _program() -> list[str]:
    """The words of the command that name the program."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return ["python", *([Path(sys.argv[0]).name] if spec is None else ["-m", spec.name.removesuffix(".__main__")])]


def describe_environment() -> dict[str, Any]:
    """Describes software, hardware and source of the running process, ready for JSON, without its folders."""
    return {
        "command": shlex.join([*_program(), *cut_folders(sys.argv[1:])]),
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


def name_folder(overrides: str, number: int) -> str:
    """Returns the folder of a job of a sweep: its overrides, or the beginning of many of them behind its number."""
    encoded = overrides.encode()
    if len(encoded) <= _LONGEST_NAME:
        return overrides
    return f"{number}_{encoded[:_LONGEST_NAME].decode(errors='ignore')}"


OmegaConf.register_new_resolver("name_folder", name_folder, replace=True)  # for configs/train.yaml


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
    warnings.filterwarnings("ignore", message=r"You requested to overfit but enabled train dataloader shuffling")
    warnings.filterwarnings("ignore", message=r"The dirpath has changed from")  # a resumed run has a folder of its own
    # Lightning prepares DistributedDataParallel on a stream of its own.
    warnings.filterwarnings("ignore", message=r"The AccumulateGrad node's stream does not match")
    for name in _TALKERS:
        logging.getLogger(name).addFilter(lambda record: not record.getMessage().startswith(_NEEDLESS))
