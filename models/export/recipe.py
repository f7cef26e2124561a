"""What a checkpoint of this project says of its detector: how to build it, and how images have to reach it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from hydra.utils import instantiate
from torch import Tensor, nn

from models.backbone import ResNetBackbone
from models.checkpoints import load_weights, read_checkpoint, read_weights
from models.export.folding import fold_batch_norms, freeze_batch_norms
from models.export.inference import InferenceModule, keep_half_weights
from models.normalization import ImageNormalizer
from models.weight_hash import hash_weights

OWN_PACKAGE = "models."
_DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Precision:
    """Number format of the products and convolutions.

    Attributes:
        dtype: torch.float32, or the half precision of autocast.
        allow_tf32: whether float32 products and convolutions may use TF32.
    """

    dtype: torch.dtype
    allow_tf32: bool

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return {"dtype": str(self.dtype).removeprefix("torch."), "allow_tf32": self.allow_tf32}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Precision":
        """Reads what `to_json` wrote.

        Raises:
            ValueError: if its dtype is not one that detectors are run in.
        """
        dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in _NAMES}
        if content["dtype"] not in dtypes:
            raise ValueError(f"dtype must be one of {', '.join(dtypes)}, got {content['dtype']}; export anew")
        return cls(dtypes[content["dtype"]], content["allow_tf32"])

    @property
    def name(self) -> str:
        """The option of `configs/precision` that it is."""
        return "tf32" if self.dtype == torch.float32 and self.allow_tf32 else _NAMES[self.dtype]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Precision":
        """Reads an option of `configs/precision`.

        Raises:
            ValueError: if its precision is not one that detectors are run in.
        """
        if config["lightning"] not in _DTYPES:
            raise ValueError(
                f"precision.lightning must be one of {', '.join(_DTYPES)}, got {config['lightning']}; choose one"
            )
        return cls(_DTYPES[config["lightning"]], config["allow_tf32"])


@dataclass(frozen=True)
class Recipe:
    """How to build a detector and to prepare its images; plain values, ready for JSON.

    Attributes:
        model: configuration of the network, with its `_target_`.
        mean: mean of each RGB channel, for pixels in 0..1.
        std: standard deviation of each RGB channel.
        size: shorter side in pixels to which images are resized.
        max_size: largest longer side in pixels after the resize.
        top_k: detections of an image.
        categories: one {"id", "name"} a class, in the order of the labels.
    """

    model: dict[str, Any]
    mean: list[float]
    std: list[float]
    size: int
    max_size: int
    top_k: int
    categories: list[dict[str, Any]]

    @classmethod
    def from_config(cls, config: Mapping[str, Any], categories: Sequence[Mapping[str, Any]]) -> "Recipe":
        """Takes from a resolved configuration of `train.py` what inference needs; its paths of weights are dropped.

        Raises:
            ValueError: if the configuration would build anything but this project's networks.
        """
        backbone = {**config["model"]["backbone"], "weights": "none"}
        model = {**config["model"], "weights": None, "backbone": backbone, "num_classes": len(categories)}
        _require_own_targets(model)
        resize, normalizer = config["data"]["eval_transform"], config["normalizer"]
        return cls(
            model=model,
            mean=list(normalizer["mean"]),
            std=list(normalizer["std"]),
            size=resize["size"],
            max_size=resize["max_size"],
            top_k=config["detector"]["top_k"],
            categories=[{"id": each["id"], "name": each["name"]} for each in categories],
        )

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Recipe":
        """Reads what `to_json` wrote.

        Raises:
            ValueError: if keys are missing or unknown, or it would build anything but this project's networks.
        """
        if content.keys() != cls.__dataclass_fields__.keys():
            differing = sorted(content.keys() ^ cls.__dataclass_fields__.keys())
            raise ValueError(
                f"recipe must have the keys of its schema, got others or too few: {differing}; export anew"
            )
        _require_own_targets(content["model"])
        return cls(**content)

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Source:
    """A trained detector on the host: its recipe, its weights, and the hash of these."""

    recipe: Recipe
    weights: dict[str, Tensor]
    weights_hash: str


def read_source(path: str | Path) -> Source:
    """Reads a checkpoint that `train.py` wrote.

    Raises:
        ValueError: if the file can't be read, or does not say how its detector was built.
    """
    checkpoint = read_checkpoint(path)
    config, categories = checkpoint.get("config"), checkpoint.get("categories")
    if not isinstance(config, Mapping) or not isinstance(categories, Sequence):
        raise ValueError(
            f"checkpoint must hold its configuration and categories, as train.py writes them, got none in "
            f"{str(path)!r}; give other weights as model.weights=... with model, backbone and data of their training"
        )
    weights = read_weights(path, ema=False)
    return Source(Recipe.from_config(config, categories), weights, hash_weights(weights))


def source_of(recipe: Recipe, path: str | Path) -> Source:
    """Reads weights of any layout that `models.checkpoints` knows for a recipe.

    Raises:
        ValueError: if they do not fit.
    """
    model = instantiate(recipe.model)
    load_weights(model, path)
    weights = {key: tensor.detach() for key, tensor in model.state_dict().items()}
    return Source(recipe, weights, hash_weights(weights))


def build_module(
    source: Source, *, precision: Precision, backend: str, fused: bool, device: torch.device, traced: bool
) -> InferenceModule:
    """Builds a detector for inference, its weights in the precision that they are used in.

    Convolutions apply the norms behind them, except where kernels do that do more: in programs that run as they stand,
    on a GPU, and with a backbone that fuses frozen norms with what follows.

    Args:
        source: recipe and weights.
        precision: number format.
        backend: backend of the attention, one of `msda_op.BACKENDS`.
        fused: whether the op takes offsets and logits, see `models.layers.ms_deform_attn.MSDeformAttn`.
        device: where it runs.
        traced: whether another program is made of it, by a compiler that fuses operations itself.

    Raises:
        ValueError: if the weights do not fit the recipe.
    """
    recipe = source.recipe
    transformer = {**recipe.model["transformer"], "backend": backend, "fused": fused}
    backbone = dict(recipe.model["backbone"])
    if "channels_last" in backbone and device.type == "cuda" and precision.dtype != torch.float32:
        backbone["channels_last"] = True  # as tensor cores want it, whatever the precision of the training
    model = cast(nn.Module, instantiate({**recipe.model, "transformer": transformer, "backbone": backbone}))
    try:
        model.load_state_dict(source.weights)
    except RuntimeError as error:
        raise ValueError(f"weights must fit the recipe of their detector, got others: {error}") from error
    model.eval()
    fuses = any(isinstance(module, ResNetBackbone) and module.fused_norm for module in model.modules())
    if fuses and device.type == "cuda" and not traced:
        freeze_batch_norms(model)
    else:
        fold_batch_norms(model)
    module = InferenceModule(
        model=model,
        normalizer=ImageNormalizer(mean=recipe.mean, std=recipe.std),
        top_k=recipe.top_k,
        dtype=precision.dtype,
    ).to(device)
    example = torch.zeros((1, 3, recipe.size, recipe.max_size), dtype=torch.uint8, device=device)
    sizes_hw = torch.tensor([[recipe.size, recipe.max_size]], device=device)
    keep_half_weights(module, example, sizes_hw, sizes_hw)
    return module


def _require_own_targets(config: Any) -> None:
    """Refuses a configuration from a file that names anything but this project's classes, which would be called."""
    if isinstance(config, Mapping):
        target = config.get("_target_", OWN_PACKAGE)
        if not str(target).startswith(OWN_PACKAGE):
            raise ValueError(
                f"configuration in a file must build classes of {OWN_PACKAGE}* only, got {target!r}; "
                "do not load files from strangers"
            )
        for value in config.values():
            _require_own_targets(value)
    elif isinstance(config, list | tuple):
        for value in config:
            _require_own_targets(value)
