"""Parity of training with each of the switches."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from parity.results import Verdict
from parity.step_benchmark import SWITCHES, StepCase, compose_case
from parity.step_switches import ALL, NONE, VARIANTS, main, run_variants, words_of

WORDS = ("model=deformable_detr_tiny", "backbone=resnet18", "backbone.norm=frozen", "op=reference", "precision=bf16")
KEYS = {name: words[-1].removesuffix("=false") for name, words in SWITCHES.items()}


def settings_of(variant: str) -> dict[str, Any]:
    config = compose_case(StepCase((*WORDS, *words_of(variant)), 1, 64, 64, 2))
    values = {}
    for name, key in KEYS.items():
        value = config
        for part in key.split("."):
            value = value[part]
        values[name] = value
    return values


@pytest.mark.parametrize("variant", SWITCHES)
def test_one_switch_is_on_alone(variant: str) -> None:
    on = {name for name, value in settings_of(variant).items() if value}
    assert on == ({variant, "channels_last"} if variant == "backbone.fused_norm" else {variant})


def test_none_and_all() -> None:
    assert not any(settings_of(NONE).values())
    assert all(settings_of(ALL).values())
    assert (NONE, *SWITCHES, ALL) == VARIANTS


def test_every_verdict_is_kept(tmp_path: Path) -> None:
    calls = []
    out = tmp_path / "results" / "switches.json"

    def run(level: str, overrides: Sequence[str], progress: Any) -> Verdict:
        calls.append((level, list(overrides)))
        if len(calls) > 1:
            assert len(json.loads(out.read_text())["rows"]) == len(calls) - 1
        return Verdict.FAIL if "compile=false" in overrides and level == "trajectory" else Verdict.PASS

    lines: list[str] = []
    arguments = (["model", "trajectory"], ["parity=full", f"data.root={tmp_path}"], tmp_path / "reports", out)
    assert run_variants(["compile", ALL], *arguments, lines.append, run) is Verdict.PASS
    assert run_variants(["fused_norm"], *arguments, lines.append, lambda *each: Verdict.PASS) is Verdict.PASS
    calls.clear()
    assert run_variants([NONE, ALL], *arguments, lines.append, run) is Verdict.FAIL
    assert [level for level, _ in calls] == ["model", "trajectory"] * 2
    assert calls[1][1][:2] == ["parity=full", f"data.root={tmp_path}"]
    assert calls[1][1][-1] == f"output={tmp_path / 'reports' / NONE / 'trajectory'}"
    content = json.loads(out.read_text())
    assert [row["verdict"] for row in content["rows"]] == ["PASS", "FAIL", "PASS", "PASS"]
    assert str(tmp_path) not in json.dumps(content), "folders of this machine say nothing to others"
    assert lines[-4].startswith("PASS         model      none")


def test_the_suite_runs_with_switches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parity=quick", "op=reference", "against=reference", "parity.model.controls=1", "data.num_train=8"]
    words += ["data.num_val=2", "data.image_size=48", "data.limit_train=8", f"data.cache_dir={tmp_path}"]
    out = tmp_path / "switches.json"
    options = ["--variants", "fused_norm", "--levels", "model", "--reports", str(tmp_path), "--out", str(out)]
    assert main([*words, *options]) == 0, capsys.readouterr()
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["switches"], row["level"], row["verdict"]) == ("fused_norm", "model", "PASS")
    assert (tmp_path / "fused_norm" / "model" / "report.html").is_file()
    assert main([*words, "op=nonsense", *options]) == 3
    assert "error: " in capsys.readouterr().err


def test_unknown_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in ((["--variants", "turbo"], "turbo"), (["--levels", "vibes"], "vibes")):
        with pytest.raises(SystemExit) as error:
            main(arguments)
        assert error.value.code == 2
        assert f"invalid choice: '{message}'" in capsys.readouterr().err
