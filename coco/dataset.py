"""A map-style detection data set over a COCO annotation file."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors

from coco.annotations import AnnotationTable
from coco.images import read_image_rgb

Transform = Callable[[tv_tensors.Image, dict[str, Tensor]], tuple[tv_tensors.Image, dict[str, Tensor]]]
"""Maps an image and its target {"boxes": BoundingBoxes XYXY in pixels, "labels": int64} to new ones."""


@dataclass(frozen=True)
class Sample:
    """One image after augmentation, with its targets.

    Attributes:
        image: uint8 [3, H, W], RGB.
        labels: int64 [T], contiguous class indices.
        boxes_cxcywh: float32 [T, 4], normalised by W and H.
        image_id: The annotation file's id.
        original_size_hw: Height and width in pixels before augmentation.
    """

    image: Tensor
    labels: Tensor
    boxes_cxcywh: Tensor
    image_id: int
    original_size_hw: tuple[int, int]


class CocoDataset(Dataset[Sample]):
    """Images in order of their ids, with the boxes that a detector trains on.

    Crowd annotations are no targets; boxes are clipped to the image. Everything is held in arrays, whose pages worker
    processes share, rather than in Python objects, which they would copy page by page.

    Args:
        annotations: As `coco.annotations.read_table` returns it.
        images_dir: Folder that the file names are relative to.
        transform: Augmentation of image and target.
    """

    def __init__(self, *, annotations: AnnotationTable, images_dir: Path, transform: Transform) -> None:
        is_target = ~annotations.is_crowd
        targets_before = np.concatenate([[0], is_target.cumsum()])
        self._images_dir = images_dir
        self._transform = transform
        self._file_names = annotations.file_names
        self._image_ids = torch.from_numpy(annotations.image_ids.copy())
        self._sizes_hw = torch.from_numpy(annotations.sizes_hw.copy())
        self._first_target = torch.from_numpy(targets_before[annotations.first_box])
        self._labels = torch.from_numpy(annotations.labels[is_target])
        self._boxes_xywh = torch.from_numpy(annotations.boxes_xywh[is_target]).float()

    def __len__(self) -> int:
        return len(self._file_names)

    def __getitem__(self, index: int) -> Sample:
        original_size_hw = self._size_hw(index)
        image, target = self._transform(self.read_image(index), self.read_target(index))
        height, width = image.shape[-2:]
        boxes_xyxy = target["boxes"].as_subclass(Tensor) / torch.tensor([width, height, width, height])
        low, high = boxes_xyxy[:, :2], boxes_xyxy[:, 2:]
        return Sample(
            image=image.as_subclass(Tensor),
            labels=target["labels"],
            boxes_cxcywh=torch.cat([(low + high) / 2, high - low], dim=1),
            image_id=int(self._image_ids[index]),
            original_size_hw=original_size_hw,
        )

    def index_of(self, image_id: int) -> int:
        """Returns the place of an image id in this data set."""
        return int(torch.searchsorted(self._image_ids, image_id))

    def read_image(self, index: int) -> tv_tensors.Image:
        """Reads an image as it is before augmentation, uint8 [3, H, W] RGB."""
        pixels = read_image_rgb(self._images_dir / self._file_names[index], self._size_hw(index))
        return tv_tensors.Image(torch.from_numpy(pixels).permute(2, 0, 1))

    def read_target(self, index: int) -> dict[str, Tensor]:
        """Returns the target before augmentation: `boxes` (BoundingBoxes XYXY in pixels) and `labels` (int64)."""
        chosen = slice(int(self._first_target[index]), int(self._first_target[index + 1]))
        height, width = self._size_hw(index)
        x, y, box_width, box_height = self._boxes_xywh[chosen].unbind(1)
        low_x, high_x = x.clamp(0, width), (x + box_width).clamp(0, width)
        low_y, high_y = y.clamp(0, height), (y + box_height).clamp(0, height)
        boxes = tv_tensors.BoundingBoxes(
            torch.stack([low_x, low_y, high_x, high_y], dim=1),
            format=tv_tensors.BoundingBoxFormat.XYXY,
            canvas_size=(height, width),
        )
        return {"boxes": boxes, "labels": self._labels[chosen].clone()}

    def _size_hw(self, index: int) -> tuple[int, int]:
        height, width = self._sizes_hw[index].tolist()
        return height, width
