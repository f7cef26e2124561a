"""The suite from the command line: exit codes, files, an injected bug, and wrong settings in a line."""

import json

import pytest
from omegaconf import OmegaConf

import parity.op_level
from parity.__main__ import main
from parity.arms import ROOT
from parity.faults import find_fault
from parity.results import Verdict
from parity.suite import LEVELS, run_suite


def results_of(output):
    return json.loads((output / "results.json").read_text())


def test_an_op_passes_against_itself(overrides, tmp_path, capsys):
    assert main(["op", *overrides, f"output={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert "margins, declared now" in printed
    assert printed.index("declared now") < printed.index("PASS")
    document = results_of(tmp_path)
    assert document["verdict"] == "PASS"
    assert [level["level"] for level in document["levels"]] == ["op"]
    manifest = document["manifest"]
    assert manifest["num_images"] == {"train": 16, "val": 4}
    assert manifest["settings"]["ensemble"]["margin"] == 0.05
    assert manifest["environment"]["packages"]["torch"]
    assert manifest["environment"]["command"].startswith("python -m parity op op=reference")
    assert (tmp_path / "report.md").is_file()
    assert (tmp_path / "report.html").is_file()


def test_a_small_bug_in_the_op_fails(overrides, tmp_path, monkeypatch):
    sound = parity.op_level.op_of
    fault = find_fault("half a pixel of shift")
    monkeypatch.setattr(parity.op_level, "op_of", lambda backend: fault.break_op(sound(backend), 0.01))
    assert main(["op", *overrides, f"output={tmp_path}"]) == 1
    assert results_of(tmp_path)["verdict"] == "FAIL"


@pytest.mark.parametrize("level", ["op", "model", "trajectory", "evaluation"])
def test_a_fault_given_on_the_command_line_fails(level, overrides, tmp_path, capsys):
    words = ["parity.trajectory.trained_steps=0", "parity.fault=x_and_y_swapped", f"output={tmp_path}"]
    assert main([level, *overrides, *words]) == 1
    assert "fault given to reference on purpose: x and y swapped" in capsys.readouterr().out
    banner = "reference was given a fault on purpose: x_and_y_swapped."
    assert banner in (tmp_path / "report.md").read_text()


def test_the_whole_ensemble_fails_a_broken_op_and_passes_a_sound_one(overrides, tmp_path):
    common = ["ensemble", *overrides, f"output={tmp_path}", "parity.ensemble.min_pairs=3", "data.limit_train=2"]
    common += ["parity.ensemble.steps=12", "parity.ensemble.last_steps=4"]
    common += [f"optimizer.{rate}=0.005" for rate in ("lr", "backbone_lr")]
    assert main([*common, "parity.fault=gradients_of_the_wrong_sign"]) == 1
    checks = {check["name"]: check["verdict"] for check in results_of(tmp_path)["levels"][0]["checks"]}
    assert checks == {"conditions of 3 pairs": "PASS", "outcomes": "FAIL"}
    assert main(common) == 0


def test_too_few_pairs_prove_nothing(overrides):
    assert main(["ensemble", *overrides]) == 2


def test_all_runs_every_level_and_writes_after_each(overrides, tmp_path, monkeypatch):
    seen: list[int] = []

    def stop(experiment, progress):
        seen.append(len(results_of(tmp_path)["levels"]))
        raise KeyboardInterrupt

    monkeypatch.setitem(LEVELS, "model", stop)
    with pytest.raises(KeyboardInterrupt):
        run_suite("all", [*overrides, f"output={tmp_path}"], lambda line: None)
    assert seen == [1]
    assert Verdict(results_of(tmp_path)["levels"][0]["verdict"]) is Verdict.PASS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["everything"], "level must be one of op, model"),
        (["op", "against=fast"], "must be one of triton, reference, cuda"),
        (["op", "parity=slow"], "Could not find 'parity/slow'"),
        (["op", "parity.op.seed=1"], "seed"),
        (["op", "op=cuda"], "op=cuda cannot run here"),
        (["op", "op=reference", "parity.fault=typo"], "fault must be one of align_corners flipped"),
    ],
)
def test_wrong_settings_are_refused_in_a_line(arguments, message, capsys):
    assert main([*arguments, "trainer=cpu"]) == 3
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


@pytest.mark.parametrize("arguments", [["--help"], ["all", "-h"]])
def test_help_lists_the_levels(arguments, capsys):
    assert main(arguments) == 0
    assert "sensitivity, speed, all" in capsys.readouterr().out
    assert main([]) == 3


@pytest.mark.parametrize("preset", ["quick", "full"])
def test_every_setting_of_a_preset_is_read_and_both_have_the_same(preset):
    settings, others = (OmegaConf.load(ROOT / f"configs/parity/{name}.yaml").parity for name in (preset, "quick"))
    text = "\n".join(file.read_text() for file in (ROOT / "parity").glob("*.py"))
    assert settings.keys() == others.keys()
    for name, group in settings.items():
        assert f"settings.{name}" in text or f"parity.{name}" in text, f"nobody reads parity.{name}"
        if OmegaConf.is_dict(group):
            assert group.keys() == others[name].keys()
            for key in group:
                assert f"settings.{key}" in text or f"settings.{name}.{key}" in text, f"nobody reads {name}.{key}"
