import numpy as np
import pytest

from coco.shapes import MIN_VISIBLE_PIXELS, SHAPES, draw_scene


def scenes(count):
    return [draw_scene(np.random.default_rng(seed), 96, 80) for seed in range(count)]


def test_masks_do_not_overlap_and_are_visible():
    for pixels, objects in scenes(40):
        assert pixels.shape == (96, 80, 3)
        assert pixels.dtype == np.uint8
        if objects:
            assert np.sum([item.visible for item in objects], axis=0).max() == 1
        assert all(item.visible.sum() >= MIN_VISIBLE_PIXELS for item in objects)


def test_scenes_hold_every_kind():
    drawn = [objects for _, objects in scenes(120)]
    assert {item.label for objects in drawn for item in objects} == set(range(len(SHAPES)))
    assert any(not objects for objects in drawn)
    assert any(item.is_crowd for objects in drawn for item in objects)
    areas = [item.visible.sum() for objects in drawn for item in objects]
    assert min(areas) < 100
    assert max(areas) > 2000


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_outlines_fit_the_unit_circle(shape):
    v, u = np.mgrid[-1.5:1.5:121j, -1.5:1.5:121j]
    inside = shape.outline(u, v) < 0
    radius = np.hypot(u, v)[inside].max()
    assert 0.9 < radius < 1.05
    assert 0.1 < inside.mean() < 0.4
    assert 0.05 < (shape.texture(u, v)[inside] > 0).mean() < 0.95
