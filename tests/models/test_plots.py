"""The samples that are drawn are those that the attention takes."""

import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

import msda_op
from models.layers.ms_deform_attn import MSDeformAttn
from models.plots import LEVEL_COLOURS, TrainingPlots, draw_curves, draw_dots, sampling_of

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ((4, 6), (2, 3))


def test_the_samples_give_the_output_of_the_attention():
    torch.manual_seed(0)
    attention = MSDeformAttn(d_model=16, num_heads=2, num_levels=2, num_points=3, backend="reference", fused=True)
    torch.nn.init.normal_(attention.sampling_offsets.weight, std=0.3)
    torch.nn.init.normal_(attention.attention_weights.weight, std=0.3)
    query, features, points = torch.randn(1, 5, 16), torch.randn(1, 30, 16), torch.rand(1, 5, 2, 2)
    padding = torch.zeros(1, 30, dtype=torch.bool)
    locations, weights = sampling_of(attention, query, points, SHAPES)
    value = attention.value_proj(features).unflatten(-1, (2, -1))
    sampled = msda_op.ms_deform_attn(value, SHAPES, None, locations, weights)
    torch.testing.assert_close(attention.output_proj(sampled), attention(query, points, features, SHAPES, padding))
    assert not torch.allclose(sampled, msda_op.ms_deform_attn(value, SHAPES, None, locations.flip(-1), weights))


def test_dots_are_where_the_samples_are():
    locations = torch.tensor([[[[0.25, 0.5]], [[0.75, 0.5]]]])
    picture = draw_dots(Image.new("RGB", (960, 480)), locations, torch.full((1, 2, 1), 0.5), (0.0, 0.0, 10.0, 10.0))
    colours = ["#{:02x}{:02x}{:02x}".format(*picture.getpixel((x, 240))) for x in (240, 720)]
    assert colours == list(LEVEL_COLOURS[:2])
    assert picture.getpixel((480, 240)) == (0, 0, 0)
    assert picture.getpixel((9, 5)) == (255, 255, 255)
    assert picture.width == 960
    assert picture.height > 480
    underlined = {picture.getpixel((x, picture.height - 3)) for x in range(960)}
    named = {"#{:02x}{:02x}{:02x}".format(*colour) for colour in underlined}
    assert named == {"#ffffff", "#000000", *LEVEL_COLOURS[:2]}


def test_what_is_missing_is_said_with_the_extra_that_brings_it(tmp_path, monkeypatch, caplog):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [name for name in extras["plots"] if name.startswith("matplotlib")]
    monkeypatch.setattr("models.plots.find_spec", lambda name: None)
    trainer = SimpleNamespace(world_size=1, val_dataloaders=None)
    with caplog.at_level("INFO"):
        TrainingPlots(str(tmp_path)).on_train_end(trainer, None)
    assert caplog.messages == ["no training curves without matplotlib: pip install -e '.[plots]'"]


def test_curves_become_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    curves = {"train/loss": [(1, 3.0), (2, 2.0)], "val/AP": [(2, 0.1)]}
    draw_curves(curves, tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.size == (840, 720)
