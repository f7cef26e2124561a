"""A transformers model with its op swapped is the same model: output and gradients against float64, bound by bound."""

import copy

import pytest
import torch
from torch import nn

from msda_op.hugging_face import MultiScaleDeformableAttention, swap_op
from parity.comparisons import compare
from parity.tolerances import GRADIENT, OUTPUT

transformers = pytest.importorskip("transformers")


def tiny_config(two_stage=False):
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], out_features=["stage2", "stage3", "stage4"]
    )
    return transformers.DeformableDetrConfig(
        backbone_config=backbone,
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        encoder_n_points=2,
        decoder_n_points=2,
        num_queries=6,
        num_feature_levels=4,
        two_stage=two_stage,
        with_box_refine=two_stage,
        two_stage_num_proposals=6,
        disable_custom_kernels=True,
        num_labels=3,
    )


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = transformers.DeformableDetrForObjectDetection(tiny_config()).eval()
    for module in model.modules():
        if hasattr(module, "sampling_offsets"):
            nn.init.normal_(module.sampling_offsets.weight, std=0.3)
            nn.init.normal_(module.attention_weights.weight, std=0.3)
    return model


def run(model, pixels):
    """Output of the decoder and gradients of the projections around the op, by name."""
    output = model(pixels).last_hidden_state
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    (output * weights).sum().backward()
    kept = ("sampling_offsets.weight", "attention_weights.weight", "value_proj.weight")
    gradients = {name: weight.grad for name, weight in model.named_parameters() if name.endswith(kept)}
    return {"output": output.detach(), **gradients}


def judge(model, swapped):
    pixels = torch.randn(2, 3, 32, 64, generator=torch.Generator().manual_seed(1))
    expected = run(copy.deepcopy(model).double(), pixels.double())
    competitor, actual = run(copy.deepcopy(model), pixels), run(swapped, pixels)
    assert len(expected) == 10
    return [
        compare(name, expected[name], competitor[name], actual[name], OUTPUT if name == "output" else GRADIENT)
        for name in expected
    ]


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_swapped_model_computes_the_same(model, backend):
    swapped = copy.deepcopy(model)
    assert swap_op(swapped, backend=backend) == 3
    assert swapped.state_dict().keys() == model.state_dict().keys()
    comparisons = judge(model, swapped)
    assert all(comparison.passed for comparison in comparisons), comparisons


def test_a_wrong_op_is_seen(model, monkeypatch):
    swapped = copy.deepcopy(model)
    swap_op(swapped, backend="reference")
    right = MultiScaleDeformableAttention.forward

    def exchange_x_and_y(self, value, table, shapes, starts, locations, weights, step):
        return right(self, value, table, shapes, starts, locations.flip(-1), weights, step)

    monkeypatch.setattr(MultiScaleDeformableAttention, "forward", exchange_x_and_y)
    assert not any(comparison.passed for comparison in judge(model, swapped))


def test_a_half_precision_model_runs(model):
    swapped = copy.deepcopy(model)
    swap_op(swapped)
    pixels = torch.randn(2, 3, 32, 64, generator=torch.Generator().manual_seed(2))
    expected = model(pixels).last_hidden_state
    actual = swapped.bfloat16()(pixels.bfloat16()).last_hidden_state
    assert actual.dtype == torch.bfloat16
    assert (actual.float() - expected).abs().mean() < 0.05 * expected.abs().mean()


def test_two_stage_and_other_detectors_are_found():
    two_stage = transformers.DeformableDetrForObjectDetection(tiny_config(two_stage=True))
    assert swap_op(two_stage) == swap_op(two_stage, backend="reference") == 3
    modules = [module for module in two_stage.modules() if isinstance(module, MultiScaleDeformableAttention)]
    assert {module.backend for module in modules} == {"reference"}
    with torch.device("meta"):
        assert swap_op(transformers.RTDetrForObjectDetection(transformers.RTDetrConfig())) == 6


def test_models_that_cannot_be_swapped_are_refused(model):
    with pytest.raises(ValueError, match="got Linear without any; update transformers"):
        swap_op(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="backend must be one of auto, triton"):
        swap_op(model, backend="tritn")

    stranger = type("MultiScaleDeformableAttention", (nn.Module,), {"forward": lambda self, value: value})
    holder = nn.Sequential(stranger())
    with pytest.raises(ValueError, match=r"forward must take value, value_spatial_shapes.*got value; call"):
        swap_op(holder)
    assert type(holder[0]) is stranger


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_swapped_model_trains_on_a_gpu(model, dtype):
    model.to("cuda").train()
    swap_op(model, backend="triton")
    pixels = torch.randn(2, 3, 64, 96, device="cuda")
    with torch.autocast("cuda", dtype, enabled=dtype == torch.bfloat16):
        output = model(pixels).last_hidden_state
    output.float().sum().backward()
    gradients = [weight.grad for name, weight in model.named_parameters() if name.endswith("sampling_offsets.weight")]
    assert len(gradients) == 3
    assert all(gradient.isfinite().all() and gradient.abs().max() > 0 for gradient in gradients)
