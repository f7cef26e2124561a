"""Arms of a comparison: one configuration, seed and op each; two arms of a comparison differ in the op alone."""

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from torch import nn

import msda_op
from models.environment import package_versions
from models.layers.ms_deform_attn import MSDeformAttn
from models.preflight import check_run, device_type
from parity.faults import find_fault

ROOT = Path(__file__).resolve().parent.parent
OPS = ("triton", "reference", "cuda")

# Groups of the configuration that training does not depend on: names, folders, margins.
_UNRELATED = ("op", "against", "output", "export", "import", "run_dir", "parity", "logger", "callbacks", "mode")
# What training runs through: an arm that was recorded with other code is recorded again.
_TRAINING_SOURCES = (
    "msda_op",
    "models",
    "coco",
    "parity/arms.py",
    "parity/faults.py",
    "parity/interception.py",
    "parity/training.py",
    "parity/recording.py",
)


@dataclass(frozen=True)
class Arm:
    """One training run.

    Args:
        name: as in the report: A, A' (A again), A+1 (A from weights one unit in the last place away), B (other op).
        op: backend of the op, one of `OPS`.
        seed: of initial weights, data order, augmentation and dropout.
        repeat: tells apart runs that are equal in everything else.
        nudge: seed of the direction in which each initial weight, and in half precision each output of the op, moves by
            one unit in the last place; 0 moves none.
        fault: name of a fault of `parity.faults` that the op is given; None for a sound op.
        fault_size: share of the whole fault, in 0..1.
        trained_steps: how long the weights it starts from were trained, with the op that is compared with; 0 for
            initial weights.
    """

    name: str
    op: str
    seed: int
    repeat: int = 0
    nudge: int = 0
    fault: str | None = None
    fault_size: float = 0.0
    trained_steps: int = 0


@dataclass(frozen=True)
class Experiment:
    """What all arms share, and the configuration for each of the two ops.

    Args:
        op: the op under test.
        against: the op that it is compared with.
        configs: composed configuration by op.
        device: where arms train.
        output: folder of the results.
    """

    op: str
    against: str
    configs: Mapping[str, DictConfig]
    device: torch.device
    output: Path

    @property
    def settings(self) -> DictConfig:
        """Steps, sizes and margins of the levels."""
        return self.configs[self.against].parity

    @property
    def seed(self) -> int:
        """Seed of the arms of a single comparison, and first one of an ensemble."""
        return int(self.configs[self.against].seed)

    @property
    def fault(self) -> str | None:
        """Fault that the op under test is given on purpose (`parity.fault`, spaces as underscores); None for none.

        Raises:
            ValueError: if there is no such fault.
        """
        word = self.settings.fault
        return None if word is None else find_fault(str(word).replace("_", " ")).name

    def arm_under_test(self, seed: int) -> Arm:
        """Returns arm B: the op under test, broken where `parity.fault` says so."""
        return Arm("B", self.op, seed, fault=self.fault, fault_size=0.0 if self.fault is None else 1.0)

    def config_of(self, arm: Arm) -> DictConfig:
        """Returns the configuration of an arm, with its seed."""
        config = copy.deepcopy(self.configs[arm.op])
        config.seed = arm.seed
        return config


def load_experiment(overrides: Sequence[str]) -> Experiment:
    """Composes the configurations of both ops from Hydra overrides.

    Args:
        overrides: as on the command line, for `configs/parity.yaml`.

    Raises:
        ValueError: if an op is unknown or cannot run here, settings do not fit, or the two configurations differ in
            more than the op.
    """
    given = _compose(overrides)
    device = torch.device(device_type(given.trainer.accelerator))
    op = given.op.backend
    if op == "auto":
        op = msda_op.choose_backend(device, torch.float32)
    others = [override for override in overrides if not override.startswith("op=")]
    configs = {}
    for name in dict.fromkeys((op, given.against)):
        if name not in OPS:
            raise ValueError(f"op and against must be one of {', '.join(OPS)}, got {name}; choose one of them")
        configs[name] = _compose([*others, f"op={name}"])
        check_run(configs[name])
    check_same_but_op(configs[op], configs[given.against])
    _check_counts(given.parity)
    return Experiment(op, given.against, configs, device, Path(given.output))


def _check_counts(settings: DictConfig) -> None:
    """Checks that samples are large enough to have a deviation.

    Raises:
        ValueError: naming the key that is too small.
    """
    for level, key, least in (("ensemble", "pairs", 2), ("evaluation", "controls", 1)):
        if settings[level][key] < least:
            raise ValueError(f"parity.{level}.{key} must be >= {least}, got {settings[level][key]}; raise it")


def check_same_but_op(first: DictConfig, second: DictConfig) -> None:
    """Checks that two configurations differ in the group `op` alone.

    Raises:
        ValueError: naming the keys that differ.
    """
    left, right = _flatten(_without_op(first)), _flatten(_without_op(second))
    differing = sorted(key for key in left.keys() | right.keys() if left.get(key) != right.get(key))
    if differing:
        raise ValueError(
            f"configurations of two arms must differ in op alone, got other {', '.join(differing)}; "
            "give both arms the same overrides"
        )


def config_hash(config: DictConfig) -> str:
    """Returns a hash of everything in a configuration that training depends on, except for the op."""
    container = OmegaConf.to_container(config, resolve=False)
    assert isinstance(container, dict), "a composed configuration is a mapping"
    return _digest({key: value for key, value in container.items() if key not in _UNRELATED})


def arm_hash(experiment: Experiment, arm: Arm, num_steps: int, total_steps: int) -> str:
    """Returns a hash of an arm: configuration, op, steps, code, versions and device. Equal hashes train equally."""
    config = experiment.config_of(arm)
    identity = {
        "config": config_hash(config),
        "op": OmegaConf.to_container(config.op),
        "roughness": config.parity.roughness,
        "arm": asdict(arm),
        "steps": [num_steps, total_steps],
        "sources": source_hash(),
        "packages": package_versions(),
        "device": torch.cuda.get_device_name() if experiment.device.type == "cuda" else "cpu",
        # Sums on a CPU depend on how many threads share them.
        "threads": torch.get_num_threads() if experiment.device.type == "cpu" else None,
    }
    return _digest(identity)


@cache
def source_hash() -> str:
    """Returns a hash of the code that training runs through, committed or not, as it was when first asked."""
    digest = hashlib.sha256()
    for name in _TRAINING_SOURCES:
        path = ROOT / name
        for file in [path] if path.suffix == ".py" else sorted(path.rglob("*.py")):
            digest.update(str(file.relative_to(ROOT)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@torch.no_grad()
def nudge_weights(model: nn.Module, seed: int) -> None:
    """Moves every float32 parameter by one unit in the last place, up or down at random, in place."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        up = torch.rand(parameter.shape, generator=generator) < 0.5
        target = torch.where(up, torch.inf, -torch.inf).to(parameter)
        parameter.copy_(torch.nextafter(parameter, target))


@torch.no_grad()
def roughen_attention(model: nn.Module, roughness: float, seed: int) -> None:
    """Adds normal noise to the attention's offset and weight projections, in place.

    They start at zero: every weight is equal, and sample points lie on pixel centres, the kinks of the interpolation,
    where one unit in the last place turns a gradient around and hides faults.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, MSDeformAttn):
            for projection in (module.sampling_offsets, module.attention_weights):
                noise = torch.randn(projection.weight.shape, generator=generator) * roughness
                projection.weight.add_(noise.to(projection.weight))


def _compose(overrides: Sequence[str]) -> DictConfig:
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return compose("parity", overrides=list(overrides))


def _without_op(config: DictConfig) -> dict[str, Any]:
    container = OmegaConf.to_container(config, resolve=False)
    assert isinstance(container, dict), "a composed configuration is a mapping"
    return {str(key): value for key, value in container.items() if key != "op"}


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
