import csv

from lightning.pytorch.loggers import CSVLogger

from models.csv_logger import AppendingCSVLogger


def write(logger_class, folder, steps, name="loss"):
    logger = logger_class(folder, name="csv", version="")
    for step in steps:
        logger.log_metrics({name: step / 2}, step)
    logger.save()
    return logger


def read(folder):
    with (folder / "csv" / "metrics.csv").open() as file:
        return [(int(row["step"]), row["loss"]) for row in csv.DictReader(file)]


def test_rows_are_kept_and_new_columns_join_them(tmp_path):
    write(AppendingCSVLogger, tmp_path, range(3))
    write(AppendingCSVLogger, tmp_path, [3], name="AP")
    assert read(tmp_path) == [(0, "0.0"), (1, "0.5"), (2, "1.0"), (3, "")]
    write(CSVLogger, tmp_path, [4])
    assert read(tmp_path) == [(4, "2.0")]  # what this class is for


def test_rows_that_come_again_are_dropped(tmp_path):
    write(AppendingCSVLogger, tmp_path, range(5))
    logger = AppendingCSVLogger(tmp_path, name="csv", version="")
    logger.drop_from(3)
    assert read(tmp_path) == [(0, "0.0"), (1, "0.5"), (2, "1.0")]
    logger.log_metrics({"loss": 9.0}, 3)
    logger.save()
    assert read(tmp_path)[-1] == (3, "9.0")
    AppendingCSVLogger(tmp_path / "new", name="csv", version="").drop_from(0)
