"""Downloads COCO 2017 for detection: `python -m scripts.download_coco /path/to/coco [--only val annotations]`.

Asks only for what is missing, goes on where it was interrupted, and checks sizes and the published checksums. 20 GB
come over the network and, while an archive is unpacked, need 40 GB of disk. Then: `data=coco data.root=/path/to/coco`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from coco.download import ARCHIVES, SERVER, fetch_archive, is_complete, unpack_archive
from coco.errors import DataError


def main(arguments: Sequence[str] | None = None) -> int:
    """Downloads and unpacks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="folder to fill")
    parser.add_argument("--only", nargs="+", choices=list(ARCHIVES), default=list(ARCHIVES), help="parts to fetch")
    parser.add_argument("--keep-archives", action="store_true", help="keep the zip files after unpacking")
    parser.add_argument("--server", default=SERVER, help="a mirror with the same paths (default: %(default)s)")
    parser.add_argument("--retries", type=int, default=20, help="broken connections in a row that are forgiven")
    parser.add_argument("--wait", type=float, default=5.0, help="seconds before each of them is taken up again")
    options = parser.parse_args(arguments)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    try:
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
            for name in options.only:
                fetch(name, options, bars)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def fetch(name: str, options: argparse.Namespace, bars: Progress) -> None:
    """Makes one part complete."""
    archive, root = ARCHIVES[name], options.root
    if is_complete(archive, root):
        bars.console.print(f"{name}: complete in {root}")
        return
    task = bars.add_task(archive.name, total=archive.num_bytes)
    path = fetch_archive(
        archive,
        root,
        options.server,
        retries=options.retries,
        wait_s=options.wait,
        progress=lambda have, total: bars.update(task, completed=have, total=total),
    )
    bars.console.print(f"{name}: unpacking {archive.num_files} files")
    unpack_archive(archive, path, root)
    if not options.keep_archives:
        path.unlink()


if __name__ == "__main__":
    sys.exit(main())
