"""Sums over the processes of a training."""

import torch.distributed as dist
from torch import Tensor


def sum_over_processes(value: Tensor) -> Tensor:
    """Adds a tensor up over all processes, in place, in its turn among the GPU's work.

    Lightning's `Strategy.reduce` begins with a barrier, at which the host waits until the GPU has done all before.

    Args:
        value: on the device that the processes train on; any shape, the same in all.

    Returns:
        The same tensor; where one process trains it stays as it is.
    """
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(value)
    return value
