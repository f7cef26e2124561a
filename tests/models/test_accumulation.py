"""k batches of b images have the gradient of one batch of k * b: in the rule, and in a detector."""

import pytest
import torch

from models.accumulation import TargetWeighting
from models.structures import ImageBatch, Targets
from parity.tolerances import FLOAT32_ROUNDOFF, GRADIENT


def loss_of(weight, features, num_targets):
    return (weight * features).sum() / max(num_targets, 1)


def test_the_average_is_that_of_all_targets():
    features, counts = torch.arange(1.0, 13.0).split([2, 0, 3, 7]), (2, 0, 3, 7)
    whole = torch.ones((), dtype=torch.float64, requires_grad=True)
    loss_of(whole, torch.cat(features).double(), sum(counts)).backward()
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    weighting = TargetWeighting()
    for part, count in zip(features, counts, strict=True):
        loss = loss_of(weight, part.double(), count)
        (weighting.weigh(loss, torch.tensor(float(count))) / len(counts)).backward()
    weighting.average([weight.grad], len(counts))
    assert weight.grad.item() == pytest.approx(whole.grad.item(), rel=2 * FLOAT32_ROUNDOFF)  # the counts are float32


def test_windows_without_targets_keep_the_background():
    weight = torch.ones((), requires_grad=True)
    weighting = TargetWeighting()
    for _ in range(2):
        (weighting.weigh(3 * weight, torch.tensor(0.0)) / 2).backward()
    weighting.average([weight.grad], 2)
    assert weight.grad.item() == 6  # a batch without targets divides by 1, and so does one of twice the size


COUNTS = (5, 0, 1, 2)


def gradients(model, criterion, order, batch_size, weigh):
    """Gradients of a detector after a window of batches of the four images, in some order."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(4, 3, 64, 64, generator=generator)
    labels = torch.randint(0, 3, (sum(COUNTS),), generator=generator).split(COUNTS)
    boxes = (torch.rand(sum(COUNTS), 4, generator=generator) * 0.4 + 0.3).split(COUNTS)
    model.zero_grad()
    weighting, num_batches = TargetWeighting(), len(order) // batch_size
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        counts = tuple(COUNTS[place] for place in chosen)
        targets = Targets(torch.cat([labels[i] for i in chosen]), torch.cat([boxes[i] for i in chosen]), counts)
        batch = ImageBatch(images[list(chosen)], torch.zeros(len(chosen), 64, 64, dtype=torch.bool))
        total = criterion(model(batch, targets), targets, lambda value: value).total
        if weigh:
            total = weighting.weigh(total, torch.tensor(float(sum(counts))))
        (total / num_batches).backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if weigh:
        weighting.average(found, num_batches)
    return torch.cat([gradient.flatten() for gradient in found]).clone()


def test_a_detector_learns_the_same_from_small_batches(make_detector, criterion):
    """The bound: a multiple of what another order of the images changes, which is rounding alone."""
    model = make_detector(box_refine=True, two_stage=True)
    model.backbone.eval()  # statistics of a batch are no matter of the loss
    expected = gradients(model, criterion, (0, 1, 2, 3), 4, weigh=False)
    competitor = gradients(model, criterion, (3, 1, 0, 2), 4, weigh=False)
    rounding = (competitor - expected).norm().item()
    limit = GRADIENT.limit(rounding, expected.norm().item(), torch.float32)
    errors = {
        weigh: (gradients(model, criterion, (0, 1, 2, 3), 2, weigh=weigh) - expected).norm().item()
        for weigh in (True, False)
    }
    assert errors[True] <= limit
    assert errors[False] > 100 * limit
