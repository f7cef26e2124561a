"""CUDA graphs of training passes compute what eager code does, and a trainer trains by them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from models.criterion import Criterion
from models.cuda_graphs import TrainingGraphs
from models.denoising import ContrastiveDenoising
from models.detector import Detector
from models.layers.residual_norm import ResidualNorm
from models.normalization import ImageNormalizer
from models.optimization import AdamWSettings, StepSchedule
from models.structures import DetectorOutput, ImageBatch, Targets, take_apart

pytestmark = pytest.mark.gpu

WIDE = {"d_model": 256, "num_heads": 8, "num_encoder_points": 4, "num_decoder_points": 4}
GPU_CASES = [
    ("base", torch.float32, {}),
    ("base", torch.bfloat16, {}),
    ("base", torch.bfloat16, WIDE),
    ("two_stage", torch.bfloat16, {}),
    ("dino", torch.bfloat16, {}),
]
# Of the targets of two images in each step: DINO has 12 denoising queries an image, and 24 in the last step.
NUMBERS = ((1, 0), (0, 1), (0, 0), (7, 1))
TrainOnGpu = Callable[[nn.Module, torch.dtype, Sequence[ImageBatch]], list[dict[str, Tensor]]]


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Sums in a fixed order, where PyTorch has such; it warns of the rest."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def train_on_gpu(
    weigh_outputs: Callable[[DetectorOutput], Tensor],
    gradients_of: Callable[[nn.Module], dict[str, Tensor]],
) -> TrainOnGpu:
    """Returns outputs and gradients of a step on each batch, without updates, and the buffers after the last."""

    def train(model: nn.Module, dtype: torch.dtype, batches: Sequence[ImageBatch]) -> list[dict[str, Tensor]]:
        results = []
        for seed, batch in enumerate(batches):
            counts = NUMBERS[seed % len(NUMBERS)]
            labels = torch.arange(sum(counts), device="cuda") % 5
            targets = Targets(labels, torch.full((sum(counts), 4), 0.3, device="cuda"), counts)
            torch.manual_seed(seed)  # the noise of DINO's denoising queries
            with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
                output = model(ImageBatch(batch.images.cuda(), batch.padding_mask.cuda()), targets)
            model.zero_grad(set_to_none=True)
            weigh_outputs(output).backward()
            outputs = {f"output {index}": tensor.detach().clone() for index, tensor in enumerate(take_apart(output)[0])}
            results.append(outputs | gradients_of(model))
        return [*results, {name: buffer.clone() for name, buffer in model.named_buffers()}]

    return train


@pytest.mark.parametrize(("variant", "dtype", "overrides"), GPU_CASES)
def test_graphs_compute_the_same_bits_as_eager_code(
    variant: str,
    dtype: torch.dtype,
    overrides: dict[str, Any],
    deterministic: None,
    make_detector: Callable[..., Any],
    make_dino: Callable[..., Any],
    make_batch: Callable[..., ImageBatch],
    train_on_gpu: TrainOnGpu,
    differing: Callable[..., dict[str, float]],
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
    assert model.graphs.captures == (3 if variant == "dino" else 2)
    for step, (one, two, three) in enumerate(zip(expected, repeated, found, strict=True)):
        unstable = differing(two, one)
        assert len(unstable) <= 0.1 * len(one), f"eager code differs from itself in step {step}: {unstable}"
        wrong = {name: size for name, size in differing(three, one).items() if name not in unstable}
        assert wrong == {}, f"step {step}: {len(wrong)} of {len(one)} tensors differ"
    assert differing(found[0], found[1]), "the control: another batch has other gradients"


def test_the_gradient_of_many_noised_labels_is_captured(
    deterministic: None,
    make_dino: Callable[..., Any],
    make_batch: Callable[..., ImageBatch],
    train_on_gpu: TrainOnGpu,
) -> None:
    gradients = []
    for enabled in (False, True):
        model = make_dino(backend="triton").cuda().train()
        # PyTorch sorts labels from 3073 on to sum their gradients.
        model.denoising = ContrastiveDenoising(
            num_queries=800, max_queries=1600, label_noise_ratio=0.5, box_noise_scale=1.0
        )
        model.graphs = TrainingGraphs(enabled=enabled, max_sizes=1)
        gradients.append(
            [step["label_enc.weight"] for step in train_on_gpu(model, torch.float32, [make_batch()] * 2)[:2]]
        )
        assert model.graphs.captures == int(enabled)
    eager, replayed = gradients
    assert all(torch.equal(*pair) for pair in zip(eager, replayed, strict=True))
    assert not torch.equal(replayed[0], replayed[1]), "the control: other targets and noise"


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


def test_sizes_share_memory_and_leave_in_turn(
    make_detector: Callable[..., Any], make_batch: Callable[..., ImageBatch], train_on_gpu: TrainOnGpu
) -> None:
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
