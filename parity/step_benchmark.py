"""Times one training step of a detector on random images in device memory: no loader, no Trainer."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from models.detector import Detector
from models.structures import Targets
from parity.arms import ROOT
from parity.phases import PhaseClock
from parity.timing import percentile
from parity.training import autocast_dtype, set_flags

PHASES = ("forward", "loss", "backward", "update")
CARDS_GIB = (24, 80)
_GIB = 2**30
# Left to the CUDA context, cuDNN and fragmentation when the largest batch is estimated.
_RESERVE_GIB = 1.5
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
    """

    overrides: tuple[str, ...]
    batch: int
    height: int
    width: int
    boxes: int


class SyntheticStep:
    """A detector, its optimiser and one random batch.

    Args:
        case: what to train on.
        device: where.
    """

    def __init__(self, case: StepCase, device: torch.device) -> None:
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            config = compose("train", overrides=["data=coco", "data.root=.", "num_classes=80", *case.overrides])
        set_flags(config)
        torch.manual_seed(_SEED)
        parts = {name: instantiate(config[name]) for name in ("model", "criterion", "normalizer", "optimizer")}
        detector = Detector(**parts, schedule=instantiate(config.schedule), top_k=config.detector.top_k)
        self.device = device
        self.detector = detector.to(device).train()
        self._optimizer = detector.optimizer_settings.build(detector.model)
        self._dtype = autocast_dtype(config)
        self._limit = config.trainer.gradient_clip_val
        self.draw_batch(case)

    def draw_batch(self, case: StepCase) -> None:
        """Takes another batch, of the sizes of a case."""
        self._batch, self._targets = _draw_batch(case, self.device)

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
            nn.utils.clip_grad_norm_(self.detector.parameters(), self._limit)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return losses.total.detach()


def measure_step(case: StepCase, device: torch.device, warmup: int, repeats: int) -> dict[str, Any]:
    """Times steps of a case.

    Args:
        case: what to train on.
        device: where; kernels and memory are counted on a GPU only.
        warmup: steps before, where kernels are compiled and chosen.
        repeats: measured steps.

    Returns:
        A row ready for JSON: `step_ms` (median, p20, p80 of the wall time), `phases_ms` (medians; on a GPU of the times
        between marks in its queue, which are those of the host where the host is slower), `images_per_s`; on a GPU also
        `kernels` and `busy_ms` of one step, `peak_gib`, and `largest_batch` by card, extrapolated from two batches.
    """
    step = SyntheticStep(case, device)
    on_gpu = device.type == "cuda"
    for _ in range(warmup):
        step.run(_naming)
    walls, phases = [], []
    for _ in range(repeats):
        clock = PhaseClock(_mark_event, _elapsed_event) if on_gpu else PhaseClock(time.perf_counter, _elapsed_host)
        _synchronize(device)
        begin = time.perf_counter()
        step.run(_timing(clock))
        _synchronize(device)
        walls.append(1000 * (time.perf_counter() - begin))
        phases.append(clock.totals_ms())
    row: dict[str, Any] = {
        "overrides": list(case.overrides),
        "batch": case.batch,
        "size_hw": [case.height, case.width],
        "boxes": case.boxes,
        "step_ms": {"median": percentile(walls, 0.5), "p20": percentile(walls, 0.2), "p80": percentile(walls, 0.8)},
        "phases_ms": {phase: percentile([each[phase] for each in phases], 0.5) for phase in PHASES},
        "images_per_s": 1000 * case.batch / percentile(walls, 0.5),
    }
    if on_gpu:
        row |= count_kernels(step)
        row |= _measure_memory(case, step)
    return row


def count_kernels(step: SyntheticStep) -> dict[str, Any]:
    """Returns how many kernels and copies one step launches, and for how long any is at work, by the profiler."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step.run(_naming)
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


def largest_batch(small: tuple[int, float], large: tuple[int, float], card_gib: float) -> int:
    """Extrapolates the largest batch that fits a card from the peaks of two batches, pairs (images, GiB)."""
    per_image = (large[1] - small[1]) / (large[0] - small[0])
    return int((card_gib - _RESERVE_GIB - (small[1] - small[0] * per_image)) // per_image)


def format_step(row: dict[str, Any]) -> str:
    """Returns a row as a line of text."""
    phases = ", ".join(f"{phase} {row['phases_ms'][phase]:.1f}" for phase in PHASES)
    height, width = row["size_hw"]
    case = f"{' '.join(row['overrides'])} batch {row['batch']} {height}x{width}"
    text = f"{case}: {row['step_ms']['median']:.1f} ms ({phases})"
    if "kernels" in row:
        text += f", {row['kernels']} kernels, GPU busy {row['busy_ms']:.1f} ms, peak {row['peak_gib']:.2f} GiB"
    return text


def _measure_memory(case: StepCase, step: SyntheticStep) -> dict[str, Any]:
    """Returns the peak of a step, and the batches that would fill each of `CARDS_GIB`."""
    peak = _peak_gib(step)
    row: dict[str, Any] = {"peak_gib": peak}
    if case.batch > 1:
        half = replace(case, batch=case.batch // 2)
        step.draw_batch(half)
        step.run(_naming)
        fewer = _peak_gib(step)
        row["largest_batch"] = {
            str(card): largest_batch((half.batch, fewer), (case.batch, peak), card) for card in CARDS_GIB
        }
    return row


def _peak_gib(step: SyntheticStep) -> float:
    torch.cuda.reset_peak_memory_stats()
    step.run(_naming)
    return torch.cuda.max_memory_allocated() / _GIB


def _draw_batch(case: StepCase, device: torch.device) -> tuple[tuple[Tensor, Tensor], Targets]:
    generator = torch.Generator().manual_seed(_SEED)
    shape = (case.batch, 3, case.height, case.width)
    images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    padding_mask = torch.zeros(case.batch, case.height, case.width, dtype=torch.bool)
    count = case.batch * case.boxes
    labels = torch.randint(80, (count,), generator=generator)
    boxes_cxcywh = torch.rand(count, 4, generator=generator) * 0.4 + torch.tensor([0.3, 0.3, 0.05, 0.05])
    targets = Targets(labels.to(device), boxes_cxcywh.to(device), (case.boxes,) * case.batch)
    return (images.to(device), padding_mask.to(device)), targets


@contextmanager
def _naming(phase: str) -> Iterator[None]:
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
        with clock.span(phase), _naming(phase):
            yield

    return span


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _mark_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed_event(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return begin.elapsed_time(end)


def _elapsed_host(begin: float, end: float) -> float:
    return 1000 * (end - begin)
