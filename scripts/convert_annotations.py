"""Writes COCO's annotations of a YOLO or PASCAL VOC folder; call it once for each split.

python -m scripts.convert_annotations yolo images/train labels/train --names cat,dog --out instances_train.json
python -m scripts.convert_annotations voc JPEGImages Annotations --split ImageSets/Main/train.txt --out train.json

Then: `python train.py data=coco data.root=... data.train_json=... data.train_images=...`, and python -m scripts.doctor
with the same words to see what is wrong with the data.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from coco.conversion import convert_voc, convert_yolo, read_text
from coco.errors import DataError


def main(arguments: Sequence[str] | None = None) -> int:
    """Converts one split and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("format", choices=["yolo", "voc"])
    parser.add_argument("images", type=Path, help="folder of the images: the training's data.train_images")
    parser.add_argument("labels", type=Path, help="folder of the text or XML files")
    parser.add_argument("--names", help="classes, with commas, class 0 first, or a file with one a line (yolo: needed)")
    parser.add_argument("--split", type=Path, help="voc: file that lists names of images, one a line")
    parser.add_argument("--out", type=Path, required=True, help="annotation file to write")
    options = parser.parse_args(arguments)
    if options.format == "yolo" and options.names is None:
        parser.error("yolo needs --names")
    try:
        names = None if options.names is None else read_names(options.names)
        if options.format == "yolo":
            content = convert_yolo(options.images, options.labels, names or [])
        else:
            stems = None if options.split is None else [line.split()[0] for line in read_lines(options.split)]
            content = convert_voc(options.labels, options.images, stems, names)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(content) + "\n")
    print(
        f"{options.out}: {len(content['images'])} images, {len(content['annotations'])} boxes, classes "
        f"{', '.join(entry['name'] for entry in content['categories'])}"
    )
    return 0


def read_names(names: str) -> list[str]:
    """Returns the classes of a list with commas, or of a file."""
    return read_lines(Path(names)) if Path(names).is_file() else [name.strip() for name in names.split(",")]


def read_lines(path: Path) -> list[str]:
    """Returns the lines of a file that are not blank."""
    return [line.strip() for line in read_text(path).splitlines() if line.strip()]


if __name__ == "__main__":
    sys.exit(main())
