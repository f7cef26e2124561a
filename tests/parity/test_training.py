"""The processes of a loader end with the batches."""

import multiprocessing

from parity.arms import Experiment, load_experiment
from parity.training import build_data, build_loader, end_workers, stream_batches


def test_closed_batches_leave_no_process_behind_that_something_refers_to(overrides: list[str]) -> None:
    experiment = load_experiment([*overrides, "data.num_workers=2"])
    before = set(multiprocessing.active_children())
    loader = build_loader(build_data(experiment.configs["reference"]), seed=42)
    batches = stream_batches(loader, seed=42)
    next(batches)
    iterator = loader._iterator
    assert iterator is not None, "kept here, as it is where a closed generator keeps its variables"
    assert len(set(multiprocessing.active_children()) - before) == 2
    batches.close()
    assert not set(multiprocessing.active_children()) - before


def test_a_loader_whose_processes_were_ended_starts_others(overrides: list[str]) -> None:
    experiment = load_experiment([*overrides, "data.num_workers=1"])
    loader = build_loader(build_data(experiment.configs["reference"]), seed=42)
    first = next(iter(loader))
    end_workers(loader)
    loader.sampler.set_epoch(0)  # type: ignore[attr-defined]  # a DistributedSampler
    assert next(iter(loader))["image_ids"] == first["image_ids"]
    end_workers(loader)


def test_a_loader_without_processes_has_none_to_end(experiment: Experiment) -> None:
    loader = build_loader(build_data(experiment.configs["reference"]), seed=42)
    batches = stream_batches(loader, seed=42)
    next(batches)
    batches.close()
    end_workers(loader)
    assert len(next(iter(loader))["image_ids"]) == loader.batch_size
