"""Compiled regions: their results, their keys, and how often they are compiled."""

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from models.compilation import Region, compile_regions
from models.criterion import Criterion
from models.cuda_graphs import TrainingGraphs
from models.decoder import BoxRefinement
from models.deformable_detr import DeformableDetr
from models.position_encoding import SinePositionEncoding
from models.structures import DetectorOutput, EncoderProposals, ImageBatch, Targets

# Sizes (h, w) of images with the counts of targets of a batch: square, flat, of one row; no, one and many targets.
BATCHES = (
    ((64, 96), (3, 2)),
    ((64, 64), (4, 2)),
    ((96, 40), (0, 0)),
    ((72, 104), (1, 0)),
    ((40, 88), (12, 12)),
    ((120, 32), (7, 0)),
    ((56, 80), (6, 1)),
    ((88, 48), (40, 2)),
)
MOST_COMPILATIONS = 4
"""Of a region: its sizes as symbols, a size of 0, one of 1, and two sizes that happened to be equal at first."""


@pytest.fixture(autouse=True)
def forget_compilations() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    # TF32 rounds a difference in the last bit of an input up to one of a thousandth.
    with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):
        yield
    torch._dynamo.reset()


def draw(size: tuple[int, int], counts: tuple[int, ...]) -> tuple[ImageBatch, Targets]:
    generator = torch.Generator().manual_seed(size[0])
    padding_mask = torch.zeros(len(counts), *size, dtype=torch.bool)
    padding_mask[1, :, size[1] - 8 :] = True
    images = torch.randn(len(counts), 3, *size, generator=generator)
    labels = torch.randint(5, (sum(counts),), generator=generator)
    boxes_cxcywh = torch.rand(sum(counts), 4, generator=generator) * 0.4 + 0.3
    return ImageBatch(images, padding_mask), Targets(labels, boxes_cxcywh, counts)


def differentiate(detector: DeformableDetr, criterion: Criterion, batch: ImageBatch, targets: Targets) -> list[Tensor]:
    losses = criterion(detector(batch, targets), targets, lambda value: value)
    losses.total.backward()
    gradients = [parameter.grad for parameter in detector.parameters() if parameter.grad is not None]
    detector.zero_grad()
    return [losses.total.detach(), *losses.terms.values(), *gradients]


def check_batches(
    detector: DeformableDetr, criterion: Criterion, batches: tuple[tuple[tuple[int, int], tuple[int, ...]], ...]
) -> None:
    """Compares compiled and eager training passes, on the device of the detector."""
    device = next(detector.parameters()).device
    eager = copy.deepcopy(detector), copy.deepcopy(criterion)
    eager[0].graphs = TrainingGraphs(enabled=False, max_sizes=1)
    assert not any(module._compiled for part in eager for module in part.modules() if isinstance(module, Region))
    for size, counts in batches:
        batch, targets = draw(size, counts)
        batch = ImageBatch(batch.images.to(device), batch.padding_mask.to(device))
        targets = Targets(targets.labels.to(device), targets.boxes_cxcywh.to(device), counts)
        results = differentiate(detector, criterion, batch, targets)
        expected = differentiate(*eager, batch, targets)
        assert len(results) == len(expected)
        for actual, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=1e-4 * max(1.0, wanted.abs().max().item()))


def test_few_compilations_over_many_sizes(make_detector: Callable[..., DeformableDetr], criterion: Criterion) -> None:
    detector = make_detector(box_refine=True, two_stage=True)
    keys = list(detector.state_dict())
    regions = [module for part in (detector, criterion) for module in part.modules() if isinstance(module, Region)]
    assert len(regions) == 5  # positions, boxes of the decoder, costs, focal loss, losses of boxes
    for part in (detector, criterion):
        compile_regions(part, backend="aot_eager")
    assert list(detector.state_dict()) == keys
    check_batches(detector, criterion, BATCHES)
    assert len(regions) <= counters["stats"]["unique_graphs"] <= MOST_COMPILATIONS * len(regions)
    compiled = counters["stats"]["unique_graphs"]
    check_batches(detector, criterion, (((80, 56), (9, 3)), ((112, 64), (8, 30)), BATCHES[2], BATCHES[0]))
    assert counters["stats"]["unique_graphs"] == compiled


def run_regions(criterion: Criterion, positions: SinePositionEncoding, refine: BoxRefinement) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 2, 20, 5, generator=generator, requires_grad=True)
    delta = torch.randn(2, 2, 20, 4, generator=generator, requires_grad=True)
    reference_points = torch.rand(2, 2, 20, 2, generator=generator)
    batch, targets = draw((6, 9), (3, 4))
    boxes_cxcywh = refine(delta, reference_points)
    proposals = EncoderProposals(logits[0], boxes_cxcywh[0], class_agnostic=True)
    losses = criterion(DetectorOutput(logits, boxes_cxcywh, proposals), targets, lambda value: value)
    return [losses.total, *torch.autograd.grad(losses.total, (logits, delta)), positions(batch.padding_mask)]


def test_kernels_of_inductor_agree(criterion: Criterion) -> None:
    positions = SinePositionEncoding(channels=32, temperature=10000, offset=-0.5)
    refine = BoxRefinement(1e-5)
    expected = run_regions(criterion, positions, refine)
    for part in (criterion, positions, refine):
        compile_regions(part)
    for actual, wanted in zip(run_regions(criterion, positions, refine), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] >= 5


@pytest.mark.gpu
def test_inductor_on_a_gpu(make_detector: Callable[..., DeformableDetr], criterion: Criterion) -> None:
    detector = make_detector(box_refine=True).cuda()  # one-stage: rounding must not choose other proposals
    for part in (detector, criterion):
        compile_regions(part)
    check_batches(detector, criterion, BATCHES)
    assert counters["stats"]["unique_graphs"] <= MOST_COMPILATIONS * 5


@pytest.mark.gpu
def test_graphs_take_compiled_regions_in(make_detector: Callable[..., DeformableDetr], criterion: Criterion) -> None:
    detector = make_detector(box_refine=True, backend="triton").cuda()
    detector.graphs = TrainingGraphs(enabled=True, max_sizes=4)
    for part in (detector, criterion):
        compile_regions(part)
    check_batches(detector, criterion, (*BATCHES[:4], *BATCHES[:4]))
    assert detector.graphs.captures == 4


def test_a_compiled_region_answers_wrongly_where_its_function_does() -> None:
    refine = BoxRefinement(1e-5)
    broken = copy.deepcopy(refine)
    broken.inverse_sigmoid_eps = 0.3
    for region in (refine, broken):
        compile_regions(region, backend="aot_eager")
    points, delta = torch.full((3, 2), 0.1), torch.zeros(3, 4)
    assert (refine(delta, points) - broken(delta, points)).abs().max() > 0.1


def test_copies_are_eager() -> None:
    refine = BoxRefinement(1e-5)
    compile_regions(refine, backend="aot_eager")
    for twin in (copy.deepcopy(refine), pickle.loads(pickle.dumps(refine))):
        assert twin._compiled is None
        assert twin.inverse_sigmoid_eps == 1e-5
