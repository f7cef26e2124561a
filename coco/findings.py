"""The kinds of faults of a data set, what training does about each, and what the doctor found."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

REFUSED, DROPPED, REPAIRED, NOTED = "refused", "dropped", "repaired", "noted"

KINDS = {
    "unreadable annotation file": (REFUSED, "training does not start"),
    "no images or no categories": (REFUSED, "training does not start; list them in the file"),
    "incomplete entry": (REFUSED, "training does not start; complete or remove the entry"),
    "id that is no integer": (REFUSED, "training does not start; number the entries with integers"),
    "repeated image id": (REFUSED, "training does not start; renumber the images"),
    "repeated category id": (REFUSED, "training does not start; renumber the categories"),
    "image without a size": (REFUSED, "training does not start; write height and width as integers above 0"),
    "image without a file name": (REFUSED, "training does not start; a file name is text"),
    "category without a name": (REFUSED, "training does not start; a name is text"),
    "categories that differ from training": (REFUSED, "training does not start; list all categories in both files"),
    "unknown category": (REFUSED, "training does not start; list the category or remove the annotation"),
    "unknown image": (REFUSED, "training does not start; list the image or remove the annotation"),
    "malformed box": (REFUSED, "training does not start; a box is four finite numbers"),
    "malformed iscrowd": (REFUSED, "training does not start; it is 0 or 1"),
    "missing image file": (REFUSED, "training does not start; restore the file or remove the image"),
    "unreadable image file": (REFUSED, "training stops where it meets it; replace the file or remove the image"),
    "image of another size": (REFUSED, "training stops where it meets it; correct height and width, or the boxes too"),
    "box without area": (DROPPED, "the box is dropped, here and in evaluation"),
    "box beyond the image": (REPAIRED, "the box is clipped to the image in training"),
    "missing area": (REPAIRED, "the area of the box is used"),
    "malformed area": (REPAIRED, "the area of the box is used: COCOeval ignores boxes of negative area in silence"),
    "missing iscrowd": (REPAIRED, "taken as 0"),
    "annotation id 0 or repeated": (REPAIRED, "annotations are numbered anew: COCOeval takes id 0 as no match"),
    "crowd": (NOTED, "no target in training, ignored in evaluation"),
    "image without boxes": (NOTED, "trains as background"),
    "category without boxes": (NOTED, "is never learnt, and has no AP"),
    "more than 300 boxes in an image": (NOTED, "a model of 300 queries cannot find them all; raise num_queries"),
    "box given twice": (NOTED, "is kept twice; a detector that finds it once misses one"),
    "file of several images": (NOTED, "is trained on and evaluated several times"),
    "file of training and validation": (NOTED, "the evaluation is on images that were trained on"),
    "name of several categories": (NOTED, "kept apart by their ids; not matched to a checkpoint with other ids"),
    "image that is not RGB": (NOTED, "becomes RGB as a person would see it"),
    "image with an orientation tag": (NOTED, "is turned upright if the recorded size is that of the upright picture"),
}
"""What training does about each kind of fault."""

MAX_EXAMPLES = 5
MAX_LETTERS = 300


@dataclass
class Fault:
    """One kind of fault in one split.

    Attributes:
        kind: A key of `KINDS`.
        severity: "refused", "dropped", "repaired" or "noted".
        action: What training does.
        count: How often it occurs.
        examples: The first cases.
    """

    kind: str
    severity: str
    action: str
    count: int = 0
    examples: list[str] = field(default_factory=list)


class Findings:
    """The faults of a split, in the order in which their kinds were met."""

    def __init__(self) -> None:
        self.faults: dict[str, Fault] = {}

    def add(self, kind: str, example: str) -> None:
        """Counts a case."""
        if kind not in self.faults:
            self.faults[kind] = Fault(kind, *KINDS[kind])
        fault = self.faults[kind]
        fault.count += 1
        if len(fault.examples) < MAX_EXAMPLES:
            fault.examples.append(example if len(example) <= MAX_LETTERS else f"{example[:MAX_LETTERS]}...")

    def add_all(self, kind: str, examples: Iterable[str]) -> None:
        """Counts several cases."""
        for example in examples:
            self.add(kind, example)

    @property
    def has_refused(self) -> bool:
        """Whether training will not take this data."""
        return any(fault.severity == REFUSED for fault in self.faults.values())

    def as_json(self) -> list[dict[str, Any]]:
        """Returns the faults as plain values, the worst first."""
        order = (REFUSED, DROPPED, REPAIRED, NOTED)
        return [asdict(fault) for fault in sorted(self.faults.values(), key=lambda fault: order.index(fault.severity))]


def report_json(splits: dict[str, Findings]) -> str:
    """Returns the findings of all splits as JSON."""
    return json.dumps({name: findings.as_json() for name, findings in splits.items()}, indent=1) + "\n"
