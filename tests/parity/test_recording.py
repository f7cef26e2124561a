"""Arms of one seed see the same data and end bit for bit alike on a CPU; finished ones are read back."""

import json
import multiprocessing
from dataclasses import replace

import pytest
import torch

from models.compilation import Region
from parity.arms import Arm, Experiment, arm_hash, load_experiment
from parity.recording import Recording, record
from parity.results import Verdict
from parity.training import TrainingLoop
from parity.validity import check_op_ran

ARM = Arm("A", "reference", 42)
STEPS = 4


@pytest.fixture(scope="module")
def recording(experiment) -> Recording:
    return record(experiment, ARM, STEPS, lambda line: None)


def test_a_recording_has_every_step(recording):
    assert recording.num_steps == STEPS
    assert {len(curve) for curve in (*recording.curves.values(), *recording.terms.values())} == {STEPS}
    assert set(recording.curves) == {
        "loss",
        "gradient of all",
        "gradient of sampling_offsets",
        "gradient of attention_weights",
        "gradient of value_proj",
    }
    assert len(set(recording.data_hashes)) == STEPS
    assert recording.attention_calls == [3] * STEPS
    assert recording.evidence["grid_sampler"] >= 3
    assert recording.evidence["msda_op"] == 0
    assert min(recording.curves["gradient of value_proj"]) > 0


def test_the_same_arm_again_is_the_same_bit_for_bit(experiment, recording):
    again = record(experiment, replace(ARM, name="A'", repeat=1), STEPS, lambda line: None)
    assert again.hash != recording.hash
    for name in ("curves", "terms", "data_hashes", "assignments", "initial_weights"):
        assert getattr(again, name) == getattr(recording, name)


def test_another_seed_has_other_weights_and_data(experiment, recording):
    other = record(experiment, replace(ARM, seed=43), STEPS, lambda line: None)
    assert other.initial_weights != recording.initial_weights
    assert set(other.data_hashes).isdisjoint(recording.data_hashes)


def test_a_finished_arm_is_read_back_and_another_is_not(experiment, recording):
    lines: list[str] = []
    assert record(experiment, ARM, STEPS, lines.append) == recording
    assert lines == ["arm A (reference, seed 42): 4 steps, read back"]
    path = experiment.output / "arms" / f"{arm_hash(experiment, ARM, STEPS, STEPS)}.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "hash": "of another arm"}))
    with pytest.raises(ValueError, match="must hold the arm with the hash of its name"):
        record(experiment, ARM, STEPS, lines.append)
    path.write_text(json.dumps(fields))


def test_a_shorter_run_of_the_same_schedule_is_the_beginning_of_the_longer(experiment, recording):
    shorter = record(experiment, ARM, 2, lambda line: None, total_steps=STEPS)
    assert shorter.loss == recording.loss[:2]


def test_a_closed_loop_leaves_no_process_behind(overrides):
    loop = TrainingLoop(load_experiment([*overrides, "data.num_workers=1"]), ARM, STEPS)
    before = set(multiprocessing.active_children())
    loop.next_batch()
    loading = set(multiprocessing.active_children()) - before
    assert len(loading) == 1
    loop.close()
    assert not loading & set(multiprocessing.active_children())


def test_the_profiler_sees_the_triton_op(overrides):
    experiment = load_experiment([*overrides, "op=triton"])
    recording = record(experiment, Arm("B", "triton", 42), 1, lambda line: None)
    assert recording.evidence["msda_op"] >= 3
    assert check_op_ran(recording).verdict is Verdict.PASS


def test_compile_is_not_forgotten(overrides):
    def compiled(experiment: Experiment) -> list[bool]:
        loop = TrainingLoop(experiment, ARM, STEPS)
        return [region._compiled is not None for region in loop.detector.modules() if isinstance(region, Region)]

    assert not any(compiled(load_experiment(overrides)))
    regions = compiled(load_experiment([*overrides, "compile=true"]))
    assert regions
    assert all(regions)


@pytest.mark.gpu
def test_an_arm_of_cuda_graphs_counts_what_it_replays(overrides):
    experiment = load_experiment([*overrides, "op=triton", "cuda_graphs=true", "trainer=gpu"])
    recording = record(experiment, Arm("B", "triton", 42), STEPS, lambda line: None)
    assert experiment.device == torch.device("cuda")
    assert recording.attention_calls[-1] == 3
    assert check_op_ran(recording).verdict is Verdict.PASS
