"""ResNet and Swin backbones: which stages, which norms, which weights, what stays frozen."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn

from models.checkpoints import check_keys, read_checkpoint
from models.layers.frozen_norm import FoldedBatchNorm2d, folding_norms
from models.layers.residual_blocks import BasicBlock, Bottleneck, can_fuse
from models.layers.stem import convolve_blocks, fits_blocks, norm_relu_pool
from models.weight_casts import casting_weights

SWINS = ("swin_t", "swin_s", "swin_b")
RESNETS: dict[str, tuple[type[BasicBlock | Bottleneck], list[int]]] = {
    "resnet18": (BasicBlock, [2, 2, 2, 2]),
    "resnet34": (BasicBlock, [3, 4, 6, 3]),
    "resnet50": (Bottleneck, [3, 4, 6, 3]),
    "resnet101": (Bottleneck, [3, 4, 23, 3]),
}
"""Kind and numbers of the blocks of each stage (arXiv 1512.03385, table 1)."""
DILATABLE_RESNETS = ("resnet50", "resnet101")
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "frozen": FoldedBatchNorm2d,
    "batch": nn.BatchNorm2d,
    "sync": nn.SyncBatchNorm,
    "group": partial(nn.GroupNorm, 32),
}
STAGE_STRIDES = {"layer1": 4, "layer2": 8, "layer3": 16, "layer4": 32}
SWIN_STAGE_STRIDES = {"1": 4, "3": 8, "5": 16, "7": 32}  # the even numbers are embedding and merging of patches
FROZEN_STAGES = ("conv1", "bn1", "layer1")
MAX_FEATURE_LEVELS = 5


class ResNetBackbone(nn.Module):
    """A torchvision ResNet that returns the feature maps of its last stages, finest first.

    Attributes:
        channels: channels of each returned feature map.
    """

    def __init__(
        self,
        *,
        name: str,
        weights: str,
        norm: str,
        dilation: bool,
        finest_stride: int,
        num_feature_levels: int,
        channels_last: bool,
        fold_norms: bool,
        fused_norm: bool = True,
    ) -> None:
        """Creates the network and loads its weights.

        Args:
            name: one of `RESNETS`.
            weights: "none", "imagenet" (torchvision's IMAGENET1K_V1, downloaded once) or the path of a state dict
                with torchvision's keys.
            norm: one of `NORMS`; "frozen" fixes statistics and affine terms.
            dilation: whether the last stage keeps its input's resolution and dilates instead (DC5).
            finest_stride: stride of the finest stage that may be returned, without dilation: 4, 8, 16 or 32.
            num_feature_levels: levels of the detector, 1 to 5; as many stages are returned, the last ones, as far as
                finest_stride allows.
            channels_last: whether images, features and kernels lie in memory channel by channel of a pixel, as the
                convolutions of tensor cores want them; the results agree up to rounding.
            fold_norms: whether convolutions apply the frozen norms behind them where nothing is fused, see
                `folding_norms`; the results agree up to rounding.
            fused_norm: whether frozen norms take ReLU and residual into one kernel on a GPU, see `norm_relu`, and the
                first convolution goes by blocks, see `convolve_blocks`; needs channels_last, without which nothing is
                fused; the results agree up to rounding.

        Raises:
            ValueError: on an unknown word, an impossible combination, or weights that do not fit the network.
            RuntimeError: if the ImageNet weights can't be downloaded.

        Notes:
            The stem and the first stage don't train once weights are given, or when the frozen norms say that weights
            are going to be loaded; a network from scratch trains everywhere.
        """
        super().__init__()
        _check_word("name", name, RESNETS)
        _check_resnet_settings(name, weights, norm, dilation)
        _check_weights(weights)
        resnet = torchvision.models.ResNet(
            *RESNETS[name], norm_layer=NORMS[norm], replace_stride_with_dilation=[False, False, dilation]
        )
        self.body = nn.Sequential(
            OrderedDict((key, child) for key, child in resnet.named_children() if key not in ("relu", "avgpool", "fc"))
        )
        self.stages = _feature_stages(STAGE_STRIDES, finest_stride, num_feature_levels)
        self.channels = tuple(_stage_channels(self.body.get_submodule(stage)) for stage in self.stages)
        if weights != "none":
            _load_torchvision_weights(self.body, name, weights, head=("fc.",))
        if weights != "none" or norm == "frozen":
            for stage in FROZEN_STAGES:
                self.body.get_submodule(stage).requires_grad_(False)
        self.fold_norms = fold_norms
        self.fused_norm = fused_norm and channels_last
        for module in self.body.modules():
            if isinstance(module, FoldedBatchNorm2d):
                module.fused = self.fused_norm
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.body.to(memory_format=self.memory_format)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Computes the feature maps.

        Args:
            images: float [B, 3, H, W], normalised.

        Returns:
            One float [B, channels, H_l, W_l] a stage, finest first.
        """
        folds = self.fold_norms and not (self.fused_norm and can_fuse(images))
        outputs = []
        with folding_norms(self.body) if folds else nullcontext(), casting_weights(self.body):
            convolution, norm, pool, *stages = self.body.children()
            assert isinstance(convolution, nn.Conv2d), "every ResNet begins with one"
            if self._gathers_blocks(images, convolution):
                features = convolve_blocks(images, convolution.weight)
            else:
                features = convolution(images.contiguous(memory_format=self.memory_format))
            features = norm_relu_pool(features, norm, pool)
            twice = (features, features)
            for key, stage in zip(STAGE_STRIDES, stages, strict=True):
                twice = stage(twice)
                if key in self.stages:
                    outputs.append(twice[0])
        return outputs

    def _gathers_blocks(self, images: Tensor, convolution: nn.Conv2d) -> bool:
        """Whether the first convolution goes block by block: in half precision on a GPU; its weight is cast by now."""
        half = convolution.weight.dtype in (torch.float16, torch.bfloat16)
        return half and self.fused_norm and can_fuse(images) and fits_blocks(convolution)


class SwinBackbone(nn.Module):
    """A torchvision Swin transformer that returns the normalised feature maps of its last stages, finest first.

    Attributes:
        channels: channels of each returned feature map.
    """

    def __init__(self, *, name: str, weights: str, finest_stride: int, num_feature_levels: int) -> None:
        """Creates the network and loads its weights.

        Args:
            name: one of `SWINS`.
            weights: as for `ResNetBackbone`.
            finest_stride: as for `ResNetBackbone`.
            num_feature_levels: as for `ResNetBackbone`.

        Raises:
            ValueError: on an unknown word, or weights that do not fit the network.
            RuntimeError: if the ImageNet weights can't be downloaded.

        Notes:
            Everything trains, with torchvision's stochastic depth. The norm of each returned stage starts anew: the
            ImageNet weights have one for the last stage only, made for averaged features.
        """
        super().__init__()
        _check_word("name", name, SWINS)
        _check_weights(weights)
        self.body = nn.ModuleDict({"features": torchvision.models.get_model(name, weights=None).features})
        stages = _feature_stages(SWIN_STAGE_STRIDES, finest_stride, num_feature_levels)
        first_norms = (self.body.get_submodule(f"features.{stage}.0.norm1") for stage in stages)
        self.channels = tuple(norm.normalized_shape[0] for norm in first_norms if isinstance(norm, nn.LayerNorm))
        self.norms = nn.ModuleDict({stage: nn.LayerNorm(c) for stage, c in zip(stages, self.channels, strict=True)})
        if weights != "none":
            _load_torchvision_weights(self.body, name, weights, head=("norm.", "head."))

    def forward(self, images: Tensor) -> list[Tensor]:
        """Computes the feature maps.

        Args:
            images: float [B, 3, H, W], normalised.

        Returns:
            One float [B, channels, H_l, W_l] a stage, finest first.
        """
        features = images
        outputs = []
        for key, stage in self.body["features"].named_children():
            features = stage(features)
            if key in self.norms:
                outputs.append(self.norms[key](features).permute(0, 3, 1, 2))
        return outputs


Backbone = ResNetBackbone | SwinBackbone


def _check_word(key: str, word: str, words: Iterable[str]) -> None:
    if word not in words:
        raise ValueError(f"{key} must be one of {', '.join(words)}, got {word!r}; choose one of them")


def _check_weights(weights: str) -> None:
    if weights not in ("none", "imagenet") and not Path(weights).is_file():
        raise ValueError(f"weights must be none, imagenet or the path of a file, got {weights!r}; no such file exists")


def _check_resnet_settings(name: str, weights: str, norm: str, dilation: bool) -> None:
    _check_word("norm", norm, NORMS)
    if norm == "group" and weights != "none":
        raise ValueError(
            f"norm must be frozen, batch or sync with pretrained weights, got 'group' with weights={weights!r}; "
            "ResNet weights hold no group statistics, so take weights=none"
        )
    if dilation and name not in DILATABLE_RESNETS:
        raise ValueError(f"dilation must be false for {name}, got true; take one of {', '.join(DILATABLE_RESNETS)}")


def _feature_stages(strides: Mapping[str, int], finest_stride: int, num_feature_levels: int) -> tuple[str, ...]:
    if finest_stride not in strides.values():
        raise ValueError(
            f"finest_stride must be one of {', '.join(map(str, strides.values()))}, got {finest_stride}; "
            "choose one of them"
        )
    if not 1 <= num_feature_levels <= MAX_FEATURE_LEVELS:
        raise ValueError(f"num_feature_levels must lie in 1..{MAX_FEATURE_LEVELS}, got {num_feature_levels}; change it")
    return tuple(stage for stage, stride in strides.items() if stride >= finest_stride)[-num_feature_levels:]


def _stage_channels(stage: nn.Module) -> int:
    *_, last_block = stage.children()
    *_, last_conv = (child for child in last_block.children() if isinstance(child, nn.Conv2d))
    return last_conv.out_channels


def _load_torchvision_weights(body: nn.Module, name: str, weights: str, head: tuple[str, ...]) -> None:
    state_dict = _download_imagenet_weights(name) if weights == "imagenet" else read_checkpoint(weights)
    state_dict = {key: tensor for key, tensor in state_dict.items() if not key.startswith(head)}
    check_keys(state_dict, body.state_dict(), weights)
    body.load_state_dict(state_dict, strict=False)


def _download_imagenet_weights(name: str) -> Mapping[str, object]:
    entry = torchvision.models.get_model_weights(name)["IMAGENET1K_V1"]
    try:
        return entry.get_state_dict(progress=False, check_hash=True)
    except OSError as error:
        raise RuntimeError(
            f"the ImageNet weights of {name} could not be downloaded from {entry.url} ({error}); "
            "download the file elsewhere and give its path as backbone.weights, or train with backbone.weights=none"
        ) from error
