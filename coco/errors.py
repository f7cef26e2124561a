"""Errors of data that its owner can mend, and of the loader."""

import shutil
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


class DataError(ValueError):
    """A fault of the data or of the settings that name it, told in one line.

    An error of a loader's worker arrives as its whole traceback in one message; the last line is what happened.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message.strip().splitlines()[-1].removeprefix(f"{__name__}.{type(self).__name__}: "))


class ImageSizeError(DataError):
    """An image is of another size than the annotation file records."""


class NonFiniteDetectionsError(ValueError):
    """Detections hold NaN or infinity: the model has diverged."""


def explain_dead_worker(error: RuntimeError) -> str | None:
    """Returns a line on why a loader's worker died and what to do, None if the error is another one."""
    message = str(error).strip()
    if not (message.startswith("DataLoader worker") or "unable to open shared memory" in message):
        return None
    free = f"{shutil.disk_usage(SHARED_MEMORY).free >> 20} MiB free" if SHARED_MEMORY.is_dir() else "absent"
    reason = message.splitlines()[0]
    return (
        f"loader workers must stay alive, got: {reason} If {SHARED_MEMORY} ({free}) or the memory is full, give the "
        "container more (docker run --shm-size=8g), lower data.num_workers or data.batch_size, or set "
        "data.num_workers=0"
    )
