"""Reading image files of any kind as RGB."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

from coco.errors import DataError

RGB = NDArray[np.uint8]

TRANSPOSING_ORIENTATIONS = (5, 6, 7, 8)


def read_image_rgb(path: Path, recorded_size_hw: tuple[int, int] | None = None) -> RGB:
    """Reads an image as a person would see it.

    Grayscale, palette, CMYK and 16-bit images become RGB, 16-bit values scaled from 0..65535 to 0..255; transparent
    images are laid over white.

    A camera's orientation tag (EXIF) is honoured if the annotations were made on the upright picture. The recorded size
    tells: when it agrees with the stored pixels alone, they are kept as stored (as the published COCO pipelines do);
    when it agrees with the upright picture, or is unknown, the picture is turned upright.

    Args:
        path: The image file.
        recorded_size_hw: (height, width) in pixels that the annotation file records, None if unknown.

    Returns:
        uint8 [H, W, 3].

    Raises:
        DataError: The file is missing, truncated or no image, or its size is neither way round the recorded one.
    """
    try:
        with Image.open(path) as image:
            image.load()
            upright = _turn_upright(image, path, recorded_size_hw)
    except OSError as error:
        raise DataError(
            f"image file must be readable, got {path} ({error}); replace the file or remove it from the annotations"
        ) from error
    return np.array(_convert_to_rgb(upright))


def _turn_upright(image: Image.Image, path: Path, recorded_size_hw: tuple[int, int] | None) -> Image.Image:
    """Applies the orientation tag unless the annotations refer to the stored pixels."""
    if recorded_size_hw is None:
        return ImageOps.exif_transpose(image)
    stored_hw = (image.height, image.width)
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    upright_hw = stored_hw[::-1] if orientation in TRANSPOSING_ORIENTATIONS else stored_hw
    if recorded_size_hw == stored_hw:
        return image
    if recorded_size_hw == upright_hw:
        return ImageOps.exif_transpose(image)
    raise DataError(
        f"image size must be the recorded height and width {recorded_size_hw}, got {stored_hw} in {path}; "
        "correct the annotation file, or rescale the boxes with the images"
    )


def _convert_to_rgb(image: Image.Image) -> Image.Image:
    """Converts any mode of Pillow to RGB."""
    if image.mode in ("I;16", "I;16B", "I;16L", "I"):
        scaled = np.asarray(image, dtype=np.float64) * (255 / 65535)
        return Image.fromarray(np.clip(scaled + 0.5, 0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")
