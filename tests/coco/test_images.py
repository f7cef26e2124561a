import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from coco.errors import DataError, ImageSizeError
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
    with pytest.raises(ImageSizeError, match=r"recorded height and width \(30, 40\), got \(20, 40\) in .*rotated.jpg"):
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


def test_all_orientations_are_turned_as_pillow_does(tmp_path):
    path = tmp_path / "turned.png"
    pixels = np.random.default_rng(0).integers(0, 255, (4, 6, 3), np.uint8)
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        Image.fromarray(pixels).save(path, exif=exif)
        with Image.open(path) as image:
            expected = np.array(ImageOps.exif_transpose(image))
        assert np.array_equal(read_image_rgb(path), expected)
        if orientation > 4:
            assert np.array_equal(read_image_rgb(path, (6, 4)), expected)


def write_header(path, magic, offset, number):
    """Changes four bytes of a sound picture's header."""
    Image.new("RGB", (60, 40)).save(path)
    content = bytearray(path.read_bytes())
    assert content.startswith(magic)
    content[offset : offset + 4] = number
    path.write_bytes(content)


def test_damaged_files_of_every_kind_are_refused_in_a_line(tmp_path):
    """Pillow raises errors of its own for some, which are no OSError."""
    write_header(tmp_path / "huge.bmp", b"BM", 18, (10**6).to_bytes(4, "little"))
    write_header(tmp_path / "length.png", b"\x89PNG", 8, (5).to_bytes(4, "big"))
    (tmp_path / "header.ppm").write_bytes(b"P6 60 4x 255 ")
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "page.jpg").write_text("<html>404</html>")
    (tmp_path / "folder.jpg").mkdir()
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(DataError, match=rf"must be readable, got .*{path.name}") as caught:
            read_image_rgb(path, (40, 60))
        assert "\n" not in str(caught.value)


def test_pixels_without_a_known_range_are_refused(tmp_path):
    path = tmp_path / "depth.tiff"
    Image.fromarray(np.zeros((4, 6), np.float32)).save(path)
    with pytest.raises(DataError, match=r"integers as pixels, got floating point numbers in .*depth\.tiff"):
        read_image_rgb(path)


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
