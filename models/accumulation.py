"""Accumulated gradients that equal those of one large batch."""

from collections.abc import Iterable

import torch
from torch import Tensor


class TargetWeighting:
    """Weighs the batches of an accumulation window by their targets.

    The loss of a batch is a sum divided by the number of targets, at least 1. Averaging k such losses would weigh the
    targets of sparse batches more; weighed and averaged here, k batches of b images have the gradient of one batch of
    k * b up to rounding: sum_i w_i L_i / max(sum_i n_i, 1) with w_i = max(n_i, 1).
    """

    def __init__(self) -> None:
        self._num_targets: list[Tensor] = []

    def weigh(self, loss: Tensor, num_targets: Tensor) -> Tensor:
        """Returns the loss of a batch times its divisor.

        Args:
            loss: float32 scalar.
            num_targets: float32 scalar, targets of the batch, averaged over all processes.
        """
        self._num_targets.append(num_targets)
        return loss * num_targets.clamp(min=1)

    def average(self, gradients: Iterable[Tensor], divisor: int) -> None:
        """Turns the sum of the weighed gradients into their average, in place, and begins a new window.

        Args:
            gradients: Of the weighed losses, each divided by `divisor`.
            divisor: What the trainer divides each loss by.
        """
        factor = divisor / torch.stack(self._num_targets).sum().clamp(min=1)
        torch._foreach_mul_(list(gradients), factor)
        self._num_targets = []
