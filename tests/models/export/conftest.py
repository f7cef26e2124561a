"""A detector small enough to be exported in seconds, as a checkpoint would bring it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor, nn

from models.export.inference import InferenceModule
from models.export.recipe import Recipe, Source
from models.normalization import ImageNormalizer
from models.weight_hash import hash_weights

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
CATEGORIES = [{"id": 3, "name": "cup"}, {"id": 7, "name": "fork"}, {"id": 20, "name": "plate"}]
SMALL = [
    "model.transformer.d_model=32",
    "model.transformer.num_encoder_layers=1",
    "model.transformer.num_decoder_layers=1",
    "model.transformer.num_encoder_points=2",
    "model.transformer.num_decoder_points=2",
    "model.transformer.num_queries=12",
    "model.transformer.dim_feedforward=32",
    "data.image_size=64",
    "num_classes=3",
    "detector.top_k=9",
]


@torch.no_grad()
def leave_initialisation(model: nn.Module) -> nn.Module:
    """Moves what is alike at the start: attention, box heads, and the statistics and biases of the norms."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if any(word in name for word in ("sampling_offsets.weight", "attention_weights.weight", "bbox_embed")):
            tensor.normal_(0, 0.1, generator=generator)
        if name.startswith("backbone") and name.endswith(("bn1.bias", "bn2.bias", "running_mean")):
            tensor.normal_(0.3, 0.3, generator=generator)
        if name.startswith("backbone") and name.endswith("running_var"):
            tensor.uniform_(0.5, 2.0, generator=generator)
    return model


@torch.no_grad()
def disfavour_padding(model: nn.Module) -> nn.Module:
    """Gives pixels that can be no proposals, which all get one score in a two-stage detector, a low one."""
    transformer = model.transformer
    if hasattr(transformer, "enc_output_norm"):
        heads = transformer.decoder.class_embed
        head = getattr(transformer, "enc_out_class_embed", heads[-1])
        constant = transformer.enc_output_norm(transformer.enc_output.bias)
        head.weight -= 30 * constant / constant.square().sum()
    return model


def make_module(model: nn.Module, dtype: torch.dtype = torch.float32) -> InferenceModule:
    normalizer = ImageNormalizer(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    return InferenceModule(model=disfavour_padding(model), normalizer=normalizer, top_k=10, dtype=dtype)


@pytest.fixture(params=["base", "refine", "two_stage", "dino"])
def any_model(request: pytest.FixtureRequest, make_detector: Callable, make_dino: Callable) -> nn.Module:
    """Each published variant, tiny, away from its initialisation."""
    settings = {
        "base": {"box_refine": False, "two_stage": False},
        "refine": {"box_refine": True, "two_stage": False},
        "two_stage": {"box_refine": True, "two_stage": True},
    }
    model = make_dino() if request.param == "dino" else make_detector(**settings[request.param])
    return leave_initialisation(model)


@pytest.fixture
def as_module() -> Callable[..., InferenceModule]:
    """Makes a model ready for inference."""
    return make_module


@pytest.fixture
def image_inputs() -> tuple[Tensor, Tensor, Tensor]:
    """One image of 100x140 pixels, which has been resized from 200x280."""
    images = torch.randint(256, (1, 3, 100, 140), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    return images, torch.tensor([[100, 140]]), torch.tensor([[200, 280]])


@pytest.fixture(scope="session")
def source() -> Source:
    """A small two-stage detector with random weights, for images of 64 pixels."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        composed = compose("train", overrides=SMALL)
    keys = ("model", "data", "normalizer", "detector")
    config = {key: OmegaConf.to_container(composed[key], resolve=True) for key in keys}
    recipe = Recipe.from_config(config, CATEGORIES)
    torch.manual_seed(0)
    model = disfavour_padding(leave_initialisation(instantiate(recipe.model)))
    weights = {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}
    return Source(recipe, weights, hash_weights(weights))
