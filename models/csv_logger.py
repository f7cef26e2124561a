"""A CSV log that a resumed run goes on with."""

import csv
from pathlib import Path

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only


class AppendingWriter(ExperimentWriter):
    """Appends to a file that is there already, where Lightning's deletes it."""

    def _check_log_dir_exists(self) -> None:
        path = Path(self.metrics_file_path)
        if path.is_file():
            with path.open(newline="") as file:
                self.metrics_keys = list(csv.DictReader(file).fieldnames or [])

    def drop_from(self, step: int) -> None:
        """Removes rows of this and later steps: a run that goes on from here writes them again."""
        path = Path(self.metrics_file_path)
        if not path.is_file():
            return
        with path.open(newline="") as file:
            kept = [row for row in csv.DictReader(file) if int(row["step"]) < step]
        aside = path.with_name(f".{path.name}.partial")
        with aside.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=self.metrics_keys)
            writer.writeheader()
            writer.writerows(kept)
        aside.replace(path)


class AppendingCSVLogger(CSVLogger):
    """Writes `metrics.csv` and keeps what earlier parts of the run wrote."""

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        """The writer; a mute one on every process but the first."""
        if self._experiment is None:
            self._experiment = AppendingWriter(log_dir=self.log_dir)
        return self._experiment  # type: ignore[return-value]  # an AppendingWriter

    @rank_zero_only
    def drop_from(self, step: int) -> None:
        """Removes rows of this and later optimiser steps, counted from 0."""
        self.experiment.drop_from(step)  # type: ignore[attr-defined]  # an AppendingWriter on rank 0
