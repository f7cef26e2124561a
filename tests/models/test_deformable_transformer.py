from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from models.deformable_detr import DeformableDetr
from models.deformable_transformer import valid_ratio
from models.structures import ImageBatch


def test_valid_ratio_by_hand() -> None:
    padding_mask = torch.ones(1, 4, 8, dtype=torch.bool)
    padding_mask[0, :3, :2] = False
    assert valid_ratio(padding_mask).tolist() == [[0.25, 0.75]]


def test_matrices_are_xavier_and_level_embedding_normal(make_detector: Callable[..., DeformableDetr]) -> None:
    transformer = make_detector(box_refine=False, d_model=128).transformer
    for matrix in (
        transformer.encoder.layers[1].linear1.weight,
        transformer.decoder.layers[2].self_attn.in_proj_weight,
        transformer.decoder.layers[0].self_attn.out_proj.weight,
        transformer.reference_points.weight,
    ):
        bound = (6 / sum(matrix.shape)) ** 0.5
        assert 0.9 * bound < matrix.abs().max() <= bound
    assert transformer.reference_points.bias.abs().max() == 0
    assert transformer.level_embed.std().item() == pytest.approx(1, abs=0.1)
    for layer in transformer.decoder.layers:
        assert layer.cross_attn.sampling_offsets.weight.abs().max() == 0


def test_best_proposals_become_queries(make_detector: Callable[..., DeformableDetr], image_batch: ImageBatch) -> None:
    model = make_detector(box_refine=True, two_stage=True).eval()
    seen = []
    model.transformer.decoder.register_forward_hook(lambda module, inputs, output: seen.append(inputs[2]))
    proposals = model(image_batch).proposals
    assert proposals is not None
    best = proposals.logits[..., 0].topk(11, dim=1).indices
    for image in range(2):
        assert torch.equal(seen[0][image], proposals.boxes_cxcywh[image, best[image]])
    assert not seen[0].requires_grad


def test_more_queries_than_proposals_are_refused(make_detector: Callable[..., DeformableDetr]) -> None:
    batch = ImageBatch(torch.zeros(1, 3, 32, 32), torch.zeros(1, 32, 32, dtype=torch.bool))
    enough, too_many = (
        make_detector(box_refine=True, two_stage=True, d_model=64, num_queries=count).eval() for count in (22, 23)
    )
    assert enough(batch).logits.shape[2] == 22
    with pytest.raises(ValueError, match=r"num_queries must be at most the number of proposals, 22 .*got 23"):
        too_many(batch)


def leave_initialisation(detector: DeformableDetr) -> None:
    """Draws anew what starts as zero, where everything is alike."""
    for head in detector.bbox_embed:
        torch.nn.init.normal_(head.layers[-1].weight, std=0.1)
    for name, parameter in detector.transformer.named_parameters():
        if "attention_weights" in name or "sampling_offsets" in name:
            torch.nn.init.normal_(parameter, std=0.5)


def test_padding_changes_nothing(detector: DeformableDetr) -> None:
    leave_initialisation(detector)
    query_embed = None if detector.two_stage else detector.query_embed.weight
    sizes_hw = ((8, 12), (4, 6), (2, 3), (1, 2))
    results = []
    for scale in (1, 2):
        features, masks = [], []
        for seed, (height, width) in enumerate(sizes_hw):
            generator = torch.Generator().manual_seed(seed)
            valid = torch.randn(1, 32, height, width, generator=generator)
            level = torch.full((1, 32, scale * height, scale * width), 7.0)
            level[..., :height, :width] = valid
            mask = torch.ones(1, scale * height, scale * width, dtype=torch.bool)
            mask[:, :height, :width] = False
            features.append(level)
            masks.append(mask)
        results.append(detector.transformer(features, masks, detector.backbone[1], query_embed))
    alone, padded = results
    torch.testing.assert_close(padded.hidden, alone.hidden, atol=1e-4, rtol=0)
    torch.testing.assert_close(padded.reference_points, alone.reference_points, atol=1e-5, rtol=0)
    assert alone.hidden.std() > 0.1


def test_fused_positions_change_nothing(detector: DeformableDetr, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do those of pixels whose row or column is all padding, which differ."""
    pytest.importorskip("triton")
    monkeypatch.setattr("models.position_encoding.can_fuse", lambda x: True)  # Triton's interpreter runs on a CPU
    leave_initialisation(detector)
    padding_mask = torch.zeros(2, 64, 96, dtype=torch.bool)
    padding_mask[0, 40:], padding_mask[1, :, 50:] = True, True
    batch = ImageBatch(torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(0)), padding_mask)
    seen: list[Tensor] = []
    detector.transformer.encoder.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].positions))
    results = []
    for fused in (True, False):
        detector.backbone[1].fused = fused
        output = detector.eval()(batch)
        loss = (output.logits * torch.linspace(-1, 1, output.logits.numel()).view_as(output.logits)).sum()
        (gradient,) = torch.autograd.grad(loss, detector.transformer.level_embed)
        results.append((output.logits.detach(), output.boxes_cxcywh.detach(), gradient))
    assert (seen[0] - seen[1]).abs().max() > 1e-2
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4 * max(1.0, float(other.abs().max())), rtol=0)
    assert results[0][2].abs().max() > 1e-3
