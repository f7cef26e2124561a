"""Times one training step of a detector on random images in device memory: no loader, no Trainer."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from models.compilation import compile_regions
from models.detector import Detector
from models.environment import cut_folders
from models.optimization import clip_gradients, measure_gradients
from models.structures import Targets
from parity.arms import ROOT
from parity.phases import PhaseClock, clock_of, synchronize
from parity.timing import percentile
from parity.training import autocast_dtype, set_flags

PHASES = ("forward", "loss", "backward", "update")
SWITCHES = {
    "cuda_graphs": ("cuda_graphs=false",),
    "compile": ("compile=false",),
    "fused_norm": ("model.transformer.fused_norm=false",),
    "op.fused": ("op.fused=false",),
    "backbone.fused_norm": ("backbone.fused_norm=false",),
    "fold_norms": ("backbone.fused_norm=false", "backbone.fold_norms=false"),
    "channels_last": ("precision.channels_last=false",),
    "fused_optimizer": ("precision.fused_optimizer=false",),
}
"""What makes a step fast, by name, and the overrides that turn it off. Norms are folded where they are not fused."""
CHECKPOINTING = ("cuda_graphs=false", "model.transformer.gradient_checkpointing=true")
"""What saves memory at the price of a second forward pass of every layer."""
Samples = tuple[list[float], list[dict[str, float]]]
"""Wall times of steps, and the times of the phases of each, in milliseconds."""
TrainingBatch = tuple[Tensor, Tensor, Targets]
"""Images uint8 [B, 3, H, W], their padding mask bool [B, H, W], and targets."""
_SEED = 0


@dataclass(frozen=True)
class StepCase:
    """What a step is to train on.

    Args:
        overrides: of `configs/train.yaml`: model, op, precision, backbone and so on.
        batch: images.
        height: of each image, pixels.
        width: of each image, pixels.
        boxes: targets of each image.
        dense: targets of the first image where it has more than the others, else 0.
    """

    overrides: tuple[str, ...]
    batch: int
    height: int
    width: int
    boxes: int
    dense: int = 0


class SyntheticStep:
    """A detector, its optimiser and one random batch.

    Args:
        case: what to train on.
        device: where.
    """

    def __init__(self, case: StepCase, device: torch.device) -> None:
        config = compose_case(case)
        set_flags(config)
        torch.manual_seed(_SEED)
        parts = {name: instantiate(config[name]) for name in ("model", "criterion", "normalizer", "optimizer")}
        detector = Detector(**parts, schedule=instantiate(config.schedule), top_k=config.detector.top_k)
        self.device = device
        if config.compile:
            compile_regions(detector)
        self.detector = detector.to(device).train()
        self.graphed = bool(config.cuda_graphs)
        self._optimizer = detector.optimizer_settings.build(detector.model)
        self._dtype = autocast_dtype(config)
        self._limit = config.trainer.gradient_clip_val
        self.draw_batch(case)

    def draw_batch(self, case: StepCase) -> None:
        """Takes another batch, of the sizes of a case."""
        self.take(self.place(draw_batch(case)))

    def place(self, batch: TrainingBatch) -> TrainingBatch:
        """Returns a batch on the device; from pinned memory the host does not wait for it."""
        images, padding_mask, targets = batch
        tensors = (images, padding_mask, targets.labels, targets.boxes_cxcywh)
        images, padding_mask, labels, boxes_cxcywh = (each.to(self.device, non_blocking=True) for each in tensors)
        return images, padding_mask, Targets(labels, boxes_cxcywh, targets.counts)

    def take(self, batch: TrainingBatch) -> None:
        """Takes a batch that lies on the device; the next steps train on it."""
        *self._batch, self._targets = batch

    def run(self, span: Callable[[str], Any]) -> Tensor:
        """Trains once; `span` makes a context manager around each of `PHASES`. Returns the loss."""
        with torch.autocast(self.device.type, dtype=self._dtype, enabled=self._dtype is not None):
            with span("forward"):
                output = self.detector.model(self.detector.normalizer(*self._batch), self._targets)
            with span("loss"):
                losses = self.detector.criterion(output, self._targets, lambda value: value)
        with span("backward"):
            losses.total.backward()
        with span("update"):
            clip_gradients(self._optimizer, self._limit, measure_gradients(self._optimizer))
            self._optimizer.step()
            self.drop_gradients()
        return losses.total.detach()

    def drop_gradients(self) -> None:
        """Frees what a step that failed has left."""
        self._optimizer.zero_grad(set_to_none=True)

    def warm_up(self, steps: int) -> None:
        """Trains without timing: kernels are compiled and chosen, graphs captured."""
        for _ in range(steps):
            self.run(naming)

    def time(self, repeats: int) -> Samples:
        """Times steps, each begun on an idle device."""
        walls, phases = [], []
        for _ in range(repeats):
            clock = clock_of(self.device)
            synchronize(self.device)
            begin = time.perf_counter()
            self.run(_timing(clock))
            synchronize(self.device)
            walls.append(1000 * (time.perf_counter() - begin))
            phases.append(clock.totals_ms())
        return walls, phases


def compose_case(case: StepCase) -> DictConfig:
    """Returns the configuration of a case, on COCO's sizes and classes."""
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return compose("train", overrides=["data=coco", "data.root=.", "num_classes=80", *case.overrides])


def list_variants(switches: bool, checkpointing: bool) -> list[tuple[str, ...]]:
    """Returns the overrides of each row of a table, beside those that all have.

    Args:
        switches: whether to have a row without each of `SWITCHES`, and one without all.
        checkpointing: whether to have a row with gradient checkpointing.
    """
    off = list(SWITCHES.values()) if switches else []
    without = [*off, *([tuple(dict.fromkeys(chain(*off)))] if off else [])]
    return [(), *without, *([CHECKPOINTING] if checkpointing else [])]


def measure_step(step: SyntheticStep, case: StepCase, warmup: int, repeats: int) -> dict[str, Any]:
    """Times steps of a case.

    Args:
        step: of this case.
        case: what it trains on.
        warmup: steps before.
        repeats: measured steps.

    Returns:
        See `describe_samples`; on a GPU also `kernels` and `busy_ms` of one step.
    """
    step.warm_up(warmup)
    row = describe_samples(case, "triton-detr", step.time(repeats))
    return row | count_kernels(step) if step.device.type == "cuda" else row


def describe_samples(case: StepCase, who: str, samples: Samples) -> dict[str, Any]:
    """Makes a row ready for JSON of measured steps.

    Args:
        case: what they trained on.
        who: whose code it was.
        samples: at least one step.

    Returns:
        `step_ms` (median, p20, p80 of the wall time), `phases_ms` (medians; on a GPU of the times between marks in its
        queue, which are those of the host where the host is slower), `images_per_s`, and the case.
    """
    walls, phases = samples
    return {
        "who": who,
        "overrides": cut_folders(case.overrides),
        "batch": case.batch,
        "size_hw": [case.height, case.width],
        "boxes": case.boxes,
        "step_ms": {"median": percentile(walls, 0.5), "p20": percentile(walls, 0.2), "p80": percentile(walls, 0.8)},
        "phases_ms": {phase: percentile([each[phase] for each in phases], 0.5) for phase in PHASES},
        "images_per_s": 1000 * case.batch / percentile(walls, 0.5),
    }


def count_kernels(step: SyntheticStep) -> dict[str, Any]:
    """Returns how many kernels and copies one step launches, and for how long any is at work, by the profiler."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step.run(naming)
        torch.cuda.synchronize()
    on_device = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    intervals = sorted(
        (event.time_range.start, event.time_range.end) for event in on_device if event.name not in PHASES
    )
    return {"kernels": len(intervals), "busy_ms": merged_length(intervals) / 1000}


def merged_length(intervals: Sequence[tuple[float, float]]) -> float:
    """Returns the length of the union of sorted intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in intervals:
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def format_step(row: Mapping[str, Any]) -> str:
    """Returns a row as a line of text."""
    phases = ", ".join(f"{phase} {row['phases_ms'][phase]:.1f}" for phase in PHASES)
    height, width = row["size_hw"]
    case = f"{row['who']} {' '.join(row['overrides'])} batch {row['batch']} {height}x{width}"
    text = f"{case}: {row['step_ms']['median']:.1f} ms ({phases})"
    if "kernels" in row:
        text += f", {row['kernels']} kernels, GPU busy {row['busy_ms']:.1f} ms"
    if "peak_gib" in row:
        text += f", peak {row['peak_gib']:.2f} GiB"
    for card, estimated in row.get("largest_batch", {}).items():
        found = row.get("largest_batch_found", {}).get(card)
        text += f", {card} GiB hold a batch of about {estimated}" + ("" if found is None else f" (tried: {found})")
    return text


def plot_steps(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws a bar of phases for each row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [f"{row['who']}\n{' '.join(row['overrides'])}, batch {row['batch']}" for row in rows]
    figure, axis = pyplot.subplots(figsize=(9, 1 + 0.6 * len(rows)))
    left = [0.0] * len(rows)
    for phase in PHASES:
        times = [row["phases_ms"][phase] for row in rows]
        axis.barh(names, times, left=left, label=phase)
        left = [begin + more for begin, more in zip(left, times, strict=True)]
    axis.invert_yaxis()
    axis.tick_params(axis="y", labelsize=6)
    axis.set_xlabel("ms of a step")
    axis.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_batch(case: StepCase) -> TrainingBatch:
    """Draws uint8 images, their padding masks, which are empty, and targets, on the host."""
    generator = torch.Generator().manual_seed(_SEED)
    shape = (case.batch, 3, case.height, case.width)
    images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    padding_mask = torch.zeros(case.batch, case.height, case.width, dtype=torch.bool)
    counts = (max(case.boxes, case.dense), *[case.boxes] * (case.batch - 1))
    labels = torch.randint(80, (sum(counts),), generator=generator)
    boxes_cxcywh = torch.rand(sum(counts), 4, generator=generator) * 0.4 + torch.tensor([0.3, 0.3, 0.05, 0.05])
    return images, padding_mask, Targets(labels, boxes_cxcywh, counts)


@contextmanager
def naming(phase: str) -> Iterator[None]:
    """Names a phase for Nsight Systems and the profiler."""
    with torch.profiler.record_function(phase):
        if torch.cuda.is_available():
            torch.cuda.nvtx.range_push(phase)
        yield
        if torch.cuda.is_available():
            torch.cuda.nvtx.range_pop()


def _timing(clock: PhaseClock) -> Callable[[str], Any]:
    @contextmanager
    def span(phase: str) -> Iterator[None]:
        with clock.span(phase), naming(phase):
            yield

    return span
