"""Hugging Face's DeformableDetrForObjectDetection and ours: same weights, same outputs, and the way back."""

import pytest
import safetensors.torch
import torch

from models.checkpoints import load_weights, read_weights
from models.layouts import complete_shared_heads, detect_layout, from_hugging_face, to_hugging_face

transformers = pytest.importorskip("transformers")

VARIANTS = {
    "base": {"box_refine": False, "two_stage": False},
    "refine": {"box_refine": True, "two_stage": False},
    "two_stage": {"box_refine": True, "two_stage": True},
}


def hugging_face_model(box_refine, two_stage):
    """A model of the size of `make_detector`'s, on a ResNet-18, with random weights and statistics."""
    backbone = transformers.ResNetConfig(
        embedding_size=64,
        hidden_sizes=[64, 128, 256, 512],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    config = transformers.DeformableDetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=32,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_n_points=2,
        decoder_n_points=3,
        num_feature_levels=4,
        num_queries=11,
        two_stage_num_proposals=11,
        with_box_refine=box_refine,
        two_stage=two_stage,
        num_labels=5,
    )
    torch.manual_seed(1)
    model = transformers.DeformableDetrForObjectDetection(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.1, 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith(("running_var", "normalization.weight")):
                buffer.uniform_(0.8, 1.2)
            elif name.endswith(("running_mean", "normalization.bias")):
                buffer.uniform_(-0.1, 0.1)
    return model


@pytest.fixture(params=VARIANTS)
def variant(request):
    return request.param


def outputs_of_both(theirs, ours, batch):
    with torch.no_grad():
        expected = theirs(pixel_values=batch.images, pixel_mask=(~batch.padding_mask).long())
        actual = ours.eval()(batch)
    return (expected.logits, expected.pred_boxes), (actual.logits[-1], actual.boxes_cxcywh[-1])


def test_the_installed_version_loads_into_ours(variant, make_detector, image_batch, tmp_path):
    theirs, ours = hugging_face_model(**VARIANTS[variant]), make_detector(**VARIANTS[variant])
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    load_weights(ours, tmp_path / "pytorch_model.bin")
    expected, actual = outputs_of_both(theirs, ours, image_batch)
    for wanted, got in zip(expected, actual, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)
    assert expected[0].std() > 1e-3


def test_a_saved_folder_loads_though_it_stores_shared_heads_once(variant, make_detector, tmp_path):
    theirs, ours = hugging_face_model(**VARIANTS[variant]), make_detector(**VARIANTS[variant])
    theirs.save_pretrained(tmp_path)
    load_weights(ours, tmp_path / "model.safetensors")
    loaded = to_hugging_face(ours.state_dict(), "hf_v5", "transformers")
    assert all(torch.equal(loaded[key], tensor) for key, tensor in theirs.state_dict().items())


def test_ours_loads_into_the_installed_version(variant, make_detector, image_batch):
    theirs, ours = hugging_face_model(**VARIANTS[variant]), make_detector(**VARIANTS[variant])
    exported = to_hugging_face(ours.state_dict(), "hf_v5", "transformers")
    theirs.load_state_dict(exported, strict=True)
    expected, actual = outputs_of_both(theirs, ours, image_batch)
    for wanted, got in zip(expected, actual, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", ["hf_v4", "hf_v5"])
@pytest.mark.parametrize("backbone", ["timm", "transformers"])
def test_there_and_back_is_bit_equal(variant, layout, backbone, make_detector, tmp_path):
    ours = make_detector(**VARIANTS[variant])
    weights = {key: t for key, t in ours.state_dict().items() if not key.endswith("num_batches_tracked")}
    exported = to_hugging_face(weights, layout, backbone)
    assert detect_layout(list(exported)) == layout
    returned = from_hugging_face(exported, layout)
    assert returned.keys() == weights.keys()
    assert all(torch.equal(returned[key], tensor) for key, tensor in weights.items())
    again = to_hugging_face(returned, layout, backbone)
    assert again.keys() == exported.keys()
    assert all(torch.equal(again[key], tensor) for key, tensor in exported.items())
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({key: tensor.clone() for key, tensor in exported.items()}, path)
    read = read_weights(path, ema=False)
    assert all(torch.equal(read[key], tensor) for key, tensor in weights.items())


def test_the_versions_differ_as_published(make_detector):
    weights = make_detector(box_refine=False).state_dict()
    v4, v5 = (to_hugging_face(weights, layout, "timm") for layout in ("hf_v4", "hf_v5"))
    assert "model.decoder.layers.0.fc1.weight" in v4
    assert "model.decoder.layers.0.mlp.fc1.weight" in v5
    assert "model.decoder.layers.0.self_attn.out_proj.weight" in v4
    assert "model.decoder.layers.0.self_attn.o_proj.weight" in v5
    assert "model.backbone.conv_encoder.model.layer1.0.conv1.weight" in v4
    assert "model.backbone.model.layer1.0.conv1.weight" in v5


def test_a_name_without_counterpart_is_kept_for_the_strict_check():
    weights = {"model.backbone.model.conv1.weight": torch.zeros(1), "model.neck.weight": torch.zeros(1)}
    assert set(from_hugging_face(weights, "hf_v5")) == {"backbone.0.body.conv1.weight", "model.neck.weight"}
    with pytest.raises(ValueError, match=r"transformer.tgt_embed.weight.*without a counterpart"):
        to_hugging_face({"transformer.tgt_embed.weight": torch.zeros(1)}, "hf_v5", "timm")
    with pytest.raises(ValueError, match="layout and backbone must be of hf_v4, hf_v5"):
        to_hugging_face({}, "hf_v3", "timm")


def test_heads_that_differ_are_never_overwritten(make_detector):
    weights = make_detector(box_refine=True, two_stage=True).state_dict()
    completed = complete_shared_heads(weights)
    assert completed.keys() == weights.keys()
    assert all(completed[key] is tensor for key, tensor in weights.items())
