"""What the kinds of figures have in common: results files, tables, and how units are written."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Cells = tuple[str, ...]
Content = dict[str, Any]
NEW_LINE = "<br>"
"""In a cell."""
NOT_SAID = (
    *("data.root=", "data.train_json=", "data.train_images=", "data.val_json=", "data.val_images="),
    *("callbacks.", "logger=", "hydra.", "trainer.devices"),
)
"""Words of a command that do not tell what was measured: where files lie and how much is printed."""


@dataclass(frozen=True)
class Section:
    """A table of the README.

    Args:
        title: what was measured.
        note: how to read it.
        columns: names of all columns but the last two, which are machine and file.
    """

    title: str
    note: str
    columns: Cells


@dataclass(frozen=True)
class ResultsFile:
    """A file below results/.

    Args:
        content: what it holds.
        path: where the README finds it.
    """

    content: Content
    path: str

    @property
    def machine(self) -> str:
        """GPU and version of torch, as far as the file says."""
        environment = self._environment
        words = [(environment.get("gpus") or ["CPU"])[0]]
        if torch_version := environment.get("packages", {}).get("torch"):
            words.append(f"torch {torch_version}")
        return ", ".join(words)

    @property
    def commit(self) -> str:
        """Of the code that was measured; nothing where the file does not say it."""
        return (self._environment.get("commit") or "")[:7]

    @property
    def link(self) -> str:
        """The commit, or where the file does not say it its name, as a link to the file."""
        return f"[{self.commit or self.path}]({self.path})"

    @property
    def _environment(self) -> Content:
        manifest = self.content.get("manifest", self.content)
        environment: Content = manifest.get("environment", manifest)
        return environment

    def sign(self, rows: Iterable[Cells]) -> list[Cells]:
        """Returns rows with the two last columns, machine and file."""
        return [(*cells, self.machine, self.link) for cells in rows]


def nothing_in_front(files: Sequence[ResultsFile]) -> list[Cells]:
    """Is `Kind.front` where rows are folded away alone."""
    return []


@dataclass(frozen=True)
class Kind:
    """A kind of figures.

    Args:
        section: its table.
        rows: makes the rows of a file, but for machine and file; none for a file without such figures.
        front: makes the rows of the table in front, whole, from all files that have such figures.
    """

    section: Section
    rows: Callable[[Content], list[Cells]]
    front: Callable[[Sequence[ResultsFile]], list[Cells]] = nothing_in_front


def format_section(section: Section, rows: Sequence[Cells]) -> str:
    """Returns title, note and table in Markdown; a machine that all rows share goes into the note."""
    note, columns = section.note, (*section.columns, "machine", "commit and file")
    machines = {cells[-2] for cells in rows}
    if len(machines) == 1:
        note = f"{note} Measured on {machines.pop()}."
        columns, *rows = ((*cells[:-2], cells[-1]) for cells in (columns, *rows))
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, ("---",) * len(columns), *rows)]
    return f"**{section.title}.** {note}\n\n" + "\n".join(lines)


def rows_with(content: Content, key: str) -> list[Content]:
    """Returns the rows of a file that have a key."""
    return [row for row in content.get("rows", []) if key in row]


def format_words(words: Sequence[str]) -> str:
    """Returns words of a command as code, without those of `NOT_SAID`."""
    said = [word for word in words if not word.startswith(NOT_SAID)]
    return f"`{' '.join(said)}`" if said else "as given"


def format_gib(memory_gib: float) -> str:
    """Returns a size; nothing where it was not measured, as on a CPU."""
    return f"{memory_gib:.1f} GiB" if math.isfinite(memory_gib) else ""


def format_times(time: float, ours: float) -> str:
    """Returns how many times ours a time is."""
    return f"{time / ours:.2g} x"
