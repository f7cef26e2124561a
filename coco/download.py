"""Fetching COCO 2017: only what is missing, resumed where it stopped, believed only with the published checksum."""

import contextlib
import hashlib
import http
import http.client
import shutil
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from coco.errors import DataError

CHUNK_BYTES = 1 << 20
SERVER = "http://images.cocodataset.org"


@dataclass(frozen=True)
class Archive:
    """A zip file and what is wanted of it.

    Attributes:
        path: Where the server has it.
        num_bytes: Its size.
        md5: Its checksum, as published.
        members: Files or folders in it that are unpacked, by the paths that they get.
        num_files: How many files that makes; fewer on the disk are unpacked anew.
    """

    path: str
    num_bytes: int
    md5: str
    members: tuple[str, ...]
    num_files: int

    @property
    def name(self) -> str:
        """Its file name."""
        return PurePosixPath(self.path).name


ARCHIVES = {
    "annotations": Archive(
        "annotations/annotations_trainval2017.zip",
        252_907_541,
        "f4bbac642086de4f52a3fdda2de5fa2c",
        ("annotations/instances_train2017.json", "annotations/instances_val2017.json"),
        2,
    ),
    "val": Archive("zips/val2017.zip", 815_585_330, "442b8da7639aecaf257c1dceb8ba8c80", ("val2017",), 5_000),
    "train": Archive("zips/train2017.zip", 19_336_861_798, "cced6f7f71b7629ddf16f17bbcfab6b2", ("train2017",), 118_287),
}
"""COCO 2017 as its site publishes it."""

Progress = Callable[[int, int], None]
"""Called with the bytes that are there and those of the whole."""


def is_complete(archive: Archive, root: Path) -> bool:
    """Whether everything wanted of an archive is unpacked in a folder."""
    found = 0
    for member in archive.members:
        path = root / member
        found += sum(1 for _ in path.iterdir()) if path.is_dir() else path.is_file()
    return found == archive.num_files


def fetch_archive(
    archive: Archive, root: Path, server: str, *, retries: int, wait_s: float, progress: Progress
) -> Path:
    """Downloads an archive into a folder, going on where an earlier call stopped.

    What has arrived is kept in `<name>.part`, which takes the archive's name once size and checksum agree. An archive
    that is there under its name is taken as it is.

    Args:
        archive: What to download.
        root: The folder.
        server: Start of the address.
        retries: How often to go on after a broken connection, counted from the last byte that arrived.
        wait_s: Seconds to wait before that.
        progress: Is told of every chunk.

    Returns:
        The archive's path.

    Raises:
        DataError: The server does not have it, the connection broke too often, the disk is too small, or size or
            checksum are wrong, in which case the file is removed.
    """
    target, part = root / archive.name, root / f"{archive.name}.part"
    if target.is_file():
        return target
    root.mkdir(parents=True, exist_ok=True)
    have = part.stat().st_size if part.is_file() else 0
    free = shutil.disk_usage(root).free
    if free < 2 * archive.num_bytes - have:
        raise DataError(
            f"free disk space must be twice the archive's {archive.num_bytes / 1e9:.1f} GB, got {free / 1e9:.1f} GB "
            f"in {root}; free some, or choose another folder"
        )
    failures = 0
    while have < archive.num_bytes:
        try:
            _append(f"{server}/{archive.path}", part, archive.num_bytes, progress)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                raise DataError(
                    f"server must have {archive.path}, got {error} from {server}; check --server"
                ) from error
            reason = str(error)
        else:
            reason = "the connection ended early"
        before, have = have, part.stat().st_size if part.is_file() else 0
        failures = 0 if have > before else failures + 1
        if failures > retries:
            raise DataError(
                f"connection to {server} must last, got {reason} at {have} of {archive.num_bytes} bytes of "
                f"{archive.name}; call again to go on from there"
            )
        if have < archive.num_bytes:
            time.sleep(wait_s)
    _verify(part, archive)
    part.rename(target)
    return target


def unpack_archive(archive: Archive, zip_path: Path, root: Path) -> None:
    """Unpacks what is wanted of an archive; files appear under their names once all of them are whole.

    Raises:
        DataError: The archive lacks something.
    """
    with (
        tempfile.TemporaryDirectory(dir=root, prefix=f".{archive.name}.") as aside,
        zipfile.ZipFile(zip_path) as source,
    ):
        wanted = [name for name in source.namelist() if _is_wanted(name, archive.members)]
        source.extractall(aside, wanted)
        if not is_complete(archive, Path(aside)):
            raise DataError(
                f"archive must hold {archive.num_files} files under {', '.join(archive.members)}, got {len(wanted)} "
                f"in {zip_path}; remove it and call again"
            )
        for member in archive.members:
            target = root / member
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_dir():
                shutil.rmtree(target)
            (Path(aside) / member).replace(target)


def _append(url: str, part: Path, num_bytes: int, progress: Progress) -> None:
    """Asks for the bytes that are missing and appends them; starts anew where the server ignores the question."""
    have = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"})
    with contextlib.closing(urllib.request.urlopen(request, timeout=60)) as answer:
        resumed = answer.status == http.HTTPStatus.PARTIAL_CONTENT
        have = have if resumed else 0
        with part.open("ab" if resumed else "wb") as file:
            while have < num_bytes and (chunk := answer.read(min(CHUNK_BYTES, num_bytes - have))):
                file.write(chunk)
                have += len(chunk)
                progress(have, num_bytes)


def _verify(path: Path, archive: Archive) -> None:
    """Compares size and checksum with the published ones and removes a file that differs."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest()
    if path.stat().st_size != archive.num_bytes or found != archive.md5:
        path.unlink()
        raise DataError(
            f"{archive.name} must have the md5 {archive.md5}, got {found}; it was removed: call again to download it"
        )


def _is_wanted(name: str, members: tuple[str, ...]) -> bool:
    """Whether an entry of an archive is one of the members or lies in one; folders come with their files."""
    return not name.endswith("/") and any(name == member or name.startswith(f"{member}/") for member in members)
