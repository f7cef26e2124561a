"""How fast training batches arrive, what a worker's memory grows by, and which stage limits the loader."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import get_worker_info

from coco.collate import Batch, collate
from coco.datamodule import CocoDataModule
from coco.dataset import CocoDataset

STAGES = ("read", "augment", "collate")


@dataclass(frozen=True)
class LoaderRow:
    """One measurement.

    Attributes:
        num_workers: Loader processes.
        img_per_s: Images a second of this process's loader, the first batches left out.
        growth_mib: Largest growth of a worker's private memory after its first batches, in MiB; None without workers.
        stage_ms: Milliseconds an image takes in each stage, in one process.
        limit: What holds the loader back.
    """

    num_workers: int
    img_per_s: float
    growth_mib: float | None
    stage_ms: dict[str, float]
    limit: str

    def as_json(self) -> dict[str, Any]:
        """Returns the row as plain values."""
        return asdict(self)


def measure_loader(data: CocoDataModule, worker_counts: list[int], seconds: float) -> Iterator[LoaderRow]:
    """Measures the training loader with several numbers of workers.

    Args:
        data: What to load; its number of workers is changed.
        worker_counts: Numbers of workers.
        seconds: How long to measure each.
    """
    stage_ms = time_stages(data.train_dataset, data.batch_size, data.size_divisor, num_images=4 * data.batch_size)
    one_process = 1000 / sum(stage_ms.values())
    for count in worker_counts:
        data.num_workers = count
        rate, growth = _measure_rate(data, count, seconds)
        slowest = max(stage_ms, key=lambda stage: stage_ms[stage])
        yield LoaderRow(count, rate, growth, stage_ms, _describe_limit(rate, one_process, max(count, 1), slowest))


def time_stages(dataset: CocoDataset, batch_size: int, size_divisor: int, num_images: int) -> dict[str, float]:
    """Returns the milliseconds that an image takes in each of `STAGES`, in this process."""
    spent = dict.fromkeys(STAGES, 0.0)
    samples = []
    count = min(num_images, len(dataset))
    for index in range(count):
        began = time.perf_counter()
        dataset.read_image(index)
        read = time.perf_counter() - began
        began = time.perf_counter()
        samples.append(dataset[index])
        spent["read"] += read
        spent["augment"] += max(0.0, time.perf_counter() - began - read)
    began = time.perf_counter()
    for first in range(0, count, batch_size):
        collate(samples[first : first + batch_size], size_divisor)
    spent["collate"] = time.perf_counter() - began
    return {stage: 1000 * total / count for stage, total in spent.items()}


def private_memory_mib() -> float:
    """Returns the memory in MiB that this process shares with no other (Linux)."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    kib = [int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_")]
    return sum(kib) / 1024


@dataclass(frozen=True)
class ReportingCollate:
    """Collates, and adds the worker's number and its private memory to the batch."""

    collate: Callable[..., Batch]

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        """Returns the batch with `worker` and `private_mib`; 0 and 0.0 outside a worker."""
        info = get_worker_info()
        report = (0, 0.0) if info is None else (info.id, private_memory_mib())
        return {**self.collate(samples), "worker": report[0], "private_mib": report[1]}


def _measure_rate(data: CocoDataModule, num_workers: int, seconds: float) -> tuple[float, float | None]:
    """Returns images a second and the growth of a worker's private memory."""
    loader = data.train_dataloader()
    loader.collate_fn = ReportingCollate(loader.collate_fn)
    batches = _repeat(loader)
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for _ in range(2 * max(num_workers, 1)):
        batch = next(batches)
        first.setdefault(batch["worker"], batch["private_mib"])
    images, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        batch = next(batches)
        images += len(batch["image_ids"])
        last[batch["worker"]] = batch["private_mib"]
    rate = images / (time.perf_counter() - began)
    grown = [last[worker] - first[worker] for worker in last if worker in first]
    return rate, max(grown) if num_workers and grown else None


def _repeat(loader: Any) -> Iterator[Any]:
    """Yields batches of one epoch after the other."""
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def _describe_limit(rate: float, one_process: float, num_processes: int, slowest: str) -> str:
    """Says what holds the loader back."""
    cores = len(os.sched_getaffinity(0))
    if rate > 0.7 * one_process * min(num_processes, cores):
        if num_processes < cores:
            return f"{num_processes} processes on {cores} cores, busy with {slowest}: more workers help"
        return f"{cores} cores, busy with {slowest}: smaller images or more cores help"
    threads = torch.get_num_threads()
    return f"waiting: storage, memory bandwidth or the transfer of batches ({threads} threads here, {cores} cores)"
