"""What a checkpoint says of its detector."""

import copy

import pytest
import torch

from models.export.inference import InferenceModule
from models.export.recipe import Precision, Recipe, Source, build_module, read_source, source_of

CPU = torch.device("cpu")
FP32 = Precision(torch.float32, False)


@pytest.fixture
def checkpoint(source, tmp_path):
    """A file as train.py writes it."""
    recipe = source.recipe
    config = {
        "model": copy.deepcopy(recipe.model),
        "data": {"eval_transform": {"size": recipe.size, "max_size": recipe.max_size}},
        "normalizer": {"mean": recipe.mean, "std": recipe.std},
        "detector": {"top_k": recipe.top_k},
    }
    weights = {f"model.{key}": tensor for key, tensor in source.weights.items()}
    content = {"config": config, "categories": recipe.categories, "state_dict": weights}
    torch.save(content, tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt", content


def test_a_checkpoint_brings_everything(checkpoint, source):
    found = read_source(checkpoint[0])
    assert found.recipe == source.recipe
    assert found.weights_hash == source.weights_hash
    assert Recipe.from_json(found.recipe.to_json()) == source.recipe


def test_a_recipe_with_other_keys_is_refused(source):
    content = source.recipe.to_json()
    del content["size"]
    with pytest.raises(ValueError, match=r"recipe must have the keys of its schema, got others or too few: \['size'\]"):
        Recipe.from_json(content)


def test_weights_of_other_origin_need_a_recipe(checkpoint, source, tmp_path):
    torch.save({"model": source.weights}, tmp_path / "official.pth")
    with pytest.raises(ValueError, match="must hold its configuration and categories"):
        read_source(tmp_path / "official.pth")
    assert source_of(source.recipe, tmp_path / "official.pth").weights_hash == source.weights_hash


def test_a_file_cannot_name_code_to_run(checkpoint):
    path, content = checkpoint
    content["config"]["model"]["backbone"] = {**content["config"]["model"]["backbone"], "_target_": "os.system"}
    torch.save(content, path)
    with pytest.raises(ValueError, match=r"must build classes of models\.\* only, got 'os.system'"):
        read_source(path)


def test_the_module_has_the_weights_and_no_norms_left(source):
    module = build_module(source, precision=FP32, backend="reference", fused=True, device=CPU, traced=True)
    assert isinstance(module, InferenceModule)
    assert not any(isinstance(layer, torch.nn.BatchNorm2d) for layer in module.modules())
    name = "transformer.encoder.layers.0.linear1.weight"
    assert torch.equal(module.model.get_parameter(name), source.weights[name])


def test_weights_of_another_model_are_refused(source):
    weights = {key: tensor for key, tensor in source.weights.items() if not key.startswith("bbox_embed")}
    stripped = Source(source.recipe, weights, "")
    with pytest.raises(ValueError, match="must fit the recipe"):
        build_module(stripped, precision=FP32, backend="reference", fused=True, device=CPU, traced=True)


@pytest.mark.parametrize(
    ("lightning", "allow_tf32", "name"),
    [("32-true", False, "fp32"), ("32-true", True, "tf32"), ("bf16-mixed", True, "bf16"), ("16-mixed", True, "fp16")],
)
def test_precisions_have_the_names_of_their_options(lightning, allow_tf32, name):
    assert Precision.from_config({"lightning": lightning, "allow_tf32": allow_tf32}).name == name


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match=r"precision.lightning must be one of .*, got 64-true"):
        Precision.from_config({"lightning": "64-true", "allow_tf32": False})
