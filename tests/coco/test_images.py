import numpy as np
import pytest
from PIL import ExifTags, Image

from coco.images import read_image_rgb


@pytest.fixture
def rotated_jpeg(tmp_path):
    """Stored 20 high and 40 wide, left half red; shown upright it is 40 high, with red on top."""
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:, :20, 0] = 255
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    path = tmp_path / "rotated.jpg"
    Image.fromarray(pixels).save(path, exif=exif, quality=95)
    return path


def test_the_recorded_size_decides_about_the_orientation(rotated_jpeg):
    stored = read_image_rgb(rotated_jpeg, (20, 40))
    assert stored.shape == (20, 40, 3)
    assert stored[10, 5, 0] > 200 > 50 > stored[10, 35, 0]
    for upright in (read_image_rgb(rotated_jpeg, (40, 20)), read_image_rgb(rotated_jpeg)):
        assert upright.shape == (40, 20, 3)
        assert upright[5, 10, 0] > 200 > 50 > upright[35, 10, 0]
    with pytest.raises(ValueError, match=r"recorded height and width \(30, 40\), got \(20, 40\) in .*rotated.jpg"):
        read_image_rgb(rotated_jpeg, (30, 40))


def test_sixteen_bits_are_scaled(tmp_path):
    path = tmp_path / "deep.png"
    Image.fromarray(np.array([[0, 257 * 100, 65535]], np.uint16)).save(path)
    assert read_image_rgb(path)[0, :, 0].tolist() == [0, 100, 255]


def test_transparency_is_laid_over_white(tmp_path):
    path = tmp_path / "clear.png"
    Image.fromarray(np.array([[[200, 0, 0, 255], [200, 0, 0, 0]]], np.uint8)).save(path)
    assert read_image_rgb(path)[0].tolist() == [[200, 0, 0], [255, 255, 255]]


def test_unreadable_files_are_named(tmp_path, rotated_jpeg):
    with pytest.raises(ValueError, match=r"must be readable, got .*absent.jpg"):
        read_image_rgb(tmp_path / "absent.jpg")
    rotated_jpeg.write_bytes(rotated_jpeg.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"must be readable, got .*rotated\.jpg \(.*[Tt]runcated"):
        read_image_rgb(rotated_jpeg)


def test_odd_images_become_rgb(odd_inputs):
    shapes = {
        "pil_sample_cmyk.jpg": (100, 100, 3),
        "hopper_gray.jpg": (128, 128, 3),
        "hopper_orientation_6.jpg": (128, 128, 3),
        "i_trns.png": (64, 64, 3),
        "p_trns_single.png": (64, 64, 3),
        "pil123rgba.png": (150, 162, 3),
        "jfif_unit_cm.jpg": (1, 1, 3),
        "Landscape_6.jpg": (1200, 1800, 3),
        "000000079841.jpg": (213, 640, 3),
    }
    for name, shape in shapes.items():
        pixels = read_image_rgb(odd_inputs / "images" / name)
        assert pixels.dtype == np.uint8
        assert pixels.shape == shape, name
    for name in ("truncated_jpeg.jpg", "broken.png"):
        with pytest.raises(ValueError, match=f"must be readable, got .*{name}"):
            read_image_rgb(odd_inputs / "images" / name)
