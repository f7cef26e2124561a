"""Forward and backward pass of a region of a network, captured as a pair of CUDA graphs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from models.layers.autocast import autocast_dtype
from models.layers.level_tables import keeping_level_tables

_WARMUP_PASSES = 3

FlatRegion = Callable[[Sequence[Tensor]], list[Tensor]]


class RecordedPass(Protocol):
    """Forward and backward pass of a region on tensors of one size.

    Attributes:
        parameters: those that the region's outputs depend on.
        differentiable: for each output, whether it depends on any.
    """

    parameters: list[nn.Parameter]
    differentiable: list[bool]

    def forward(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the outputs, which the next call overwrites."""

    def backward(self, gradients: Sequence[Tensor]) -> None:
        """Writes the gradients of `parameters` into their buffers, given those of the differentiable outputs."""


class GradientBuffers:
    """One buffer for the gradient of each parameter, shared by the passes of all sizes."""

    def __init__(self) -> None:
        self._buffers: dict[nn.Parameter, Tensor] = {}

    def of(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Returns the buffers of parameters, each made when it is first asked for."""
        for parameter in parameters:
            if parameter not in self._buffers:
                self._buffers[parameter] = torch.empty_like(parameter, requires_grad=False)
        return [self._buffers[parameter] for parameter in parameters]


Capture = Callable[[FlatRegion, Sequence[Tensor], nn.Module, GradientBuffers], RecordedPass]
"""Records the passes of a region of a module on inputs of the shapes given."""


class CudaCapture:
    """Captures passes that share memory: their inputs, and what they keep between forward and backward pass."""

    def __init__(self, device: torch.device) -> None:
        """Makes pool and stream.

        Raises:
            ValueError: if the device is no NVIDIA GPU.
        """
        if device.type != "cuda":
            raise ValueError(
                f"cuda_graphs must be false without an NVIDIA GPU, got true for tensors on {device}; set it to false"
            )
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()
        self._memory: dict[int, Tensor] = {}

    def __call__(
        self, region: FlatRegion, inputs: Sequence[Tensor], module: nn.Module, gradients: GradientBuffers
    ) -> RecordedPass:
        """Captures a pass; see `CudaPass`."""
        return CudaPass(self, region, inputs, module, gradients)

    def inputs_like(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Returns tensors of the shapes and dtypes given, those of a place always at the same address if they fit."""
        return [self._place(index, tensor) for index, tensor in enumerate(inputs)]

    def _place(self, index: int, tensor: Tensor) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        if index not in self._memory or self._memory[index].numel() < size:
            self._memory[index] = torch.empty(size, dtype=torch.uint8, device=tensor.device)
        return self._memory[index][:size].view(tensor.dtype).view(tensor.shape)


class CudaPass:
    """A pair of graphs: one for the forward, one for the backward pass."""

    def __init__(
        self,
        shared: CudaCapture,
        region: FlatRegion,
        inputs: Sequence[Tensor],
        module: nn.Module,
        gradients: GradientBuffers,
    ) -> None:
        """Warms up, which compiles every kernel and fills every cache, and captures.

        Buffers of the module and the state of the random generator are as before afterwards; those of the gradients
        are not.
        """
        self._inputs = shared.inputs_like(inputs)
        self._copy_inputs(inputs)
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        with keeping_level_tables(module) as self._tables, restoring_buffers(module):
            shared.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(shared.stream), torch.random.fork_rng(devices=[inputs[0].device]):
                for _ in range(_WARMUP_PASSES):
                    self.parameters = self._warm_up(region, parameters, gradients)
            torch.cuda.current_stream().wait_stream(shared.stream)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Only this thread must keep away from the allocator of CUDA itself: the thread that pins batches may not know.
        capture: dict[str, Any] = {
            "pool": shared.pool,
            "stream": shared.stream,
            "capture_error_mode": "thread_local",
        }
        with torch.cuda.graph(self._forward, **capture), _as_captured(self._inputs[0].device):
            outputs = region(self._inputs)
        self.differentiable = [output.requires_grad for output in outputs]
        trained = [output for output in outputs if output.requires_grad]
        self._output_gradients = [torch.zeros_like(output) for output in trained]
        buffers = gradients.of(self.parameters)
        with torch.cuda.graph(self._backward, **capture):
            computed = _differentiate(trained, self.parameters, self._output_gradients)
            torch._foreach_copy_(buffers, [gradient for gradient in computed if gradient is not None])
        self._outputs = [output.detach() for output in outputs]

    def forward(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Copies the inputs and replays; does not wait."""
        self._copy_inputs(inputs)
        self._forward.replay()
        return self._outputs

    def backward(self, gradients: Sequence[Tensor]) -> None:
        """Copies the gradients of the differentiable outputs and replays; does not wait."""
        torch._foreach_copy_(self._output_gradients, list(gradients))
        self._backward.replay()

    def _copy_inputs(self, inputs: Sequence[Tensor]) -> None:
        for static, given in zip(self._inputs, inputs, strict=True):
            static.copy_(given, non_blocking=True)

    def _warm_up(
        self, region: FlatRegion, parameters: list[nn.Parameter], gradients: GradientBuffers
    ) -> list[nn.Parameter]:
        """Runs both passes once and returns the parameters that have a gradient."""
        with _as_captured(self._inputs[0].device):
            trained = [output for output in region(self._inputs) if output.requires_grad]
        found = _differentiate(trained, parameters, [torch.zeros_like(output) for output in trained])
        used = [parameter for parameter, gradient in zip(parameters, found, strict=True) if gradient is not None]
        torch._foreach_copy_(gradients.of(used), [gradient for gradient in found if gradient is not None])
        return used


def _differentiate(
    outputs: list[Tensor], parameters: list[nn.Parameter], gradients: list[Tensor]
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of parameters, None for those without, as a backward pass outside of autocast would."""
    with torch.autocast(outputs[0].device.type, enabled=False):
        return torch.autograd.grad(outputs, parameters, gradients, allow_unused=True)


def _as_captured(device: torch.device) -> torch.autocast:
    """Keeps the autocast of the caller, without its cache: what lies there is not made by the graph."""
    dtype = autocast_dtype(device)
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


@contextmanager
def restoring_buffers(module: nn.Module) -> Iterator[None]:
    """Undoes what training passes do to buffers: running statistics of batch norms."""
    buffers = list(module.buffers())
    kept = [buffer.clone() for buffer in buffers]
    yield
    with torch.no_grad():
        for buffer, earlier in zip(buffers, kept, strict=True):
            buffer.copy_(earlier)
