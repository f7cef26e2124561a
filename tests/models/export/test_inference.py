"""From raw images to boxes in one module."""

import torch

from models.export.folding import fold_batch_norms
from models.export.inference import keep_half_weights, padding_of
from models.normalization import ImageNormalizer
from models.postprocess import postprocess


def test_padding_lies_below_and_to_the_right():
    mask = padding_of(torch.tensor([[2, 3], [1, 4]]), 3, 4)
    assert mask.int().tolist() == [
        [[0, 0, 0, 1], [0, 0, 0, 1], [1, 1, 1, 1]],
        [[0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]],
    ]


def test_without_padding_it_is_the_detector(any_model, as_module, image_inputs):
    images, _, original_sizes_hw = image_inputs
    normalizer = ImageNormalizer(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    module = as_module(any_model)  # first, since it changes the scores of padding
    with torch.no_grad():
        output = any_model.eval()(normalizer(images, torch.zeros(1, 100, 140, dtype=torch.bool)))
    expected = postprocess(output, original_sizes_hw, 10)
    scores, labels, boxes_xyxy = module(*image_inputs)
    torch.testing.assert_close(scores, expected.scores)
    assert torch.equal(labels, expected.labels)
    torch.testing.assert_close(boxes_xyxy, expected.boxes_xyxy, atol=1e-3, rtol=1e-5)
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_half_weights_keep_every_bit(any_model, as_module, image_inputs):
    fold_batch_norms(any_model.eval())
    module = as_module(any_model, torch.bfloat16)
    expected = module(*image_inputs)
    assert keep_half_weights(module, *image_inputs) > 50
    for before, after in zip(expected, module(*image_inputs), strict=True):
        assert torch.equal(before, after)
    heads = [name for name, tensor in module.model.named_parameters() if tensor.dtype == torch.float32]
    assert any("class_embed" in name for name in heads), "heads compute in float32 under any autocast"
    assert module.model.transformer.encoder.layers[0].linear1.weight.dtype == torch.bfloat16


def test_float32_weights_stay(as_module, make_detector, image_inputs):
    module = as_module(make_detector(box_refine=True, two_stage=True))
    assert keep_half_weights(module, *image_inputs) == 0
