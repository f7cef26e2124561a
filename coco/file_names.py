"""Many strings in two arrays, which worker processes share instead of copying."""

from collections.abc import Iterable

import numpy as np


class FileNames:
    """An immutable sequence of strings.

    A list of Python strings is copied page by page into every worker, since reading one writes its reference count;
    the pages of an array stay shared.

    Args:
        names: The strings.
    """

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [name.encode() for name in names]
        self._bytes = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._starts = np.cumsum([0, *map(len, encoded)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> str:
        return self._bytes[self._starts[index] : self._starts[index + 1]].tobytes().decode()
