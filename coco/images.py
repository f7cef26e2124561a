"""Reading image files of any kind as RGB."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from coco.errors import DataError, ImageSizeError

RGB = NDArray[np.uint8]

TRANSPOSING_ORIENTATIONS = (5, 6, 7, 8)
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What turns a picture of each EXIF orientation upright."""

UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
"""What Pillow raises for files that are damaged, no images, or of more pixels than it reads (179 million)."""


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
        DataError: The file is missing, truncated, no image, or of more than 179 million pixels, or its pixels are
            floating point numbers, whose range nobody knows.
        ImageSizeError: A `DataError`; its size is neither way round the recorded one.
    """
    try:
        with Image.open(path) as image:
            image.load()
            orientation = read_orientation(image)
    except UNREADABLE as error:
        raise DataError(
            f"image file must be readable, got {path} ({' '.join(str(error).split())}); replace the file or remove it "
            "from the annotations"
        ) from error
    if image.mode == "F":
        raise DataError(
            f"image must have integers as pixels, got floating point numbers in {path}; save it with 8 or 16 bits"
        )
    return np.array(_convert_to_rgb(_turn_upright(image, orientation, path, recorded_size_hw)))


def read_orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation of an image, 1 (upright) if it has none."""
    return image.getexif().get(ExifTags.Base.Orientation, 1)


def _turn_upright(
    image: Image.Image, orientation: int, path: Path, recorded_size_hw: tuple[int, int] | None
) -> Image.Image:
    """Applies the orientation tag unless the annotations refer to the stored pixels."""
    stored_hw = (image.height, image.width)
    if recorded_size_hw == stored_hw:
        return image
    upright_hw = stored_hw[::-1] if orientation in TRANSPOSING_ORIENTATIONS else stored_hw
    if recorded_size_hw in (None, upright_hw):
        return image.transpose(TURNS[orientation]) if orientation in TURNS else image
    raise ImageSizeError(
        f"image size must be the recorded height and width {recorded_size_hw}, got {stored_hw} in {path}; "
        "correct the annotation file, or rescale the boxes with the images"
    )


def _convert_to_rgb(image: Image.Image) -> Image.Image:
    """Converts any mode of Pillow with integers as pixels to RGB."""
    if image.mode in ("I;16", "I;16B", "I;16L", "I"):
        scaled = np.asarray(image, dtype=np.float64) * (255 / 65535)
        return Image.fromarray(np.clip(scaled + 0.5, 0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")
