"""CUDA graphs: each bucket is captured once and replayed, so that the host no longer dispatches kernels one by one."""

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from models.export.buckets import Size
from models.export.certificate import collect_answers, measure
from models.export.inference import InferenceModule, Outputs
from models.export.programs import example_inputs
from models.export.recipe import Precision, Source
from models.export.weights import save_weights
from models.layers.level_tables import keeping_level_tables

WEIGHTS_FILE = "weights.safetensors"
_WARMUP_CALLS = 3
_MIB = 2**20
_SHOWN = 3

logger = logging.getLogger(__name__)


class Captured(Protocol):
    """A recording of one call."""

    @property
    def memory_mib(self) -> float:
        """Memory that it keeps."""

    def __call__(self, images: Tensor, sizes_hw: Tensor, original_sizes_hw: Tensor) -> Outputs:
        """Runs it on new numbers; the outputs are overwritten by the next call."""


Capture = Callable[[InferenceModule, tuple[Tensor, Tensor, Tensor]], Captured]
"""Records a call of the detector on inputs of the shapes given."""


class CudaGraph:
    """A captured call: static inputs, the graph, static outputs, and the level tables that its kernels read."""

    def __init__(self, module: InferenceModule, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
        """Warms up on a stream of its own, which compiles every kernel and fills every cache, and captures.

        Args:
            module: the detector, on a GPU.
            inputs: example inputs on the same GPU.
        """
        self._inputs = tuple(tensor.clone() for tensor in inputs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream), keeping_level_tables(module) as self._tables:
            for _ in range(_WARMUP_CALLS):
                module(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()  # so that what the graph reserves can be told apart
        before = torch.cuda.memory_reserved()
        self._graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self._graph):
            self._outputs = module(*self._inputs)
        input_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self._inputs)
        self.memory_mib = (torch.cuda.memory_reserved() - before + input_bytes) / _MIB

    def __call__(self, images: Tensor, sizes_hw: Tensor, original_sizes_hw: Tensor) -> Outputs:
        """Copies the inputs, from the host or the device, and replays; does not wait."""
        for static, given in zip(self._inputs, (images, sizes_hw, original_sizes_hw), strict=True):
            static.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._outputs


class GraphedDetector:
    """A detector that replays captured calls for its buckets, and computes eagerly what has none.

    Attributes:
        eager_calls: calls that no graph answered; the first one is logged.
        captures: graphs captured so far; more than there are buckets says that the memory cap makes them leave.
    """

    def __init__(
        self,
        module: InferenceModule,
        *,
        buckets: tuple[Size, ...],
        batch_size: int,
        memory_cap_mib: float,
        capture: Capture = CudaGraph,
    ) -> None:
        """Prepares a detector; graphs are captured when their bucket is called first, or by `capture_all`.

        Args:
            module: the detector, on its device.
            buckets: heights and widths that are captured.
            batch_size: images of a captured call.
            memory_cap_mib: memory that all graphs may keep together; the least recently used ones leave. While one is
                captured, it comes on top.
            capture: records a call; another one than `CudaGraph` is for machines without a GPU.
        """
        self.eager_calls = 0
        self.captures = 0
        self._module = module
        self._buckets = frozenset(buckets)
        self._batch_size = batch_size
        self._memory_cap_mib = memory_cap_mib
        self._record = capture
        self._graphs: OrderedDict[Size, Captured] = OrderedDict()
        self._too_large: set[Size] = set()
        self._places = _tensor_places(module)
        self._state = self._read_state()

    @property
    def memory_mib(self) -> float:
        """Memory that the graphs keep."""
        return sum(graph.memory_mib for graph in self._graphs.values())

    @property
    def captured(self) -> tuple[Size, ...]:
        """Buckets that have a graph, least recently used first."""
        return tuple(self._graphs)

    @torch.no_grad()
    def __call__(self, images: Tensor, sizes_hw: Tensor, original_sizes_hw: Tensor) -> Outputs:
        """Detects objects, see `InferenceModule.forward`; inputs may lie on the host.

        Raises:
            ValueError: if a weight has changed since the graphs were captured.
            RuntimeError: if a new graph does not answer as the eager detector does.
        """
        graph = self._graph_for(images)
        if graph is None:
            self._refuse_stale_weights()
            device = self._module.device
            return self._module(images.to(device), sizes_hw.to(device), original_sizes_hw.to(device))
        outputs = graph(images, sizes_hw, original_sizes_hw)
        self._refuse_stale_weights()  # while the device works
        scores, labels, boxes_xyxy = (tensor.clone() for tensor in outputs)
        return scores, labels, boxes_xyxy

    def capture_all(self) -> None:
        """Captures every bucket now, so that no later call waits for it; the largest first."""
        for bucket in sorted(self._buckets, key=lambda size: -size[0] * size[1]):
            if bucket not in self._graphs:
                self._capture(bucket)

    def recapture(self) -> None:
        """Forgets all graphs and takes the weights as they are now; buckets are captured anew when called."""
        self._graphs.clear()
        self._too_large.clear()
        self._places = _tensor_places(self._module)
        self._state = self._read_state()

    def _graph_for(self, images: Tensor) -> Captured | None:
        bucket = (images.shape[2], images.shape[3])
        if bucket in self._graphs and images.shape[0] == self._batch_size:
            self._graphs.move_to_end(bucket)
            return self._graphs[bucket]
        if bucket in self._buckets - self._too_large and images.shape[0] == self._batch_size:
            self._capture(bucket)
            if bucket in self._graphs:
                return self._graphs[bucket]
        if self.eager_calls == 0:
            logger.warning(
                "Inputs %s have no graph (buckets %s, %d images, cap %.0f MiB): computed eagerly, and counted",
                tuple(images.shape),
                sorted(self._buckets),
                self._batch_size,
                self._memory_cap_mib,
            )
        self.eager_calls += 1
        return None

    def _capture(self, bucket: Size) -> None:
        """Captures a bucket and checks it against the eager detector; keeps it if the cap allows."""
        self._refuse_stale_weights()
        device = self._module.device
        graph = self._record(self._module, example_inputs(bucket, self._batch_size, device))
        self.captures += 1
        found = measure(graph, self._module, bucket, self._batch_size, device, min_score=0.0)
        if not (found.difference.bitwise_equal and found.depends_on_input):
            raise RuntimeError(
                f"graph of bucket {bucket} must equal the eager detector bit for bit and depend on its input, got "
                f"{found}; run the checkpoint eagerly, and report it"
            )
        if graph.memory_mib > self._memory_cap_mib:
            self._too_large.add(bucket)
            logger.warning(
                "The graph of bucket %s needs %.0f MiB, over the cap of %.0f: it stays eager",
                bucket,
                graph.memory_mib,
                self._memory_cap_mib,
            )
            return
        while self.memory_mib + graph.memory_mib > self._memory_cap_mib:
            self._graphs.popitem(last=False)
        self._graphs[bucket] = graph

    def _refuse_stale_weights(self) -> None:
        state = self._read_state()
        if state == self._state:
            return
        pairs = zip(self._places, state, self._state, strict=True)
        changed = [place.name for place, now, then in pairs if now != then]
        raise ValueError(
            f"weights must be those that were captured, got {len(changed)} changed since ({', '.join(changed[:_SHOWN])}"
            f"{', ...' if len(changed) > _SHOWN else ''}); call recapture(), or load the artefact again"
        )

    def _read_state(self) -> list[tuple[int, int]]:
        """Returns address and version of every tensor; a write in place raises the version, a new tensor moves."""
        tensors = [place.tensors[place.key] for place in self._places]
        return [(tensor.data_ptr(), tensor._version) for tensor in tensors]


class TensorPlace(NamedTuple):
    """Where a parameter or buffer stands, so that one that was replaced is seen: its full name, its module's tensors
    and its key among them."""

    name: str
    tensors: Mapping[str, Any]
    key: str


def _tensor_places(module: nn.Module) -> list[TensorPlace]:
    return [
        TensorPlace(f"{prefix}.{key}", tensors, key)
        for prefix, layer in module.named_modules()
        for tensors in (layer._parameters, layer._buffers)
        for key, tensor in tensors.items()
        if tensor is not None
    ]


class CudaGraphFormat:
    """Writes the weights; graphs cannot be stored, and are captured and checked where the artefact is loaded."""

    name = "cuda_graph"
    needs_equality = True
    traces = False

    def __init__(self, *, memory_cap_mib: float) -> None:
        """Sets the memory that all graphs may keep together."""
        self.settings: dict[str, Any] = {"memory_cap_mib": memory_cap_mib}

    @property
    def device(self) -> torch.device:
        """The GPU.

        Raises:
            ValueError: if there is none.
        """
        if not torch.cuda.is_available():
            raise ValueError("format=cuda_graph must run on an NVIDIA GPU, got none; set format=onnx or format=aoti")
        return torch.device("cuda")

    def check(self, precision: Precision, backend: str) -> None:
        """Refuses nothing: whatever runs eagerly without waiting for the device can be captured."""

    def write(
        self, source: Source, module: InferenceModule, buckets: tuple[Size, ...], batch_size: int, folder: Path
    ) -> dict[Size, list[Outputs]]:
        """Writes the weights, captures and replays; see `models.export.build.Format`."""
        save_weights(source.weights, folder / WEIGHTS_FILE)
        graphed = GraphedDetector(module, buckets=buckets, batch_size=batch_size, **self.settings)
        return {bucket: collect_answers(graphed, bucket, batch_size, self.device) for bucket in buckets}
