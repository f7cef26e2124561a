"""Trainings, from their summary.json, and what more GPUs bring to one, from `python -m scripts.scaling`."""

import math
import re
import shlex
from collections.abc import Sequence

from scripts.figures.tables import NOT_SAID, Cells, Content, Kind, ResultsFile, Section, format_gib, format_words

ARM_WORDS = ("op=", "precision=")
"""Words in which the two trainings of a row in front differ."""
TRAINING_SECTION = Section(
    "Trainings",
    "AP in percent, of few images: not to be compared with published ones, and with each other at equal commits alone.",
    ("settings of `train.py`", "evaluated on", "AP", "AP50", "steps", "time", "images/s", "peak memory"),
)
SCALING_SECTION = Section(
    "Several GPUs",
    "Images per second of a training, and whether all find the same with a checkpoint as one does, to the bit.",
    ("settings", "GPUs", "images/s of one", "images/s of all", "times one", "same detections"),
)


def make_rows(content: Content) -> list[Cells]:
    """Returns a row: what was trained, on what it was evaluated, and what came out."""
    if "validation" not in content or "img_per_s_median" not in content:
        return []
    data = content["manifest"]["config"]["data"]
    images = "images" if data["limit_val"] is None else f"{data['limit_val']} images"
    scores = [content["validation"].get(f"val/{name}") for name in ("AP", "AP50")]
    return [
        (
            format_words(_words(content)),
            f"the {images} trained on" if _is_by_heart(content) else f"other {images}",
            *("" if score is None else f"{100 * score:.1f}" for score in scores),
            str(content["steps"]),
            _format_minutes(content),
            f"{content['img_per_s_median']:.1f}",
            _format_peak(content),
        )
    ]


def make_scaling_rows(content: Content) -> list[Cells]:
    """Returns a row a number of GPUs."""
    if "speed_up" not in content:
        return []
    rates = (f"{content[f'img_per_s_{gpus}']:.1f}" for gpus in ("one", "all"))
    same = "yes" if content["evaluation_equals_one_gpu"] else "**no**"
    return [(_scaling_words(content), str(content["gpus"]), *rates, f"{content['speed_up']:.2f} x", same)]


def make_scaling_front(files: Sequence[ResultsFile]) -> list[Cells]:
    """Returns a row for the settings whose GPUs together train the most images a second."""
    file = max(files, key=lambda each: float(each.content["img_per_s_all"]))
    words, gpus, one, together, times, _ = make_scaling_rows(file.content)[0]
    what = f"training on {gpus} GPUs, {words}"
    return file.sign([(what, f"{together} images/s", f"one GPU {one} images/s ({times})")])


def make_front(files: Sequence[ResultsFile]) -> list[Cells]:
    """Returns a row for each training by heart with our op and with the reference, then those told by other images.

    Both trainings of a row are of one commit and ran on one machine.
    """
    arms: dict[Cells, dict[str, ResultsFile]] = {}
    others: list[Cells] = []
    for file in files:
        if _is_by_heart(file.content):
            words = [word for word in _words(file.content) if not word.startswith(ARM_WORDS)]
            name = (format_words(words), file.machine, file.commit)
            arms.setdefault(name, {})[_arm_word(file.content, "op=")] = file
        elif (score := file.content["validation"].get("val/AP50")) is not None:
            what = f"AP50 on other images than trained on, {format_words(_words(file.content))}"
            others += file.sign([(what, f"{100 * score:.1f} in {_format_result(file.content)}", "")])
    pairs = [
        (
            f"AP by heart, {words}",
            _describe_arm(found["triton"].content),
            f"PyTorch `grid_sample` {_describe_arm(found['reference'].content)}",
            machine,
            f"{found['triton'].link}, {found['reference'].link}",
        )
        for (words, machine, _), found in arms.items()
        if found.keys() >= {"triton", "reference"}
    ]
    return [*pairs, *others]


def _words(content: Content) -> list[str]:
    """The words of a training's command that say what was trained."""
    words = shlex.split(content["manifest"]["environment"]["command"])[2:]
    return [word for word in words if not word.startswith(NOT_SAID)]


def _scaling_words(content: Content) -> str:
    """What was trained; of a file that does not say it, by its command, in which no trainer meant DDP."""
    if "settings" in content:
        return format_words(content["settings"])
    command = content["environment"]["command"]
    trainer = re.search(r"--trainer (\w+)", command)
    overrides = [word for word in shlex.split(command) if re.fullmatch(r"[\w.]+=.*", word)]
    return format_words(
        [f"trainer={trainer[1] if trainer else 'ddp'}", *(overrides or ("op=triton", "precision=bf16"))]
    )


def _arm_word(content: Content, key: str) -> str:
    return next((word.removeprefix(key) for word in _words(content) if word.startswith(key)), "default")


def _is_by_heart(content: Content) -> bool:
    """Whether a training was evaluated on its own images."""
    data = content["manifest"]["config"]["data"]
    return all(data[f"train_{part}"] == data[f"val_{part}"] for part in ("json", "images"))


def _describe_arm(content: Content) -> str:
    ap = 100 * content["validation"].get("val/AP", math.nan)
    return f"{ap:.1f} in {_format_result(content)}, {_arm_word(content, 'precision=')}"


def _format_result(content: Content) -> str:
    memory = _format_peak(content)
    return f"{_format_minutes(content)}{f' and {memory}' if memory else ''}"


def _format_minutes(content: Content) -> str:
    return f"{content['train_seconds'] / 60:.1f} min"


def _format_peak(content: Content) -> str:
    return format_gib(content["peak_memory_mib"] / 1024)


TRAINING = Kind(TRAINING_SECTION, make_rows, make_front)
SCALING = Kind(SCALING_SECTION, make_scaling_rows, make_scaling_front)
