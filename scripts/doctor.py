"""Examines the data that a training would read: `python -m scripts.doctor data=coco data.root=/path/to/coco`.

Every other word is an override of train.py's configuration. Prints each kind of fault with its count, the first
examples and what training does about it. The exit status is 1 if training would refuse the data.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from coco.datamodule import CocoDataModule
from coco.doctor import compare_splits, examine_annotations, examine_files
from coco.findings import Findings, report_json

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
COLOURS = {"refused": "red", "dropped": "yellow", "repaired": "cyan", "noted": "white"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Examines both splits and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="of train.py, for example data=coco data.root=/path/to/coco")
    parser.add_argument("--annotations-only", action="store_true", help="leave the image files alone")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that read images")
    parser.add_argument("--json", type=Path, help="file to write the findings to")
    options = parser.parse_args(arguments)
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            data = instantiate(compose("train", overrides=options.overrides).data)
        data.check()
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    data.prepare_data()
    splits = examine(data, 0 if options.annotations_only else max(1, options.workers), options.annotations_only)
    show(splits)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(report_json(splits))
    return int(any(findings.has_refused for findings in splits.values()))


def examine(data: CocoDataModule, num_workers: int, annotations_only: bool) -> dict[str, Findings]:
    """Examines the training and the validation split, with a progress bar over the images."""
    splits, tables = {}, {}
    with Progress(console=Console(stderr=True)) as progress:
        for name, json_path, images_dir in (
            ("train", data.train_json, data.train_images),
            ("val", data.val_json, data.val_images),
        ):
            task = progress.add_task(f"{name}: annotations", total=None)
            splits[name], tables[name] = findings, table = examine_annotations(json_path)
            if table is not None and not annotations_only:
                progress.update(task, description=f"{name}: images", total=len(table.file_names))
                examine_files(
                    table,
                    images_dir,
                    findings,
                    num_workers=num_workers,
                    progress=lambda count, task=task: progress.advance(task, count),  # type: ignore[misc]
                )
    if tables["train"] is not None and tables["val"] is not None:
        compare_splits(tables["train"], data.train_images, tables["val"], data.val_images, splits["val"])
    return splits


def show(splits: dict[str, Findings]) -> None:
    """Prints the findings."""
    console = Console()
    for name, findings in splits.items():
        if not findings.faults:
            console.print(f"{name}: nothing found")
            continue
        table = Table("kind", "count", "training", "first examples", title=f"{name}: what was found")
        for fault in findings.as_json():
            action = f"[{COLOURS[fault['severity']]}]{fault['severity']}[/]: {fault['action']}"
            table.add_row(fault["kind"], str(fault["count"]), action, Text("\n".join(fault["examples"])))
        console.print(table)


if __name__ == "__main__":
    sys.exit(main())
