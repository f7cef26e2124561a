"""The cache of captured passes with a stand-in for CUDA, and the graphs themselves on a GPU."""

import copy
import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from models.criterion import Criterion
from models.cuda_graphs import TrainingGraphs
from models.cuda_pass import FlatRegion, GradientBuffers, restoring_buffers
from models.detector import Detector
from models.layers.residual_norm import ResidualNorm
from models.normalization import ImageNormalizer
from models.optimization import AdamWSettings, StepSchedule
from models.structures import Detections, DetectorOutput, EncoderProposals, ImageBatch, Targets, take_apart

TARGETS = Targets(torch.tensor([1]), torch.tensor([[0.5, 0.5, 0.2, 0.2]]), (1, 0))


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


def make_graphs(max_sizes: int = 2) -> TrainingGraphs:
    return TrainingGraphs(enabled=True, max_sizes=max_sizes, make_capture=lambda device: EagerPass)


def make_batch(height: int = 64, seed: int = 0) -> ImageBatch:
    generator = torch.Generator().manual_seed(seed)
    padding_mask = torch.zeros(2, height, 64, dtype=torch.bool)
    padding_mask[1, :, 48:] = True
    images = torch.randn(2, 3, height, 64, generator=generator)
    return ImageBatch(images.masked_fill(padding_mask.unsqueeze(1), 0.0), padding_mask)


def weigh_outputs(output: DetectorOutput) -> Tensor:
    """Returns a loss to which every differentiable output adds, each number with a weight of its own."""
    generator = torch.Generator().manual_seed(1)
    tensors = [tensor for tensor in take_apart(output)[0] if tensor.requires_grad]
    weights = [torch.randn(tensor.shape, generator=generator).to(tensor.device) for tensor in tensors]
    return torch.stack([(tensor * weight).sum() for tensor, weight in zip(tensors, weights, strict=True)]).sum()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Returns the largest difference of each gradient that is not equal bit for bit, or is in one of them alone."""
    names = found.keys() ^ expected.keys()
    unequal = {name for name in found.keys() & expected.keys() if not torch.equal(found[name], expected[name])}
    return dict.fromkeys(names, float("inf")) | {
        name: float((found[name] - expected[name]).abs().max()) for name in unequal
    }


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
    variant: str, make_detector: Callable[..., Any], make_dino: Callable[..., Any]
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
            weigh_outputs(model(make_batch(seed=seed), TARGETS)).backward()
        results.append((gradients_of(model), dict(model.named_buffers())))
    assert graphs.captures == 1
    (expected, expected_buffers), (found, buffers) = results
    assert differing(found, expected) == {}
    assert all(torch.equal(buffers[name], buffer) for name, buffer in expected_buffers.items())


WIDE = {"d_model": 256, "num_heads": 8, "num_encoder_points": 4, "num_decoder_points": 4}
GPU_CASES = [
    ("base", torch.float32, {}),
    ("base", torch.bfloat16, {}),
    ("base", torch.bfloat16, WIDE),
    ("two_stage", torch.bfloat16, {}),
    ("dino", torch.bfloat16, {}),
]


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Sums in a fixed order, where PyTorch has such; it warns of the rest."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def train_on_gpu(model: nn.Module, dtype: torch.dtype, batches: Sequence[ImageBatch]) -> list[dict[str, Tensor]]:
    """Returns outputs and gradients of a step on each batch, without updates, and the buffers after the last."""
    targets = Targets(TARGETS.labels.cuda(), TARGETS.boxes_cxcywh.cuda(), TARGETS.counts)
    results = []
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)  # the noise of DINO's denoising queries
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            output = model(ImageBatch(batch.images.cuda(), batch.padding_mask.cuda()), targets)
        model.zero_grad(set_to_none=True)
        weigh_outputs(output).backward()
        tensors = {f"output {index}": tensor.detach().clone() for index, tensor in enumerate(take_apart(output)[0])}
        results.append(tensors | gradients_of(model))
    return [*results, {name: buffer.clone() for name, buffer in model.named_buffers()}]


@pytest.mark.gpu
@pytest.mark.parametrize(("variant", "dtype", "overrides"), GPU_CASES)
def test_graphs_compute_the_same_bits_as_eager_code(
    variant: str,
    dtype: torch.dtype,
    overrides: dict[str, Any],
    deterministic: None,
    make_detector: Callable[..., Any],
    make_dino: Callable[..., Any],
) -> None:
    def make() -> nn.Module:
        if variant == "dino":
            return make_dino(backend="triton", **overrides).cuda().train()
        two_stage = variant == "two_stage"
        return make_detector(two_stage, two_stage=two_stage, backend="triton", **overrides).cuda().train()

    batches = [make_batch(128, seed=0), make_batch(128, seed=1), make_batch(64, seed=2), make_batch(128, seed=3)]
    expected, repeated = (train_on_gpu(make(), dtype, batches) for _ in range(2))
    model = make()
    model.graphs = TrainingGraphs(enabled=True, max_sizes=4)
    found = train_on_gpu(model, dtype, batches)
    assert model.graphs.captures == 2
    for step, (one, two, three) in enumerate(zip(expected, repeated, found, strict=True)):
        unstable = differing(two, one)
        assert len(unstable) <= 0.1 * len(one), f"eager code differs from itself in step {step}: {unstable}"
        wrong = {name: size for name, size in differing(three, one).items() if name not in unstable}
        assert wrong == {}, f"step {step}: {len(wrong)} of {len(one)} tensors differ"
    assert differing(found[0], found[1]), "the control: another batch has other gradients"


class Dropping(nn.Module):
    """A region that drops half of its numbers, by PyTorch's dropout or in the fused norm."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.norm = ResidualNorm(32, dropout=0.5, fused=True) if fused else None

    def region(self, inputs: tuple[Tensor]) -> tuple[Tensor]:
        scaled = inputs[0] * self.scale
        if self.norm is None:
            return (nn.functional.dropout(scaled, 0.5, self.training),)
        return (self.norm(torch.zeros_like(scaled), scaled, scaled.dtype),)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_each_replay_draws_its_own_dropout(fused: bool) -> None:
    module, graphs = Dropping(fused).cuda().train(), TrainingGraphs(enabled=True, max_sizes=1)
    ones = torch.ones(64, 32, device="cuda")
    outputs = []
    torch.manual_seed(0)
    for _ in range(4):
        module.zero_grad(set_to_none=True)
        (output,) = graphs.run(module, module.region, (ones,))
        output.sum().backward()
        outputs.append(output.detach().clone())
        assert module.scale.grad is not None
        if not fused:  # the backward pass drops what the forward pass has dropped
            assert module.scale.grad.item() == pytest.approx(output.sum().item())
            assert 0.4 < (output == 0).float().mean().item() < 0.6
    assert graphs.captures == 1
    for index, output in enumerate(outputs):
        assert not any(torch.equal(output, other) for other in outputs[:index]), f"replay {index} repeats another one"
    torch.manual_seed(0)
    (again,) = graphs.run(module, module.region, (ones,))
    assert torch.equal(again, outputs[0]), "the seed decides, and capturing draws nothing from it"


@pytest.mark.gpu
def test_sizes_share_memory_and_leave_in_turn(make_detector: Callable[..., Any]) -> None:
    model = make_detector(False, backend="triton").cuda().train()
    model.graphs = TrainingGraphs(enabled=True, max_sizes=3)
    torch.cuda.empty_cache()
    before, reserved = torch.cuda.memory_reserved(), []
    for height in (1024, 960, 896):
        train_on_gpu(model, torch.float32, [make_batch(height)])
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved() - before)
    assert reserved[2] - reserved[0] <= 0.6 * reserved[0], f"bytes reserved after each size: {reserved}"

    model.graphs = TrainingGraphs(enabled=True, max_sizes=1)
    heights = [128] * 2 + [64] * 10 + [128] * 10
    train_on_gpu(model, torch.float32, [make_batch(height) for height in heights])
    assert model.graphs.captures == 3
    assert model.graphs.eager_passes == 14


@pytest.mark.gpu
def test_a_trainer_trains_by_graphs(make_detector: Callable[..., Any], criterion: Criterion) -> None:
    model = make_detector(True, two_stage=True, backend="triton")
    model.graphs = TrainingGraphs(enabled=True, max_sizes=2)
    detector = Detector(
        model=model,
        criterion=criterion,
        normalizer=ImageNormalizer(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
        optimizer=AdamWSettings(
            lr=1e-3,
            backbone_lr=1e-3,
            slow_factor=0.1,
            slow_modules=(),
            backbone_prefix="backbone",
            weight_decay=0.0,
            fused=True,
        ),
        schedule=StepSchedule(milestones=(9,), gamma=0.1, warmup_steps=0),
        top_k=10,
    )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=2,
        precision="bf16-mixed",
        gradient_clip_val=0.1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    samples = [
        {
            "images": torch.randint(256, (2, 3, height, 64), dtype=torch.uint8),
            "padding_mask": torch.zeros(2, height, 64, dtype=torch.bool),
            "labels": torch.tensor([1]),
            "boxes_cxcywh": torch.tensor([[0.5, 0.5, 0.3, 0.2]]),
            "num_targets": (1, 0),
            "image_ids": (0, 1),
        }
        for height in (64, 96, 64, 64)
    ]
    # Batches pinned by a thread of the loader, while passes are captured.
    trainer.fit(detector, DataLoader(samples, batch_size=None, num_workers=1, pin_memory=True))
    assert (model.graphs.captures, model.graphs.eager_passes, trainer.global_step) == (2, 0, 8)
    parameters = {name: parameter.cpu() for name, parameter in model.named_parameters()}
    assert [name for name, parameter in parameters.items() if torch.equal(parameter, before[name])] == []
    assert all(parameter.isfinite().all() for parameter in parameters.values())
