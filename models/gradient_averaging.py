"""Training on several processes whose gradients are averaged after the backward pass, as CUDA graphs need."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer


class GradientAveragingStrategy(DDPStrategy):
    """Trains copies of a module and averages their gradients once an optimiser step: g = sum_r g_r / R of R processes.

    `DistributedDataParallel` exchanges a gradient in a hook of its parameter while the rest of the backward pass runs;
    what a CUDA graph replays calls no hook. Here all gradients are exchanged in one piece after the backward pass that
    closes a window of accumulated ones: before loss scaling is undone, before their norm is measured and clipped.

    Weights and buffers are those of the first process when training starts, and its batch norms' statistics are handed
    to all after each optimiser step.

    Raises:
        RuntimeError: On all processes, if a trained parameter has no gradient on one of them.

    Notes:
        Each process divides by R before the sum, as `DistributedDataParallel` does: the weights are the same bit for
        bit with two processes, and up to the order of sums with more. An absent gradient counts as zeros in its step;
        the host reads that there was one a step later, so that it does not wait for the GPU. The exchange does not
        overlap with the backward pass, and takes as much memory as the gradients do.
    """

    def __init__(self) -> None:
        super().__init__()
        self._norms: list[nn.BatchNorm2d] = []
        self._absent: set[nn.Parameter] = set()
        self._num_absent: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def configure_ddp(self) -> None:
        """Hands out weights and buffers; the module is not wrapped."""
        module = self._module
        with torch.no_grad():
            for tensor in chain(module.parameters(), module.buffers()):
                _exchange([tensor], _broadcast)
        self._norms = [layer for layer in module.modules() if isinstance(layer, nn.BatchNorm2d)]

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Takes a step with averaged gradients.

        Args:
            optimizer: Of the parameters.
            closure: Runs the forward and the backward pass of the batch.
            model: Has the hooks of the step; by default the module that trains.
            **kwargs: For the optimiser's own step.

        Returns:
            What the optimiser's step returns: the loss.
        """

        def differentiate_and_average() -> Any:
            loss = closure()
            self._average_gradients(optimizer)
            return loss

        output = super().optimizer_step(optimizer, differentiate_and_average, model, **kwargs)
        self._share_statistics()
        return output

    def on_train_end(self) -> None:
        """Judges the last step."""
        self._require_gradients()

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _average_gradients(self, optimizer: Optimizer) -> None:
        self._require_gradients()
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        absent = {parameter for parameter in parameters if parameter.grad is None}
        for parameter in absent:
            parameter.grad = torch.zeros_like(parameter)
        num_absent = torch.full((1,), float(len(absent)), device=self.root_device)
        _exchange([*(parameter.grad for parameter in parameters), num_absent], _average)
        self._absent = absent
        self._num_absent = num_absent.to("cpu", non_blocking=True)
        self._copied = torch.cuda.current_stream().record_event() if num_absent.is_cuda else None

    def _require_gradients(self) -> None:
        """Refuses to go on after a step that lacked a gradient on any process."""
        num_absent, self._num_absent = self._num_absent, None
        if num_absent is None:
            return
        if self._copied is not None:
            self._copied.synchronize()  # of the step before: it is there
        if num_absent > 0:
            names = [name for name, parameter in self._module.named_parameters() if parameter in self._absent]
            raise RuntimeError(
                "every trained parameter must have a gradient on every process, got none for "
                f"{', '.join(names) or 'some on another process'}; set requires_grad=False on those that the "
                "loss does not depend on, or make it depend on them for every batch"
            )

    def _share_statistics(self) -> None:
        statistics = [tensor for norm in self._norms for tensor in (norm.running_mean, norm.running_var)]
        found = [tensor for tensor in statistics if tensor is not None]
        if found:
            _exchange(found, _broadcast)


def _exchange(tensors: Sequence[Tensor], collective: Callable[[Tensor], None]) -> None:
    """Applies a collective operation that works in place to tensors of one dtype, all in one piece."""
    together = torch.cat([tensor.flatten() for tensor in tensors])
    collective(together)
    pieces = together.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(
        list(tensors), [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
    )


def _average(tensor: Tensor) -> None:
    dist.all_reduce(tensor.div_(dist.get_world_size()))


def _broadcast(tensor: Tensor) -> None:
    dist.broadcast(tensor, src=0)
