"""Runs the levels asked for, writes what they found after each, and answers with one verdict."""

import hashlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from coco.annotations import read_annotations
from models.environment import cut_folders, describe_environment, silence_dependencies
from parity.arms import Experiment, config_hash, load_experiment
from parity.ensemble import run_ensemble
from parity.evaluation import run_evaluation
from parity.model_level import run_model_level
from parity.op_level import run_op_level
from parity.plan import Training, describe_plan, plan_trainings
from parity.recording import Progress
from parity.report import write_report
from parity.results import LevelResult, Verdict, build_document
from parity.sensitivity import begin_untrained, run_sensitivity
from parity.step_time import run_speed
from parity.training import build_data, set_flags
from parity.trajectory import run_trajectory
from parity.workers import Workers

Level = Callable[[Experiment, Progress], LevelResult]

LEVELS: dict[str, Level] = {
    "op": run_op_level,
    "model": run_model_level,
    "trajectory": run_trajectory,
    "ensemble": run_ensemble,
    "evaluation": run_evaluation,
    "sensitivity": run_sensitivity,
    "speed": run_speed,  # last: nothing else may run beside it
}


def run_suite(word: str, overrides: Sequence[str], progress: Progress) -> Verdict:
    """Runs one level or all of them, and writes `results.json`, `report.md` and `report.html`.

    Args:
        word: one of `LEVELS`, or "all".
        overrides: Hydra overrides of `configs/parity.yaml`.
        progress: called with a line now and then.

    Returns:
        The verdict of all levels together.

    Raises:
        ValueError: if the word or a setting is wrong.
    """
    if word not in (*LEVELS, "all"):
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, all, got {word!r}; choose one")
    experiment = load_experiment(overrides)
    set_flags(experiment.configs[experiment.against])
    names = list(LEVELS) if word == "all" else [word]
    progress(f"{experiment.op} against {experiment.against} on {experiment.device.type}; margins, declared now:")
    for name in names:
        progress(f"  {name}: {_margins(experiment, name)}")
    if experiment.fault is not None:
        progress(f"fault given to {experiment.op} on purpose: {experiment.fault}")
    manifest = describe_run(experiment, word, overrides)
    trainings = plan_trainings(experiment, names)
    for line in describe_plan(experiment, names, trainings):
        progress(line)
    count = experiment.settings.workers
    if count == 1:
        document = _run_levels(experiment, names, manifest, progress, LEVELS)
    else:
        with Workers(experiment, count, progress) as workers:
            levels = _shared_levels(experiment, names, workers, trainings)
            document = _run_levels(experiment, names, manifest, progress, levels)
    progress(f"{document['verdict']}: see {experiment.output / 'report.html'}")
    return Verdict(document["verdict"])


def answer(run: Callable[[], Verdict]) -> int:
    """Runs levels for a command line; returns the exit status: that of the verdict, or 3 after a line of what is wrong.

    Args:
        run: runs them, and raises where a setting is wrong.
    """
    silence_dependencies()
    try:
        return run().exit_code
    except (ValueError, FileNotFoundError, HydraException, OmegaConfBaseException) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3


def _run_levels(
    experiment: Experiment,
    names: Sequence[str],
    manifest: dict[str, Any],
    progress: Progress,
    levels: Mapping[str, Level],
) -> dict[str, Any]:
    """Runs levels one after the other and writes the report after each; returns the document."""
    found: list[LevelResult] = []
    for name in names:
        began = time.perf_counter()
        result = levels[name](experiment, progress)
        found.append(result)
        for check in result.checks:
            progress(f"  {check.verdict:12} {name}, {check.name}: {check.detail}")
        progress(f"{result.verdict} {name} ({time.perf_counter() - began:.0f} s)")
        document = build_document(found, manifest)
        write_report(document, experiment.output)
    return document


def _shared_levels(
    experiment: Experiment, names: Sequence[str], workers: Workers, trainings: Sequence[Training]
) -> dict[str, Level]:
    """Has processes begin with all trainings, and returns the levels, which wait for theirs and read them back."""
    futures: dict[Training, Future[None]] = {}
    for training in trainings:  # the first are the weights that others start from
        after = next(iter(futures.values())) if training.arm.trained_steps else None
        futures[training] = workers.start(training, after)
    begun = begin_untrained(experiment, workers) if "sensitivity" in names else None

    def waiting(name: str, level: Level) -> Level:
        def run(experiment: Experiment, progress: Progress) -> LevelResult:
            for training, future in futures.items():
                if training.level == name:
                    future.result()
            if name == "speed":
                workers.close()
            return level(experiment, progress)

        return run

    levels: dict[str, Level] = {**LEVELS, "sensitivity": partial(run_sensitivity, workers=workers, begun=begun)}
    return {name: waiting(name, level) for name, level in levels.items()}


def describe_run(experiment: Experiment, word: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Returns what a reader needs to repeat the run: words, hashes, seeds, versions, hardware, flags, settings."""
    config = experiment.configs[experiment.against]
    data = build_data(config)
    image_ids = {
        split: sorted(read_annotations(path, limit).imgs)
        for split, path, limit in (
            ("train", data.train_json, data.limit_train),
            ("val", data.val_json, data.limit_val),
        )
    }
    words = cut_folders(overrides)
    return {
        "level": word,
        "op": experiment.op,
        "against": experiment.against,
        "precision": config.precision.lightning,
        "device": str(experiment.device),
        "preset": config.parity.preset,
        "overrides": words,
        "config_hash": config_hash(config),
        "image_ids_hash": hashlib.sha256(repr(image_ids).encode()).hexdigest()[:16],
        "num_images": {split: len(ids) for split, ids in image_ids.items()},
        "first_seed": experiment.seed,
        # As it is typed, whichever program calls.
        "environment": describe_environment() | {"command": " ".join(["python -m parity", word, *words])},
        "settings": OmegaConf.to_container(config.parity, resolve=True),
    }


def _margins(experiment: Experiment, name: str) -> str:
    settings = OmegaConf.to_container(experiment.settings[name])
    assert isinstance(settings, dict), "the settings of a level are a mapping"
    return ", ".join(f"{key!s}={value}" for key, value in settings.items())
