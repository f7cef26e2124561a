"""CUDA graphs of the training pass: forward and backward of a region are captured once a size and replayed.

A region is the part of a detector whose kernels follow from the sizes of its inputs alone: of the padded images and, in
DINO, of the padded denoising queries. The host launches its some thousand kernels one by one otherwise, which takes
longer than the kernels do.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from models.cuda_pass import Capture, CudaCapture, GradientBuffers, RecordedPass
from models.layers.autocast import autocast_dtype
from models.structures import take_apart

# Eager passes after which a size takes the place of one that was not needed all the while.
_PATIENCE = 8
_GIB = 2**30

logger = logging.getLogger(__name__)

Record = TypeVar("Record")
Output = TypeVar("Output")
Recording = tuple[RecordedPass, Callable[[Iterator[Tensor]], Any]]
"""A pass, and what makes the region's record of its output tensors."""


class TrainingGraphs:
    """Replays the training pass of a region where it has been captured for the size at hand, and captures it.

    The first sizes that come are captured, up to `max_sizes`. Then a size computes eagerly, until it has come eight
    times since the least recently used one was needed, whose place it takes.

    Gradients are added to `.grad` of the parameters when the backward pass reaches the region, as `backward()` does;
    `torch.autograd.grad` does not find them, nor do hooks on parameters, and modules inside run no hooks in a replay.

    Attributes:
        enabled: whether to capture; otherwise every region computes eagerly.
        max_sizes: sizes that may be captured at a time.
        captures: passes captured so far.
        eager_passes: training passes for whose size there was no place.
    """

    def __init__(
        self, *, enabled: bool, max_sizes: int, make_capture: Callable[[torch.device], Capture] = CudaCapture
    ) -> None:
        """Prepares an empty cache; nothing is captured before a region runs.

        Args:
            enabled: whether to capture; needs an NVIDIA GPU.
            max_sizes: sizes that may be captured at a time, at least 1. What a pass keeps between forward and backward
                is shared by all; each size keeps its outputs and their gradients besides.
            make_capture: makes what records passes on a device; another than `CudaCapture` is for machines without a
                GPU.

        Raises:
            ValueError: if max_sizes is below 1.
        """
        if max_sizes < 1:
            raise ValueError(f"max_sizes must be at least 1, got {max_sizes}; set cuda_graphs=false to capture none")
        self.enabled = enabled
        self.max_sizes = max_sizes
        self.captures = 0
        self.eager_passes = 0
        self._make_capture = make_capture
        self._clock = 0
        self._turn = 0
        self._forget()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles the settings alone: graphs belong to the tensors of one module."""
        return _restore, (type(self), self.enabled, self.max_sizes)

    @property
    def captured(self) -> tuple[Hashable, ...]:
        """Keys of the captured sizes, least recently used first."""
        return tuple(self._passes)

    def run(self, module: nn.Module, region: Callable[[Record], Output], inputs: Record) -> Output:
        """Runs a region of a module: by graphs while the module trains, else eagerly.

        Args:
            module: owns all parameters and buffers that the region uses; always the same module.
            region: maps a record of tensors (frozen dataclasses, tuples, None for a part that is not there) to another
                one; always the same function, which neither waits for the device nor changes anything but buffers.
            inputs: tensors without gradients; what else the record holds follows from their sizes.

        Returns:
            The output. That of a graph is overwritten by the next run with inputs of this size.

        Raises:
            ValueError: if the tensors are not on an NVIDIA GPU.
        """
        if not (self.enabled and module.training and torch.is_grad_enabled()):
            return region(inputs)
        tensors, _ = take_apart(inputs)
        device = tensors[0].device
        self._forget_moved(module)
        self._clock += 1
        key = (tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors), autocast_dtype(device))
        if key not in self._passes:
            if not self._deserves_place(key):
                return self._run_eagerly(region, inputs)
            self._passes[key] = self._record(module, region, inputs)
            if len(self._passes) > self.max_sizes:  # only now: a pool that no graph uses is gone
                self._passes.popitem(last=False)
        self._passes.move_to_end(key)
        self._used_at[key] = self._clock
        recorded, rebuild = self._passes[key]
        self._turn += 1
        anchor = torch.empty(0, device=device, requires_grad=True)  # lets autograd reach the region
        return rebuild(iter(_Replay.apply(self, recorded, anchor, *tensors)))

    def _forget(self) -> None:
        self._passes: OrderedDict[Hashable, Recording] = OrderedDict()
        self._used_at: dict[Hashable, int] = {}
        self._seen_at: dict[Hashable, deque[int]] = {}
        self._capture: Capture | None = None
        self._gradients = GradientBuffers()
        self._places: list[tuple[Mapping[str, Any], str]] = []
        self._state: list[tuple[int, bool]] = []

    def _forget_moved(self, module: nn.Module) -> None:
        """Forgets all passes if a parameter or buffer is not where it was, or has begun or ceased to train."""
        if not self._places:
            self._places = [
                (tensors, name)
                for layer in module.modules()
                for tensors in (layer._parameters, layer._buffers)
                for name, tensor in tensors.items()
                if tensor is not None
            ]
        state = [(tensors[name].data_ptr(), tensors[name].requires_grad) for tensors, name in self._places]
        if state != self._state:
            if self._passes:
                logger.warning("Weights have moved since %d training passes were captured: anew", len(self._passes))
                self._forget()
                return self._forget_moved(module)
            self._state = state

    def _deserves_place(self, key: Hashable) -> bool:
        """Notes that a size without graphs has come, and returns whether it is to be captured."""
        seen = self._seen_at.setdefault(key, deque(maxlen=_PATIENCE))
        seen.append(self._clock)
        if len(self._passes) < self.max_sizes:
            return True
        return len(seen) == _PATIENCE and seen[0] > self._used_at[next(iter(self._passes))]

    def _run_eagerly(self, region: Callable[[Record], Output], inputs: Record) -> Output:
        if self.eager_passes == 0:
            logger.warning(
                "More than %d sizes of image batches: one that has no place computes eagerly; raise data.size_divisor "
                "to have fewer, or model.graphs.max_sizes",
                self.max_sizes,
            )
        self.eager_passes += 1
        return region(inputs)

    def _record(self, module: nn.Module, region: Callable[[Record], Any], inputs: Record) -> Recording:
        tensors, rebuild_inputs = take_apart(inputs)
        rebuilds: list[Callable[[Iterator[Tensor]], Any]] = []

        def flat_region(tensors: Sequence[Tensor]) -> list[Tensor]:
            outputs, rebuild = take_apart(region(rebuild_inputs(iter(tensors))))
            rebuilds[:] = [rebuild]
            return outputs

        for parameter in module.parameters():
            if parameter.grad is not None:  # in a buffer, which warming up writes to, while gradients accumulate
                parameter.grad = parameter.grad.clone()
        if self._capture is None:
            self._capture = self._make_capture(tensors[0].device)
        recorded = self._capture(flat_region, tensors, module, self._gradients)
        self.captures += 1
        reserved = torch.cuda.memory_reserved() / _GIB if tensors[0].is_cuda else 0.0
        logger.info(
            "Captured the training pass of images %s, the capture no. %d, for %d sizes at most; %.1f GiB reserved",
            tuple(tensors[0].shape),
            self.captures,
            self.max_sizes,
            reserved,
        )
        return recorded, rebuilds[0]

    def differentiate(self, recorded: RecordedPass, turn: int, gradients: Sequence[Tensor]) -> None:
        """Runs the backward pass of a turn and adds its gradients to those of the parameters.

        Raises:
            RuntimeError: if another pass has run since its forward, in the same memory.
        """
        if turn != self._turn:
            raise RuntimeError(
                "backward must come before the next forward pass with cuda_graphs=true, got another forward pass in "
                "between; set cuda_graphs=false"
            )
        buffers = self._gradients.of(recorded.parameters)
        pairs = zip(buffers, [parameter.grad for parameter in recorded.parameters], strict=True)
        sums = [(buffer, grad.clone() if grad is buffer else grad) for buffer, grad in pairs if grad is not None]
        recorded.backward(gradients)
        for parameter, buffer in zip(recorded.parameters, buffers, strict=True):
            parameter.grad = buffer
        if sums:
            torch._foreach_add_([buffer for buffer, _ in sums], [earlier for _, earlier in sums])

    @property
    def turn(self) -> int:
        """Number of the last forward pass."""
        return self._turn


class _Replay(Function):
    @staticmethod
    def forward(ctx: Any, owner: TrainingGraphs, recorded: RecordedPass, anchor: Tensor, *inputs: Tensor) -> Any:
        ctx.owner, ctx.recorded, ctx.turn = owner, recorded, owner.turn
        outputs = tuple(output.detach() for output in recorded.forward(inputs))
        pairs = zip(outputs, recorded.differentiable, strict=True)
        ctx.mark_non_differentiable(*(output for output, differentiable in pairs if not differentiable))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        pairs = zip(gradients, ctx.recorded.differentiable, strict=True)
        ctx.owner.differentiate(ctx.recorded, ctx.turn, [gradient for gradient, wanted in pairs if wanted])
        return (None,) * len(ctx.needs_input_grad)


def _restore(kind: type[TrainingGraphs], enabled: bool, max_sizes: int) -> TrainingGraphs:
    return kind(enabled=enabled, max_sizes=max_sizes)
