"""COCO-format data: reading, augmenting, evaluating, drawing and generating."""
