"""The cache of captured passes with a stand-in for CUDA; `test_cuda_graphs_gpu.py` has the graphs themselves."""

import copy
import logging
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.criterion import Criterion
from models.cuda_graphs import TrainingGraphs
from models.cuda_pass import FlatRegion, GradientBuffers, restoring_buffers
from models.structures import Detections, DetectorOutput, EncoderProposals, ImageBatch, Targets, take_apart


class EagerPass:
    """Runs what a graph would replay, on static tensors, eagerly."""

    def __init__(
        self, region: FlatRegion, inputs: Sequence[Tensor], module: nn.Module, gradients: GradientBuffers
    ) -> None:
        self._region, self._gradients = region, gradients
        self._inputs = [tensor.clone() for tensor in inputs]
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        with restoring_buffers(module):
            outputs = region(self._inputs)
            trained = [output.sum() for output in outputs if output.requires_grad]
            found = torch.autograd.grad(trained, parameters, allow_unused=True)
        self.differentiable = [output.requires_grad for output in outputs]
        self._outputs = [output.detach().clone() for output in outputs]
        self.parameters = [parameter for parameter, grad in zip(parameters, found, strict=True) if grad is not None]

        for buffer in gradients.of(self.parameters):
            buffer.fill_(torch.nan)  # as warming up leaves them: with other numbers

    def forward(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        for static, given in zip(self._inputs, inputs, strict=True):
            static.copy_(given)
        with torch.enable_grad():
            self._attached = self._region(self._inputs)
        for static, output in zip(self._outputs, self._attached, strict=True):
            static.copy_(output.detach())
        return self._outputs

    def backward(self, gradients: Sequence[Tensor]) -> None:
        trained = [output for output in self._attached if output.requires_grad]
        found = torch.autograd.grad(trained, self.parameters, gradients)
        for buffer, gradient in zip(self._gradients.of(self.parameters), found, strict=True):
            buffer.copy_(gradient)


class StillPass(EagerPass):
    """Answers with what it computed when it was made."""

    def forward(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._outputs


def make_graphs(max_sizes: int = 2) -> TrainingGraphs:
    return TrainingGraphs(enabled=True, max_sizes=max_sizes, make_capture=lambda device: EagerPass)


class Line(nn.Module):
    """A region with a parameter, an unused one and a count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor([3.0]))
        self.unused = nn.Parameter(torch.zeros(1))
        self.calls = 0

    def region(self, inputs: tuple[Tensor]) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return inputs[0] * self.slope, inputs[0] > 0

    def run(self, graphs: TrainingGraphs, *values: float) -> tuple[Tensor, Tensor]:
        return graphs.run(self, self.region, (torch.tensor(values),))


def test_gradients_add_up_as_backward_adds_them() -> None:
    line, graphs = Line(), make_graphs()
    for total in (5.0, 10.0):
        product, positive = line.run(graphs, 2.0, 3.0)
        assert product.tolist() == [6.0, 9.0]
        assert not positive.requires_grad
        product.sum().backward()
        assert line.slope.grad is not None
        assert line.slope.grad.item() == total
    assert line.unused.grad is None
    eager = line.slope.grad.clone()  # as left by a size that computes eagerly
    line.slope.grad = eager
    line.run(graphs, 1.0, 1.0)[0].sum().backward()
    assert line.slope.grad.item() == 12.0
    assert eager.item() == 10.0
    assert graphs.captures == 1


def test_a_capture_leaves_accumulated_gradients_alone() -> None:
    line, graphs = Line(), make_graphs()
    for values in ((2.0,), (1.0, 1.0), (3.0,)):
        line.run(graphs, *values)[0].sum().backward()
    assert graphs.captures == 2
    assert line.slope.grad is not None
    assert line.slope.grad.item() == 7.0


def test_a_backward_pass_after_another_forward_pass_is_refused() -> None:
    line, graphs = Line(), make_graphs()
    first, _ = line.run(graphs, 1.0)
    line.run(graphs, 1.0, 2.0)
    with pytest.raises(RuntimeError, match="backward must come before the next forward pass with cuda_graphs=true"):
        first.sum().backward()


def test_the_first_sizes_are_kept_until_another_has_come_often(caplog: pytest.LogCaptureFixture) -> None:
    line, graphs = Line(), make_graphs(max_sizes=2)
    with caplog.at_level(logging.INFO):
        for size in (1, 2, 3, 2, 1, 3):
            line.run(graphs, *[1.0] * size)
    assert (graphs.captures, graphs.eager_passes) == (2, 2)
    assert [key[0][0][0][0] for key in graphs.captured] == [2, 1]
    assert caplog.text.count("Captured the training pass") == 2
    assert caplog.text.count("More than 2 sizes") == 1
    for _ in range(6):  # the eighth time since size 2 was used, but for the first of those eight
        line.run(graphs, 1.0, 1.0, 1.0)
    assert graphs.captures == 2
    line.run(graphs, 1.0, 1.0, 1.0)
    assert graphs.captures == 3
    assert [key[0][0][0][0] for key in graphs.captured] == [1, 3]


def test_many_sizes_do_not_push_each_other_out() -> None:
    line, graphs = Line(), make_graphs(max_sizes=4)
    generator = torch.Generator().manual_seed(0)
    for size in torch.randint(1, 51, (2000,), generator=generator).tolist():
        line.run(graphs, *[1.0] * size)
    assert graphs.captures < 30


def test_evaluation_and_disabled_graphs_compute_eagerly() -> None:
    line, graphs = Line(), make_graphs()
    with torch.no_grad():
        line.run(graphs, 1.0)
    line.eval().run(graphs, 1.0)
    Line().train().run(TrainingGraphs(enabled=False, max_sizes=1), 1.0)
    assert graphs.captures == 0


def test_moved_weights_and_frozen_ones_are_captured_anew() -> None:
    line, graphs = Line(), make_graphs()
    line.run(graphs, 1.0)
    with torch.no_grad():
        line.slope.mul_(2)
    assert line.run(graphs, 1.0)[0].item() == 6.0
    assert graphs.captures == 1
    line.slope.data = torch.tensor([4.0])
    assert line.run(graphs, 1.0)[0].item() == 4.0
    assert graphs.captures == 2
    line.unused.requires_grad_(False)
    line.run(graphs, 1.0)
    assert graphs.captures == 3


def test_another_autocast_is_another_pass() -> None:
    line, graphs = Line(), make_graphs()
    line.run(graphs, 1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        line.run(graphs, 1.0)
    assert graphs.captures == 2


def test_copies_start_empty() -> None:
    line, graphs = Line(), TrainingGraphs(enabled=True, max_sizes=3)
    for other in (copy.deepcopy(graphs), pickle.loads(pickle.dumps(graphs))):
        assert (other.enabled, other.max_sizes, other.captured) == (True, 3, ())
    with pytest.raises(
        ValueError, match="cuda_graphs must be false without an NVIDIA GPU, got true for tensors on cpu"
    ):
        line.run(graphs, 1.0)
    with pytest.raises(ValueError, match="max_sizes must be at least 1, got 0"):
        TrainingGraphs(enabled=True, max_sizes=0)


def test_records_are_rebuilt_of_other_tensors() -> None:
    proposals = EncoderProposals(torch.zeros(1), torch.zeros(2), class_agnostic=True)
    record = (DetectorOutput(torch.zeros(3), torch.zeros(4), proposals), (5, "six"))
    tensors, rebuild = take_apart(record)
    assert [tensor.numel() for tensor in tensors] == [3, 4, 1, 2]
    others = [tensor + 1 for tensor in tensors]
    output, rest = rebuild(iter(others))
    assert rest == (5, "six")
    assert output.denoising is None
    assert output.proposals.class_agnostic
    assert output.boxes_cxcywh is others[1]
    assert take_apart(Detections(*others[:3]))[0][2] is others[2]


@pytest.mark.parametrize("variant", ["base", "two_stage", "dino"])
def test_detectors_learn_the_same_through_the_cache(
    variant: str,
    make_detector: Callable[..., Any],
    make_dino: Callable[..., Any],
    make_batch: Callable[..., ImageBatch],
    one_target: Targets,
    weigh_outputs: Callable[[DetectorOutput], Tensor],
    gradients_of: Callable[[nn.Module], dict[str, Tensor]],
    differing: Callable[..., dict[str, float]],
) -> None:
    def make() -> nn.Module:
        if variant == "dino":
            return make_dino()
        return make_detector(box_refine=variant == "two_stage", two_stage=variant == "two_stage")

    results = []
    for graphs in (TrainingGraphs(enabled=False, max_sizes=1), make_graphs()):
        model = make().train()
        model.graphs = graphs
        for seed in range(2):
            torch.manual_seed(seed)
            weigh_outputs(model(make_batch(seed=seed), one_target)).backward()
        results.append((gradients_of(model), dict(model.named_buffers())))
    assert graphs.captures == 1
    (expected, expected_buffers), (found, buffers) = results
    assert differing(found, expected) == {}
    assert all(torch.equal(buffers[name], buffer) for name, buffer in expected_buffers.items())


@pytest.mark.parametrize("variant", ["base", "two_stage", "dino"])
def test_a_replay_leaves_no_module_to_eager_code(
    variant: str,
    make_detector: Callable[..., Any],
    make_dino: Callable[..., Any],
    make_batch: Callable[..., ImageBatch],
) -> None:
    two_stage = variant == "two_stage"
    model = (make_dino() if variant == "dino" else make_detector(two_stage, two_stage=two_stage)).train()
    called: list[nn.Module] = []
    for module in model.children():
        for part in module.modules():
            part.register_forward_hook(lambda part, inputs, output: called.append(part))
    model.graphs = TrainingGraphs(enabled=True, max_sizes=1, make_capture=lambda device: StillPass)
    model(make_batch(), make_targets(1, 0))
    assert called, "the control: capturing calls them"
    called.clear()
    model(make_batch(seed=1), make_targets(2, 4))
    assert called == []
    assert model.graphs.captures == 1


def make_targets(*counts: int) -> Targets:
    generator = torch.Generator().manual_seed(2)
    centers, sizes = torch.rand(sum(counts), 2, generator=generator) * 0.4 + 0.3, torch.full((sum(counts), 2), 0.3)
    return Targets(torch.arange(sum(counts)) % 5, torch.cat((centers, sizes), dim=1), counts)


def test_dino_learns_the_same_from_any_numbers_of_targets(
    make_dino: Callable[..., Any],
    make_batch: Callable[..., ImageBatch],
    criterion: Criterion,
    gradients_of: Callable[[nn.Module], dict[str, Tensor]],
    differing: Callable[..., dict[str, float]],
) -> None:
    counts = [(1, 0), (0, 0), (4, 2), (7, 1), (0, 3), (7, 7), (30, 1)]
    results = []
    for graphs in (TrainingGraphs(enabled=False, max_sizes=1), make_graphs(max_sizes=3)):
        model, found = make_dino().train(), {}
        model.graphs = graphs
        for step, numbers in enumerate(counts):
            torch.manual_seed(step)
            targets = make_targets(*numbers)
            output = model(make_batch(seed=step), targets)
            losses = criterion(output, targets, lambda count: count)
            model.zero_grad()
            losses.total.backward()
            tensors = {f"output {index}": tensor.detach() for index, tensor in enumerate(take_apart(output)[0])}
            computed = tensors | losses.terms | gradients_of(model)
            found |= {f"{numbers} {name}": tensor.clone() for name, tensor in computed.items()}
        results.append(found)
    assert (graphs.captures, graphs.eager_passes) == (3, 0), "12, 24 and 40 denoising queries"
    assert differing(results[1], results[0]) == {}
    gradient = "label_enc.weight"
    assert not torch.equal(results[0][f"(7, 1) {gradient}"], results[0][f"(7, 7) {gradient}"]), "the control"
