"""Steps on batches that change: of many sizes, as multi-scale training has them, and from a loader with its images.

Both are set beside what does not change: one size of the same area, and the same batches lying on the device already.
A size that is new costs a capture of about a second, and the first one all that is compiled: lines say how far it is.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from hydra.utils import instantiate
from torch._dynamo.utils import counters

from coco.collate import Batch
from coco.datamodule import CocoDataModule
from coco.transforms import scale_shorter_side
from models.cuda_graphs import TrainingGraphs
from models.environment import cut_folders
from models.structures import Targets
from parity.phases import synchronize
from parity.recording import Progress
from parity.step_benchmark import StepCase, SyntheticStep, TrainingBatch, compose_case, draw_batch, naming
from parity.timing import percentile
from parity.training import end_workers

Size = tuple[int, int]
"""(height, width) in pixels."""

ROUNDS = 4
"""How often `measure_sizes` meets each size; what the first time costs is part of the result."""
_SEED = 0
_LARGEST_RATIO = 2.0
"""Of the sides of an image; nearly all of COCO's lie below."""
_DRAWS_PER_SIZE = 1000


def print_aside(line: str) -> None:
    """Prints a line on the standard error, at once: the standard output has the rows alone."""
    print(line, file=sys.stderr, flush=True)


def draw_sizes(scales: Sequence[int], max_size: int, count: int) -> list[Size]:
    """Draws different sizes of images as multi-scale training resizes them, upright and lying ones.

    Args:
        scales: lengths of the shorter side in pixels to choose from.
        max_size: largest length of the longer side in pixels.
        count: sizes.

    Raises:
        ValueError: if there are not so many.
    """
    generator = torch.Generator().manual_seed(_SEED)
    sizes: dict[Size, None] = {}
    for _ in range(_DRAWS_PER_SIZE * count):
        scale = scales[int(torch.randint(len(scales), (), generator=generator))]
        longer = round(1000 * (1 + (_LARGEST_RATIO - 1) * float(torch.rand((), generator=generator))))
        height, width = scale_shorter_side(1000, longer, scale, max_size)
        upright = bool(torch.randint(2, (), generator=generator))
        sizes.setdefault((width, height) if upright else (height, width))
        if len(sizes) == count:
            return list(sizes)
    raise ValueError(f"sizes must be at most those that the augmentation makes, got {count} of {len(sizes)}; lower it")


def pad_size(size_hw: Size, divisor: int) -> Size:
    """Returns what a size is padded to."""
    height, width = (-(-extent // divisor) * divisor for extent in size_hw)
    return height, width


def draw_padded(case: StepCase, size_hw: Size, padded_hw: Size) -> TrainingBatch:
    """Draws a batch of a case whose images fill a part of it, the rest being padding."""
    images, padding_mask, targets = draw_batch(replace(case, height=padded_hw[0], width=padded_hw[1]))
    padding_mask[:, size_hw[0] :] = True
    padding_mask[:, :, size_hw[1] :] = True
    return images.masked_fill(padding_mask.unsqueeze(1), 0), padding_mask, targets


def measure_sizes(
    step: SyntheticStep, case: StepCase, count: int, warmup: int, repeats: int, progress: Progress = print_aside
) -> dict[str, Any]:
    """Times steps on batches of many sizes, and on one size of their median area.

    Args:
        step: of this case; warmed up on the one size before anything is timed.
        case: batch and targets; its own size is not used.
        count: different sizes, see `draw_sizes`; each is met `ROUNDS` times in random order.
        warmup: steps before.
        repeats: measured steps of the one size.
        progress: called with a line now and then.

    Returns:
        The case; `sizes`, `padded_sizes` (different ones), `size_divisor`; `sizes_ms`, wall times of all steps on all
        sizes, and `first_round_ms`, of those that met their size for the first time (median, p80, largest); the one
        size `fixed_size_hw` and its `fixed_ms`; `times_fixed`, the ratio of the medians; `recompilations` (graphs that
        torch.compile made after the warm-up), `captures` and `eager_passes` of CUDA graphs meanwhile.

    Raises:
        ValueError: if there are not so many sizes.
    """
    config = compose_case(case)
    transform, divisor = config.data.train_transform, config.data.size_divisor
    if "scales" not in transform:
        raise ValueError(
            f"data.train_transform must be multi-scale to have {count} sizes, got {transform._target_}; set "
            "data/augmentation@data.train_transform=published"
        )
    sizes = draw_sizes(transform.scales, transform.max_size, count)
    pairs = [(size_hw, pad_size(size_hw, divisor)) for size_hw in sizes]
    fixed = sorted((padded for _, padded in pairs), key=lambda padded: padded[0] * padded[1])[count // 2]
    batches = [step.place(draw_padded(case, *pair)) for pair in pairs]
    fixed_batch = step.place(draw_padded(case, fixed, fixed))
    progress(
        f"{count} sizes, {len({padded for _, padded in pairs})} padded; {warmup} steps of {_name(fixed)} to warm up"
    )
    begin = time.perf_counter()
    step.take(fixed_batch)
    step.warm_up(warmup)
    synchronize(step.device)
    progress(f"warmed up: {time.perf_counter() - begin:.1f} s")
    before = _count_events(step)
    walls = _time_rounds(step, batches, [padded for _, padded in pairs], progress)
    events = _events_since(step, before)
    step.take(fixed_batch)
    step.warm_up(1)  # its place among the graphs may have gone to another size
    fixed_walls, _ = step.time(repeats)
    return _describe(case, case.batch) | {
        "boxes": case.boxes,
        "sizes": count,
        "padded_sizes": len({padded for _, padded in pairs}),
        "size_divisor": divisor,
        "sizes_ms": _summarise(walls),
        "first_round_ms": _summarise(walls[:count]),
        "fixed_size_hw": list(fixed),
        "fixed_ms": _summarise(fixed_walls),
        "times_fixed": percentile(walls, 0.5) / percentile(fixed_walls, 0.5),
        **events,
    }


def measure_data(
    step: SyntheticStep,
    case: StepCase,
    data: CocoDataModule,
    steps: int,
    lead: int | None = None,
    progress: Progress = print_aside,
) -> dict[str, Any]:
    """Compares training on batches of the full loader with training on the same batches on the device.

    The batches of one epoch are loaded twice: first to be kept on the device, where those of a new size are trained on
    without a clock; then, the same ones since the epoch decides, to be timed from the loader, and after that from the
    device's memory.

    Args:
        step: of this case.
        case: for the row alone; images, sizes and targets are those of the data.
        data: what to load, with which workers, and in what batches.
        steps: batches.
        lead: batches before the clock starts, while those that workers have made ahead are used up; None for three a
            worker.
        progress: called with a line now and then.

    Returns:
        The case; `num_workers`, `steps` (timed ones), `padded_sizes` (different ones of all batches),
        `loader_images_per_s`, `device_images_per_s`, and `share`, the ratio of both; `recompilations`, `captures` and
        `eager_passes` of CUDA graphs in these two passes, which are 0 where all had been met before.

    Raises:
        ValueError: if there are not enough batches.
    """
    lead = 3 * data.num_workers if lead is None else lead
    loader = data.train_dataloader()
    if not lead < steps <= len(loader):
        raise ValueError(
            f"steps must be above {lead}, the batches before the clock starts, and at most the {len(loader)} batches "
            f"of an epoch, got {steps}; set data.repeat_train or the number of steps"
        )
    progress(f"{steps} batches from {data.num_workers} workers; a step on each size that is new")
    try:
        kept, padded_sizes = _meet_sizes(step, loader, steps, progress)
        before = _count_events(step)
        progress(f"training from the loader, {steps} steps")
        from_loader = _rate(step, (step.place(_unpack(batch)) for batch in _first_epoch(loader, steps)), lead)
    finally:
        end_workers(loader)
    progress(f"training from the device, {steps - lead} steps")
    from_device = _rate(step, iter(kept[lead:]), lead=0)
    return _describe(case, data.batch_size) | {
        "num_workers": data.num_workers,
        "steps": steps - lead,
        "padded_sizes": padded_sizes,
        "loader_images_per_s": from_loader,
        "device_images_per_s": from_device,
        "share": from_loader / from_device,
        **_events_since(step, before),
    }


def build_data(case: StepCase, num_workers: int) -> CocoDataModule:
    """Builds the data of a case's overrides, its batch and a number of workers, and checks that it is there."""
    settings = (f"data.batch_size={case.batch}", f"data.num_workers={num_workers}")
    data: CocoDataModule = instantiate(compose_case(replace(case, overrides=(*case.overrides, *settings))).data)
    data.check()
    data.prepare_data()
    return data


def format_stream(row: dict[str, Any]) -> str:
    """Returns a row of `measure_sizes` or `measure_data` as a line of text."""
    words = f"{row['who']} {' '.join(row['overrides'])} batch {row['batch']}"
    if "share" in row:
        return (
            f"{words}: {row['loader_images_per_s']:.1f} images/s with {row['num_workers']} workers, "
            f"{row['device_images_per_s']:.1f} from the device, {100 * row['share']:.1f} %, "
            f"{row['padded_sizes']} padded sizes; {_format_events(row)}"
        )
    height, width = row["fixed_size_hw"]
    return (
        f"{words}, {row['sizes']} sizes ({row['padded_sizes']} padded to multiples of {row['size_divisor']}): "
        f"{row['sizes_ms']['median']:.1f} ms, {row['times_fixed']:.3f} times the {row['fixed_ms']['median']:.1f} ms "
        f"of {height}x{width}; when first met {row['first_round_ms']['median']:.1f} ms; {_format_events(row)}"
    )


def _describe(case: StepCase, batch: int) -> dict[str, Any]:
    return {"who": "triton-detr", "overrides": cut_folders(case.overrides), "batch": batch}


def _name(size_hw: Size) -> str:
    return "{}x{}".format(*size_hw)


def _count_events(step: SyntheticStep) -> dict[str, int]:
    """Returns how often a step has cost more than a step so far, by kind."""
    graphs = step.detector.model.graphs
    assert isinstance(graphs, TrainingGraphs), "every model has them"
    compiled: int = counters["stats"]["unique_graphs"]
    return {"recompilations": compiled, "captures": graphs.captures, "eager_passes": graphs.eager_passes}


def _events_since(step: SyntheticStep, before: dict[str, int]) -> dict[str, int]:
    return {kind: count - before[kind] for kind, count in _count_events(step).items()}


def _format_events(row: dict[str, Any]) -> str:
    return ", ".join(f"{row[kind]} {kind.replace('_', ' ')}" for kind in ("recompilations", "captures", "eager_passes"))


def _time_rounds(
    step: SyntheticStep, batches: Sequence[TrainingBatch], padded_sizes: Sequence[Size], progress: Progress
) -> list[float]:
    """Returns the wall times of steps on all batches, in milliseconds, `ROUNDS` times in random order."""
    walls: list[float] = []
    met: set[Size] = set()
    generator = torch.Generator().manual_seed(_SEED)
    for number in range(ROUNDS):
        for place in torch.randperm(len(batches), generator=generator).tolist():
            step.take(batches[place])
            walls += step.time(1)[0]
            if (padded := padded_sizes[place]) not in met:
                met.add(padded)
                progress(f"padded size {len(met)}, {_name(padded)}, first met: {walls[-1] / 1000:.1f} s")
        progress(f"round {number + 1} of {ROUNDS} over the sizes: {sum(walls[-len(batches) :]) / 1000:.1f} s")
    return walls


def _meet_sizes(step: SyntheticStep, loader: Any, steps: int, progress: Progress) -> tuple[list[TrainingBatch], int]:
    """Trains on the first batch of each padded size; returns all batches, on the device, and the number of sizes."""
    kept: list[TrainingBatch] = []
    met: set[Size] = set()
    begin = time.perf_counter()
    for batch in _first_epoch(loader, steps):
        kept.append(step.place(_unpack(batch)))
        height, width = batch["images"].shape[-2:]
        padded = (height, width)
        if padded in met:
            continue
        met.add(padded)
        step.take(kept[-1])
        step.warm_up(1)
        synchronize(step.device)
        progress(f"padded size {len(met)}, {_name(padded)}, in batch {len(kept)}: {time.perf_counter() - begin:.1f} s")
    return kept, len(met)


def _first_epoch(loader: Any, steps: int) -> Iterator[Batch]:
    loader.sampler.set_epoch(0)
    return islice(loader, steps)


def _unpack(batch: Batch) -> TrainingBatch:
    return batch["images"], batch["padding_mask"], Targets(batch["labels"], batch["boxes_cxcywh"], batch["num_targets"])


def _rate(step: SyntheticStep, batches: Iterator[TrainingBatch], lead: int) -> float:
    """Returns images a second over all batches but the first; the device is waited for at both ends alone."""
    images, begin = 0, time.perf_counter()
    for number, batch in enumerate(batches):
        if number == lead:
            synchronize(step.device)
            images, begin = 0, time.perf_counter()
        step.take(batch)
        step.run(naming)
        images += len(batch[0])
    synchronize(step.device)
    return images / (time.perf_counter() - begin)


def _summarise(samples: Sequence[float]) -> dict[str, float]:
    return {"median": percentile(samples, 0.5), "p80": percentile(samples, 0.8), "largest": max(samples)}
