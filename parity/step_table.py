"""The rows of `python -m scripts.benchmark step`: what is measured of a training step, one case at a time."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from parity.step_benchmark import StepCase, SyntheticStep, format_step, list_variants, measure_step
from parity.step_memory import device_gib, find_largest_batch, fitting_cards, measure_dense, measure_memory
from parity.step_peer import compare_steps, start_peers
from parity.step_streams import build_data, format_stream, measure_data, measure_sizes

_WARMUP = 10
_BLOCKS = 4


@dataclass(frozen=True)
class StepTable:
    """What the rows are to say; `against`, `sizes` and `data_workers` have rows of their own in place of the others.

    Args:
        repeats: measured steps.
        switches: a row without each of what makes a step fast, too.
        against: another code base beside ours, one of `parity.step_peer.PEERS`, or None.
        checkout: folder of the official code, or None.
        dense: also the peak with so many targets in one image, or None.
        largest_batch: also the largest batch by trying, up to this, and a row with gradient checkpointing, or None.
        sizes: steps on so many sizes beside one, or None.
        data_workers: the full loader with so many processes beside batches on the device, or None.
        data_steps: batches of the loader.
    """

    repeats: int
    switches: bool = False
    against: str | None = None
    checkout: Path | None = None
    dense: int | None = None
    largest_batch: int | None = None
    sizes: int | None = None
    data_workers: int | None = None
    data_steps: int = 200


def measure_table(case: StepCase, device: torch.device, table: StepTable) -> Iterator[dict[str, Any]]:
    """Measures the rows of a case, each as soon as it is asked for.

    Raises:
        ValueError: if the table wants what the case cannot have.
    """
    if table.against is not None:
        peers = start_peers(table.against, case, device, table.checkout)
        yield from compare_steps(peers, case, device, warmup=_WARMUP, repeats=table.repeats, blocks=_BLOCKS)
    elif table.sizes is not None:
        yield measure_sizes(SyntheticStep(case, device), case, table.sizes, _WARMUP, table.repeats)
    elif table.data_workers is not None:
        data = build_data(case, table.data_workers)
        yield measure_data(SyntheticStep(case, device), case, data, table.data_steps)
    else:
        for extra in list_variants(table.switches, checkpointing=table.largest_batch is not None):
            yield _measure_variant(replace(case, overrides=case.overrides + extra), device, table)


def format_row(row: dict[str, Any]) -> str:
    """Returns a row as a line of text."""
    return format_step(row) if "step_ms" in row else format_stream(row)


def _measure_variant(case: StepCase, device: torch.device, table: StepTable) -> dict[str, Any]:
    step = SyntheticStep(case, device)
    row = measure_step(step, case, warmup=_WARMUP, repeats=table.repeats)
    if device.type == "cuda":
        row |= measure_memory(case, step)
    if table.dense is not None:
        row |= measure_dense(case, step, table.dense)
    if table.largest_batch is not None and not step.graphed:
        cards = fitting_cards(device_gib(device))
        row["largest_batch_found"] = {
            str(card): find_largest_batch(case, step, card, table.largest_batch) for card in cards
        }
    del step
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row
