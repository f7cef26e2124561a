"""Splits a training step into phases by time stamps in front of and behind its parts."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from models.detector import Detector
from parity.interception import calling_around_op

PHASES = (
    "data",
    "backbone",
    "encoder",
    "decoder and heads",
    "op forward",
    "matching and loss",
    "op backward",
    "backward",
    "optimiser",
)
"""Disjoint; they add up to the step. Encoder and decoder are meant without the op, "backward" without its backward."""

_OP_FORWARD = {"encoder": "op forward in encoder", "decoder": "op forward in decoder"}

Mark = Callable[[], Any]
Elapsed = Callable[[Any, Any], float]


def synchronize(device: torch.device) -> None:
    """Waits for all work of a GPU; a CPU has none left."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def clock_of(device: torch.device) -> "PhaseClock":
    """Returns a clock whose stamps are events in the queue of a GPU, or the host's time on a CPU."""
    if device.type == "cuda":
        return PhaseClock(_mark_event, lambda begin, end: begin.elapsed_time(end))
    return PhaseClock(time.perf_counter, lambda begin, end: 1000 * (end - begin))


def _mark_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class PhaseClock:
    """Collects pairs of time stamps by name during one step.

    Args:
        mark: makes a time stamp.
        elapsed_ms: returns the milliseconds between two stamps; called after the step alone.
    """

    def __init__(self, mark: Mark, elapsed_ms: Elapsed) -> None:
        self._mark = mark
        self._elapsed_ms = elapsed_ms
        self._begun: dict[str, Any] = {}
        self._spans: list[tuple[str, Any, Any]] = []

    def begin(self, name: str) -> None:
        """Stamps the beginning of a span."""
        self._begun[name] = self._mark()

    def end(self, name: str) -> None:
        """Stamps the end of the span begun last under this name."""
        self._spans.append((name, self._begun.pop(name), self._mark()))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Stamps both ends of what runs inside."""
        self.begin(name)
        yield
        self.end(name)

    def totals_ms(self) -> dict[str, float]:
        """Returns the milliseconds spent under each name, and forgets the stamps."""
        totals: dict[str, float] = {}
        for name, begin, end in self._spans:
            totals[name] = totals.get(name, 0.0) + self._elapsed_ms(begin, end)
        self._spans.clear()
        return totals


@contextmanager
def timing_parts(detector: Detector, clock: PhaseClock) -> Iterator[None]:
    """Stamps backbone, encoder, whole model, criterion, and every forward and backward of the op in them."""
    model = detector.model
    parts = {
        "model": model,
        "backbone": model.get_submodule("backbone.0"),
        "encoder": model.get_submodule("transformer.encoder"),
        "criterion": detector.criterion,
    }
    inside_encoder = [False]
    hooks = []
    for name, part in parts.items():
        hooks += [
            part.register_forward_pre_hook(_beginning(clock, name)),
            part.register_forward_hook(_ending(clock, name)),
        ]

    def enter(module: nn.Module, args: Any) -> None:
        inside_encoder[0] = True

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        inside_encoder[0] = False

    hooks += [parts["encoder"].register_forward_pre_hook(enter), parts["encoder"].register_forward_hook(leave)]

    def around(call: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        positions = [place for place, item in enumerate(args) if isinstance(item, Tensor) and item.requires_grad]
        marked = _MarkBackward.apply(clock, "end", *(args[place] for place in positions)) if positions else ()
        exchanged = list(args)
        for place, tensor in zip(positions, marked, strict=True):
            exchanged[place] = tensor
        with clock.span(_OP_FORWARD["encoder" if inside_encoder[0] else "decoder"]):
            output = call(*exchanged, **kwargs)
        return _MarkBackward.apply(clock, "begin", output)[0] if positions else output

    try:
        with calling_around_op(around):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def split_phases(totals_ms: dict[str, float]) -> dict[str, float]:
    """Turns nested spans into the disjoint `PHASES`, in milliseconds.

    Args:
        totals_ms: of the spans that `timing_parts` makes, and of "data", "forward and backward" and "optimiser".
    """
    in_encoder, in_decoder = (totals_ms.get(name, 0.0) for name in _OP_FORWARD.values())
    encoder, backbone, model = (totals_ms[name] for name in ("encoder", "backbone", "model"))
    op_backward = totals_ms.get("op backward", 0.0)
    phases = {
        "data": totals_ms["data"],
        "backbone": backbone,
        "encoder": encoder - in_encoder,
        "decoder and heads": model - backbone - encoder - in_decoder,
        "op forward": in_encoder + in_decoder,
        "matching and loss": totals_ms["criterion"],
        "op backward": op_backward,
        "backward": totals_ms["forward and backward"] - model - totals_ms["criterion"] - op_backward,
        "optimiser": totals_ms["optimiser"],
    }
    assert tuple(phases) == PHASES, "phases stand in the order of the step"
    return phases


class _MarkBackward(Function):
    """Passes tensors on; on the way back, when all their gradients are there, stamps one end of "op backward"."""

    @staticmethod
    def forward(ctx: Any, clock: PhaseClock, which: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.clock, ctx.which = clock, which
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (ctx.clock.begin if ctx.which == "begin" else ctx.clock.end)("op backward")
        return (None, None, *gradients)


def _beginning(clock: PhaseClock, name: str) -> Callable[..., None]:
    return lambda module, args: clock.begin(name)


def _ending(clock: PhaseClock, name: str) -> Callable[..., None]:
    return lambda module, args, output: clock.end(name)
