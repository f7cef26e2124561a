"""The signal that stops a training, agreed on by all its processes without waiting for a GPU."""

from typing import cast

import torch
import torch.distributed as dist


class StopAgreement:
    """Tells all processes, at the same call of each, of a signal that any of them has heard.

    process 0   ask(0) -> 0   ask(0)  -> 0   ask(0)  -> 15
    process 1   ask(0) -> 0   ask(15) -> 0   ask(15) -> 15

    A call begins an exchange on the CPU, by Gloo, whose result the next call returns: nobody waits for it, while a
    reduction on GPUs would have every step wait until the one before has been computed.
    """

    def __init__(self) -> None:
        """Joins all processes of the default group; alone, a process agrees with itself at once."""
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo")) if several else None
        self._asked = torch.zeros(1, dtype=torch.int64)
        self._exchange: dist.Work | None = None

    @property
    def is_shared(self) -> bool:
        """Whether there are several processes."""
        return self._group is not None

    def ask(self, number: int) -> int:
        """Says what this process has heard; every process has to call it equally often.

        Args:
            number: of the signal, 0 for none.

        Returns:
            The largest number that a process said in the call before, or in this one where there is one process.
        """
        if self._group is None:
            return number
        agreed = self._finish()
        self._asked.fill_(number)
        self._exchange = dist.all_reduce(self._asked, dist.ReduceOp.MAX, self._group, async_op=True)
        return agreed

    def close(self) -> None:
        """Waits for the last exchange and leaves the group."""
        self._finish()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _finish(self) -> int:
        if self._exchange is None:
            return 0
        self._exchange.wait()
        self._exchange = None
        return int(self._asked.item())
