import torch

from models.proposals import embed_boxes, pixel_proposals
from models.structures import LevelGeometry


def make_levels(padding_mask: torch.Tensor, valid_ratios: torch.Tensor) -> LevelGeometry:
    return LevelGeometry(padding_mask, ((2, 4), (1, 2)), valid_ratios)


def test_boxes_by_hand() -> None:
    logits, valid = pixel_proposals(make_levels(torch.zeros(1, 10, dtype=torch.bool), torch.ones(1, 2, 2)))
    assert valid.all()
    boxes = logits.sigmoid()[0]
    torch.testing.assert_close(boxes[1], torch.tensor([0.375, 0.25, 0.05, 0.05]))
    torch.testing.assert_close(boxes[4], torch.tensor([0.125, 0.75, 0.05, 0.05]))
    torch.testing.assert_close(boxes[9], torch.tensor([0.75, 0.5, 0.1, 0.1]))


def test_padding_and_borders_are_invalid() -> None:
    padding_mask = torch.tensor([[False, False, True, True] * 2 + [False, True]])
    valid_ratios = torch.tensor([[[0.5, 1.0], [0.5, 1.0]]])
    logits, valid = pixel_proposals(make_levels(padding_mask, valid_ratios))
    assert torch.equal(valid, ~padding_mask)
    torch.testing.assert_close(logits.sigmoid()[0, 1], torch.tensor([0.75, 0.25, 0.05, 0.05]))
    assert (logits[0, 2] == torch.inf).all()


def test_centres_outside_the_range_are_invalid() -> None:
    levels = LevelGeometry(torch.zeros(1, 64, dtype=torch.bool), ((1, 64),), torch.ones(1, 1, 2))
    _, valid = pixel_proposals(levels)
    assert valid[0].tolist() == [False] + [True] * 62 + [False]


def test_embedding_encodes_each_number_in_turn() -> None:
    embedding = embed_boxes(torch.tensor([0.0, 0.25, 0.5, 0.75]), 2)
    torch.testing.assert_close(embedding, torch.tensor([0.0, 1, 1, 0, 0, -1, -1, 0]), atol=1e-6, rtol=0)
