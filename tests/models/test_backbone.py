from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
import torchvision
from torch import nn

from models.backbone import ResNetBackbone, SwinBackbone
from models.layers.frozen_norm import FoldedBatchNorm2d

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build(**overrides: Any) -> ResNetBackbone:
    settings: dict[str, Any] = {"name": "resnet18", "weights": "none", "norm": "batch", "dilation": False}
    return ResNetBackbone(
        **settings
        | {"finest_stride": 8, "num_feature_levels": 4, "channels_last": True}
        | {"fold_norms": True, "fused_norm": True}
        | overrides
    )


def trainable(backbone: ResNetBackbone) -> set[str]:
    return {name.split(".")[1] for name, parameter in backbone.named_parameters() if parameter.requires_grad}


@pytest.fixture(scope="module")
def torchvision_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "resnet18.pth"
    torch.manual_seed(1)
    torch.save(torchvision.models.resnet18().state_dict(), path)
    return path


@pytest.mark.parametrize(
    ("levels", "finest_stride", "strides"),
    [
        (1, 8, [32]),
        (2, 8, [16, 32]),
        (3, 8, [8, 16, 32]),
        (5, 8, [8, 16, 32]),
        (3, 4, [8, 16, 32]),
        (5, 4, [4, 8, 16, 32]),
    ],
)
def test_levels_and_channels(levels: int, finest_stride: int, strides: list[int]) -> None:
    backbone = build(num_feature_levels=levels, finest_stride=finest_stride)
    features = backbone(torch.zeros(1, 3, 64, 96))
    assert [(f.shape[2], f.shape[3]) for f in features] == [(64 // s, 96 // s) for s in strides]
    assert tuple(f.shape[1] for f in features) == backbone.channels


def test_dilation_keeps_the_resolution_of_the_last_stage() -> None:
    backbone = build(name="resnet50", dilation=True, num_feature_levels=1)
    assert backbone.channels == (2048,)
    assert backbone.eval()(torch.zeros(1, 3, 64, 64))[0].shape[2:] == (4, 4)


@pytest.mark.parametrize(
    ("norm", "layer"),
    [
        ("frozen", FoldedBatchNorm2d),
        ("batch", nn.BatchNorm2d),
        ("sync", nn.SyncBatchNorm),
        ("group", nn.GroupNorm),
    ],
)
def test_norms(norm: str, layer: type) -> None:
    assert type(build(norm=norm).body.get_submodule("bn1")) is layer


@pytest.mark.parametrize("norm", ["frozen", "batch"])
def test_memory_formats_agree(norm: str) -> None:
    images = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    results = []
    for channels_last in (True, False):
        torch.manual_seed(0)
        backbone = build(norm=norm, channels_last=channels_last).double()
        features = backbone(images)
        assert features[0].is_contiguous(memory_format=torch.channels_last) == channels_last
        sum(feature.square().mean() for feature in features).backward()
        results.append([*features, backbone.body.get_submodule("layer3.0.conv2").weight.grad])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("name", "num_norms_with_relu"), [("resnet18", 17), ("resnet50", 49)])
def test_fused_frozen_norms_agree_with_plain_ones(
    name: str, num_norms_with_relu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused_frozen_norm = pytest.importorskip("models.layers.fused_frozen_norm")
    for module in ("models.backbone", "models.layers.residual_blocks"):
        monkeypatch.setattr(f"{module}.can_fuse", lambda x: True)  # Triton's interpreter runs the kernels on a CPU
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    run, calls = fused_frozen_norm._FrozenNormRelu.apply, []
    monkeypatch.setattr(fused_frozen_norm._FrozenNormRelu, "apply", lambda *inputs: calls.append(1) or run(*inputs))
    fused_stem = pytest.importorskip("models.layers.fused_stem")
    run_stem = fused_stem.frozen_norm_relu_pool  # the stem is frozen: nothing in it has a gradient
    monkeypatch.setattr(fused_stem, "frozen_norm_relu_pool", lambda *inputs: calls.append(1) or run_stem(*inputs))
    torch.manual_seed(0)
    plain = build(name=name, norm="frozen", fold_norms=False, fused_norm=False)
    for key, buffer in plain.named_buffers():
        buffer.uniform_(0.5, 1) if key.endswith(("weight", "running_var")) else buffer.normal_(0, 0.1)
    results = []
    for channels_last in (True, False, None):
        backbone = plain
        if channels_last is not None:
            backbone = build(name=name, norm="frozen", fold_norms=True, fused_norm=True, channels_last=channels_last)
            backbone.load_state_dict(plain.state_dict())
        calls.clear()
        features = backbone.to(DEVICE)(torch.linspace(-1, 1, 3 * 64 * 96, device=DEVICE).view(1, 3, 64, 96))
        assert len(calls) == (num_norms_with_relu if channels_last else 0)
        sum(feature.square().mean() for feature in features).backward()
        gradients = [parameter.grad for parameter in backbone.parameters() if parameter.grad is not None]
        results.append([*features, *gradients])
    for *others, expected in zip(*results, strict=True):
        assert all((other - expected).norm() <= 1e-3 * expected.norm() for other in others)


def test_everything_trains_from_scratch() -> None:
    assert all(parameter.requires_grad for parameter in build().parameters())


@pytest.mark.parametrize("norm", ["frozen", "batch"])
def test_stem_and_first_stage_are_frozen_with_weights(torchvision_weights: Path, norm: str) -> None:
    backbone = build(weights=str(torchvision_weights), norm=norm)
    assert trainable(backbone) == {"layer2", "layer3", "layer4"}


def test_frozen_norms_await_weights_with_a_frozen_stem() -> None:
    assert trainable(build(norm="frozen")) == {"layer2", "layer3", "layer4"}


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("fold_norms", [True, False])
def test_frozen_stages_have_no_backward_pass(fold_norms: bool, autocast: bool) -> None:
    backbone = build(norm="frozen", fold_norms=fold_norms).to(DEVICE)
    differentiable = {}
    for name, stage in backbone.body.named_children():
        stage.register_forward_hook(
            lambda module, inputs, output, name=name: differentiable.update({name: output[0].requires_grad})
        )
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=autocast):
        backbone(torch.rand(1, 3, 64, 64, device=DEVICE))
    trained = {name for name, needed in differentiable.items() if needed}
    assert trained == {"layer2", "layer3", "layer4"}


def test_weights_by_path_are_loaded(torchvision_weights: Path) -> None:
    backbone = build(weights=str(torchvision_weights), norm="frozen")
    expected = torch.load(torchvision_weights, weights_only=True)
    actual = backbone.body.state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in actual.items())
    assert set(expected) - set(actual) == {
        key for key in expected if key.startswith("fc.") or key.endswith("num_batches_tracked")
    }


def test_weights_of_another_network_are_refused(torchvision_weights: Path) -> None:
    with pytest.raises(ValueError, match=r"weights must fit the model exactly, got 80 missing .*layer1\.2") as error:
        build(name="resnet34", weights=str(torchvision_weights))
    assert "\n" not in str(error.value)


def test_a_failed_download_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise URLError("no route to host")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fail)
    with pytest.raises(RuntimeError, match=r"could not be downloaded.*give its path as backbone\.weights"):
        build(weights="imagenet", norm="frozen")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"name": "resnet20"}, "name must be one of resnet18, resnet34, resnet50, resnet101, got 'resnet20'"),
        ({"norm": "layer"}, "norm must be one of frozen, batch, sync, group, got 'layer'"),
        ({"weights": "imagnet"}, "weights must be none, imagenet or the path of a file, got 'imagnet'"),
        ({"weights": "imagenet", "norm": "group"}, "norm must be frozen, batch or sync with pretrained weights"),
        ({"dilation": True}, "dilation must be false for resnet18"),
        ({"finest_stride": 2}, "finest_stride must be one of 4, 8, 16, 32, got 2"),
        ({"num_feature_levels": 6}, r"num_feature_levels must lie in 1\.\.5, got 6"),
    ],
)
def test_wrong_settings_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**overrides)


@pytest.fixture
def small_swin(monkeypatch: pytest.MonkeyPatch) -> torchvision.models.SwinTransformer:
    """What torchvision makes under the name of swin_t, but a tiny one."""
    torch.manual_seed(1)
    swin = torchvision.models.SwinTransformer([4, 4], 8, [1, 1, 2, 1], [1, 2, 2, 4], [3, 3], num_classes=3)
    monkeypatch.setattr("torchvision.models.get_model", lambda name, weights: swin)
    return swin


def build_swin(**overrides: Any) -> SwinBackbone:
    settings: dict[str, Any] = {"name": "swin_t", "weights": "none", "finest_stride": 8, "num_feature_levels": 4}
    return SwinBackbone(**settings | overrides)


@pytest.mark.parametrize(
    ("levels", "finest_stride", "strides"), [(1, 8, [32]), (4, 8, [8, 16, 32]), (5, 4, [4, 8, 16, 32])]
)
@pytest.mark.usefixtures("small_swin")
def test_swin_levels_and_channels(levels: int, finest_stride: int, strides: list[int]) -> None:
    backbone = build_swin(num_feature_levels=levels, finest_stride=finest_stride)
    features = backbone(torch.randn(1, 3, 64, 96))
    assert [(f.shape[2], f.shape[3]) for f in features] == [(64 // s, 96 // s) for s in strides]
    assert tuple(f.shape[1] for f in features) == backbone.channels == tuple(2 * s for s in strides)
    sum(f.sum() for f in features).backward()
    assert all(parameter.grad is not None for parameter in backbone.parameters())


def test_swin_features_are_those_of_torchvision_normalised(small_swin: torchvision.models.SwinTransformer) -> None:
    backbone, images = build_swin().eval(), torch.randn(1, 3, 64, 96)
    expected = small_swin.eval().features(images)
    expected = nn.functional.layer_norm(expected, expected.shape[-1:])
    torch.testing.assert_close(backbone(images)[-1], expected.permute(0, 3, 1, 2))


def test_swin_takes_images_of_any_size(small_swin: torchvision.models.SwinTransformer) -> None:
    features = build_swin()(torch.randn(1, 3, 70, 101))
    assert [(f.shape[2], f.shape[3]) for f in features] == [(9, 13), (5, 7), (3, 4)]


def test_swin_weights_by_path_are_loaded(small_swin: torchvision.models.SwinTransformer, tmp_path: Path) -> None:
    expected = {key: torch.randn_like(value.float()).to(value) for key, value in small_swin.state_dict().items()}
    torch.save(expected, tmp_path / "swin.pth")
    backbone = build_swin(weights=str(tmp_path / "swin.pth"))
    actual = backbone.body.state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in actual.items())
    assert {key.split(".")[0] for key in set(expected) - set(actual)} == {"norm", "head"}
    assert all(parameter.requires_grad for parameter in backbone.parameters())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"name": "swin_l"}, "name must be one of swin_t, swin_s, swin_b, got 'swin_l'"),
        ({"weights": "imagnet"}, "weights must be none, imagenet or the path of a file, got 'imagnet'"),
        ({"finest_stride": 2}, "finest_stride must be one of 4, 8, 16, 32, got 2"),
    ],
)
@pytest.mark.usefixtures("small_swin")
def test_wrong_settings_of_swin_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_swin(**overrides)
