"""Memory of a training step: its peak, that of a crowded image, and the largest batch that a card holds."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from parity.step_benchmark import StepCase, SyntheticStep

CARDS_GIB = (24, 80)
_GIB = 2**30
# Left to the CUDA context, cuDNN and fragmentation when the largest batch is estimated; and to the context alone when
# it is found by trying, where the rest counts by itself.
_RESERVE_GIB = 1.5
_CONTEXT_GIB = 0.7


def fitting_cards(total_gib: float) -> list[int]:
    """Returns those of `CARDS_GIB` that a GPU can stand in for; of what a card is called some percent are missing."""
    return [card for card in CARDS_GIB if 0.95 * card <= total_gib]


def measure_memory(case: StepCase, step: SyntheticStep) -> dict[str, Any]:
    """Returns what `measure_peak` does and, without graphs, `largest_batch` by card, extrapolated from two batches."""
    row: dict[str, Any] = measure_peak(step)
    if case.batch > 1 and not step.graphed:
        half = replace(case, batch=case.batch // 2)
        step.draw_batch(half)
        step.warm_up(1)
        fewer = peak_gib(step)
        row["largest_batch"] = {
            str(card): estimate_largest_batch((half.batch, fewer), (case.batch, row["peak_gib"]), card)
            for card in CARDS_GIB
        }
        step.draw_batch(case)
    return row


def measure_peak(step: SyntheticStep) -> dict[str, Any]:
    """Returns `peak_gib` of a step and `peak_of`: memory allocated or, with CUDA graphs, reserved."""
    return {"peak_gib": peak_gib(step), "peak_of": "reserved" if step.graphed else "allocated"}


def device_gib(device: torch.device) -> float:
    """Returns the memory of a GPU."""
    return torch.cuda.get_device_properties(device).total_memory / _GIB


def measure_dense(case: StepCase, step: SyntheticStep, dense: int) -> dict[str, Any]:
    """Returns the peak of a batch whose first image has `dense` targets, and its ratio to that of the case."""
    usual = peak_gib(step)
    step.draw_batch(replace(case, dense=dense))
    step.warm_up(1)
    crowded = peak_gib(step)
    step.draw_batch(case)
    return {"dense_boxes": dense, "dense_peak_gib": crowded, "dense_ratio": crowded / usual}


def peak_gib(step: SyntheticStep) -> float:
    """Runs a step and returns the most memory that was allocated; with graphs, reserved, since theirs is hidden."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step.warm_up(1)
    most = torch.cuda.max_memory_reserved() if step.graphed else torch.cuda.max_memory_allocated()
    return most / _GIB


def estimate_largest_batch(small: tuple[int, float], large: tuple[int, float], card_gib: float) -> int:
    """Extrapolates the largest batch that fits a card from the peaks of two batches, pairs (images, GiB); 0 for none.

    Every image counts alike; images of other sizes count by their area, batches padded to their largest image whole.
    """
    per_image = (large[1] - small[1]) / (large[0] - small[0])
    return max(0, int((card_gib - _RESERVE_GIB - (small[1] - small[0] * per_image)) // per_image))


def find_largest_batch(case: StepCase, step: SyntheticStep, card_gib: float, limit: int) -> int:
    """Finds the largest batch of at most `limit` images that trains in the memory of a card, by trying; 0 for none.

    Raises:
        ValueError: if the step has CUDA graphs: those of one batch would take the memory of the next; or if the GPU has
            less memory than the card.
    """
    if step.graphed:
        raise ValueError("cuda_graphs must be false to find the largest batch, got true; set cuda_graphs=false")
    total = device_gib(step.device)
    if 0.95 * card_gib > total:
        raise ValueError(f"card_gib must be at most the {total:.0f} GiB of the GPU, got {card_gib}; see fitting_cards")

    def fits(batch: int) -> bool:
        try:
            step.draw_batch(replace(case, batch=batch))
            step.warm_up(2)
        except torch.OutOfMemoryError:
            return False
        finally:
            step.drop_gradients()
            torch.cuda.empty_cache()
        return True

    torch.cuda.set_per_process_memory_fraction(min(1.0, (card_gib - _CONTEXT_GIB) / total))
    try:
        return bisect_largest(fits, limit)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        step.draw_batch(case)


def bisect_largest(fits: Callable[[int], bool], limit: int) -> int:
    """Returns the largest number of 1..limit that fits, where all below a fitting one fit; 0 if none does."""
    fitting, above = 0, limit + 1
    while above - fitting > 1:
        middle = (fitting + above) // 2
        if fits(middle):
            fitting = middle
        else:
            above = middle
    return fitting
