"""A plain training loop without a Trainer: every random number comes from the seed and the number of the step."""

import gc
import hashlib
import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from coco.collate import Batch
from coco.datamodule import CocoDataModule
from coco.dataset import Sample
from models.compilation import compile_regions
from models.criterion import Losses
from models.cuda_graphs import TrainingGraphs
from models.detector import Detector
from models.environment import allow_tf32
from models.layers.ms_deform_attn import MSDeformAttn
from models.matcher import Matches
from models.optimization import build_scheduler
from models.structures import Targets
from parity.arms import Arm, Experiment, nudge_weights, roughen_attention
from parity.faults import find_fault
from parity.interception import op_of, rounding_otherwise

ALL_GRADIENTS = "all"
GRADIENT_GROUPS = (ALL_GRADIENTS, "sampling_offsets", "attention_weights", "value_proj")
"""Gradients whose norms are recorded: all, and those of each projection whose gradient the op computes."""

_AUTOCAST = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
# Spreads the seeds of steps over the range of a generator, so that those of neighbouring runs do not meet.
_SEED_STRIDE = 1_000_003


@dataclass(frozen=True)
class StepResult:
    """What one step leaves.

    Args:
        losses: total, differentiable, and its terms.
        grad_norms: norm of the gradients of each of `GRADIENT_GROUPS` before clipping, float32 scalars.
        queries: the query that each target got, int64 [n, R], in order of the targets, on the host.
        attention_calls: calls of attention modules in the forward pass; of a CUDA graph, modules that it replays.
    """

    losses: Losses
    grad_norms: dict[str, Tensor]
    queries: Tensor
    attention_calls: int


class TrainingLoop:
    """One arm in training.

    Args:
        experiment: configurations and device.
        arm: which op, seed and fault.
        total_steps: length of the learning-rate schedule.
        weights: state of a detector to start from; None for initial weights.
    """

    def __init__(
        self, experiment: Experiment, arm: Arm, total_steps: int, weights: Mapping[str, Tensor] | None = None
    ) -> None:
        gc.collect()  # loops before this one, which hooks and schedules hold in cycles together with all their weights
        config = experiment.config_of(arm)
        self.arm = arm
        self.device = experiment.device
        self._config = config
        self._autocast_dtype = autocast_dtype(config)
        set_flags(config)
        data = build_data(config)
        self.detector = build_detector(config, data, arm, weights).to(self.device).train()
        self._optimizer = self.detector.optimizer_settings.build(self.detector.model)
        self._scheduler = build_scheduler(self.detector.schedule, self._optimizer, total_steps, max_epochs=1)
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=self._autocast_dtype == torch.float16)
        self._batches = stream_batches(build_loader(data, arm.seed), arm.seed)
        self._step = 0
        self._matches: Matches | None = None
        self._attention_calls = 0
        self._called: set[nn.Module] = set()
        self.detector.criterion.matcher.register_forward_hook(self._keep_matches)
        for module in self.detector.modules():
            if isinstance(module, MSDeformAttn):
                module.register_forward_hook(self._count_call)

    def close(self) -> None:
        """Ends the processes that load batches."""
        self._batches.close()

    def next_batch(self) -> Batch:
        """Returns the next batch, on the host."""
        return next(self._batches)

    def step(self, batch: Batch) -> StepResult:
        """Trains on a batch from the host; dropout is drawn from the seed and the number of the step."""
        torch.manual_seed(self.arm.seed * _SEED_STRIDE + self._step)
        self._attention_calls = 0
        losses = self.backward(batch)
        grad_norms = self._measure_gradients()
        self.update()
        calls = self._attention_calls or self._count_replayed()
        return StepResult(losses, grad_norms, self.assigned_queries(), calls)

    def backward(self, batch: Batch) -> Losses:
        """Computes losses and gradients, and leaves the weights alone."""
        moved = move_batch(batch, self.device)
        targets = Targets(moved["labels"], moved["boxes_cxcywh"], moved["num_targets"])
        with faulty(self.detector, self.arm):
            with torch.autocast(self.device.type, dtype=self._autocast_dtype, enabled=self._autocast_dtype is not None):
                losses = self.detector.criterion(self.detector(moved), targets, lambda value: value)
            self._scaler.scale(losses.total).backward()
        self._scaler.unscale_(self._optimizer)
        return losses

    def update(self) -> None:
        """Clips the gradients, and moves the weights and the learning rate."""
        limit = self._config.trainer.gradient_clip_val
        if limit is not None:
            nn.utils.clip_grad_norm_(self.detector.parameters(), limit)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._scheduler.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._step += 1

    def assigned_queries(self) -> Tensor:
        """Returns the query that each target got in the last step, int64 [n, R], in order of the targets."""
        assert self._matches is not None, "a step comes first"
        order = self._matches.target.argsort(dim=1, stable=True)
        return self._matches.query.gather(1, order).cpu()

    def _measure_gradients(self) -> dict[str, Tensor]:
        members: dict[str, list[Tensor]] = {group: [] for group in GRADIENT_GROUPS}
        for name, parameter in self.detector.named_parameters():
            if parameter.grad is not None:
                for group in GRADIENT_GROUPS:
                    if group == ALL_GRADIENTS or group in name.split("."):
                        members[group].append(parameter.grad)
        return {group: nn.utils.get_total_norm(gradients) for group, gradients in members.items()}

    def _count_replayed(self) -> int:
        graphs = self.detector.model.graphs
        assert isinstance(graphs, TrainingGraphs), "every model has them"
        return len(self._called) if graphs.captured else 0

    def _keep_matches(self, module: nn.Module, args: Any, output: tuple[Matches, Matches | None]) -> None:
        self._matches = output[0]

    def _count_call(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self._attention_calls += 1
        self._called.add(module)


def set_flags(config: DictConfig) -> None:
    """Sets PyTorch's switches for TF32 and, by `trainer.deterministic` (false, true or warn), for determinism."""
    allow_tf32(config.precision.allow_tf32)
    deterministic = config.trainer.deterministic
    torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")


def autocast_dtype(config: DictConfig) -> torch.dtype | None:
    """Returns the dtype of autocast, None for float32.

    Raises:
        ValueError: if the precision is none that this loop knows.
    """
    precision = config.precision.lightning
    if precision not in _AUTOCAST:
        raise ValueError(f"precision.lightning must be one of {', '.join(_AUTOCAST)}, got {precision}; choose one")
    return _AUTOCAST[precision]


def build_data(config: DictConfig) -> CocoDataModule:
    """Builds the data module and writes or checks its files; arms share it, since reading annotations takes a while."""
    settings = OmegaConf.to_container(config.data, resolve=True)
    assert isinstance(settings, dict), "data settings are a mapping"
    return _build_data(json.dumps({**settings, "seed": 0}, sort_keys=True))


@lru_cache(maxsize=1)
def _build_data(settings: str) -> CocoDataModule:
    data = instantiate(json.loads(settings))
    data.check()
    data.prepare_data()
    return data


def build_detector(
    config: DictConfig, data: CocoDataModule, arm: Arm, weights: Mapping[str, Tensor] | None = None
) -> Detector:
    """Builds a detector on the CPU; its weights are those given or drawn from the arm's seed, roughened, and nudged."""
    config.num_classes = data.num_classes
    torch.manual_seed(arm.seed)
    detector = Detector(
        model=instantiate(config.model),
        criterion=instantiate(config.criterion),
        normalizer=instantiate(config.normalizer),
        optimizer=instantiate(config.optimizer),
        schedule=instantiate(config.schedule),
        top_k=config.detector.top_k,
    )
    if config.model.weights is None:
        roughen_attention(detector.model, config.parity.roughness, arm.seed)
    if weights is not None:
        detector.load_state_dict(weights)
    if arm.nudge:
        nudge_weights(detector.model, arm.nudge)
    if config.compile:
        compile_regions(detector)
    return detector


@contextmanager
def faulty(detector: Detector, arm: Arm) -> Iterator[None]:
    """Gives the detector the arm's fault, if it has one; the op of a nudged arm rounds otherwise in half precision.

    Nudged weights alone say little there: most round to the same half-precision numbers.
    """
    with ExitStack() as stack:
        if arm.nudge:
            stack.enter_context(rounding_otherwise(arm.nudge))
        if arm.fault is not None:
            stack.enter_context(find_fault(arm.fault).injected(detector, op_of(arm.op), arm.fault_size))
        yield


def build_loader(data: CocoDataModule, seed: int) -> DataLoader[Sample]:
    """Builds a loader of training batches whose order follows from the seed."""
    data.seed = seed  # read while the loader is built
    return data.train_dataloader()


def stream_batches(loader: DataLoader[Sample], seed: int) -> Generator[Batch, None, None]:
    """Yields training batches until it is closed, which ends the loader's processes.

    Order and augmentation are a function of the seed and the step.
    """
    step = 0
    epoch = 0
    try:
        while True:
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # a DistributedSampler
            torch.manual_seed(seed * _SEED_STRIDE + step)
            batches = iter(loader)  # draws the seed of the worker processes
            for _ in range(len(loader)):
                torch.manual_seed(seed * _SEED_STRIDE + step)  # without workers the augmentation draws from here
                yield next(batches)
                step += 1
            epoch += 1
    finally:
        end_workers(loader)


def end_workers(loader: DataLoader[Sample]) -> None:
    """Ends the processes that a loader keeps for its next epoch, whoever still refers to it.

    PyTorch ends them when nothing refers to their iterator any more. Where something does (a cycle; in Python 3.12.3 a
    closed generator too, https://github.com/python/cpython/issues/118272) they live as long as this process, whose end
    then takes five seconds for each of them if memory is pinned (PyTorch 2.11).
    """
    iterator, loader._iterator = loader._iterator, None
    if isinstance(iterator, _MultiProcessingDataLoaderIter):
        iterator._shutdown_workers()


def move_batch(batch: Batch, device: torch.device) -> dict[str, Any]:
    """Returns the batch with its tensors on a device."""
    return {
        name: item.to(device, non_blocking=True) if isinstance(item, Tensor) else item for name, item in batch.items()
    }


def hash_batch(batch: Batch) -> str:
    """Returns a hash of everything in a batch."""
    digest = hashlib.blake2b(digest_size=8)
    for name, item in sorted(batch.items()):
        digest.update(name.encode())
        digest.update(item.numpy().tobytes() if isinstance(item, Tensor) else repr(item).encode())
    return digest.hexdigest()
