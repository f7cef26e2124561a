"""The README's table holds what the files say and nothing else."""

import json
import re
from pathlib import Path

import pytest

from scripts.readme_figures import BEGIN, END, NOTHING, main, make_table

ROOT = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = {"gpus": ["NVIDIA X1"], "commit": "0123456789", "command": "python train.py a=b"}
TIMED = {"preset": "encoder", "batch": 4, "dtype": "bf16", "status": "timed"}
FILES = {
    "op.json": {
        "environment": ENVIRONMENT,
        "rows": [
            TIMED | {"implementation": "ours", "forward_device_ms_median": 0.25, "backward_device_ms_median": 0.5},
            TIMED | {"implementation": "theirs", "forward_device_ms_median": 1.5, "backward_device_ms_median": 4},
            TIMED | {"implementation": "none", "status": "refused"},
        ],
    },
    "step.json": {
        "environment": ENVIRONMENT,
        "rows": [
            {
                "who": "ours",
                "overrides": ["precision=bf16"],
                "batch": 2,
                "size_hw": [800, 1333],
                "step_ms": {"median": 151.6},
                "images_per_s": 13.19,
            }
        ],
    },
    "scaling.json": {"environment": ENVIRONMENT, "gpus": 2, "speed_up": 1.934},
    "parity/results.json": {
        "verdict": "PASS",
        "levels": [{"level": "op", "verdict": "PASS"}],
        "manifest": {"environment": ENVIRONMENT},
    },
    "run.json": {
        "steps": 70,
        "img_per_s_median": 3.0,
        "validation": {"val/AP": 0.123, "val/AP50": 0.456},
        "manifest": {"environment": ENVIRONMENT},
    },
    "other.json": {"rows": []},
}
TABLE = re.sub(
    "@(.*)@",
    r"[\1](results/\1)",
    """\
| measured | result | machine | file |
| --- | --- | --- | --- |
| op, encoder, batch 4, bf16: forward + backward, ms | ours 0.25 + 0.5; theirs 1.5 + 4 | M | @op.json@ |
| parity | **PASS** (op PASS) | M | @parity/results.json@ |
| training, `python train.py a=b` | AP 12.3, AP50 45.6 after 70 steps | M | @run.json@ |
| training on 2 GPUs | 1.93 times one GPU | M | @scaling.json@ |
| training step, ours, batch 2 of 800 x 1333 (`precision=bf16`) | 152 ms, 13.2 images/s | M | @step.json@ |\
""".replace("| M |", "| NVIDIA X1, 0123456 |"),
)


@pytest.fixture
def results(tmp_path):
    for name, content in FILES.items():
        path = tmp_path / "results" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return tmp_path / "results"


def test_every_kind_of_file_makes_its_rows(results, capsys):
    assert make_table(results) == TABLE
    assert "other.json: no figure" in capsys.readouterr().out


def test_the_table_stands_between_its_markers(results, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    arguments = ["--readme", str(readme), "--results", str(results)]
    assert main([*arguments, "--check"]) == 1
    assert main(arguments) == 0
    assert readme.read_text() == f"before\n{BEGIN}\n{TABLE}\n{END}\nafter\n"
    assert main([*arguments, "--check"]) == 0
    (results / "op.json").write_text("{")
    assert main(arguments) == 1
    assert "results must be JSON" in capsys.readouterr().err
    readme.write_text("no markers")
    assert main(["--readme", str(readme), "--results", str(tmp_path / "none")]) == 1


def test_without_results_a_sentence_says_how_to_measure(tmp_path):
    assert make_table(tmp_path) == NOTHING


def test_the_readme_has_the_markers():
    text = (ROOT / "README.md").read_text()
    assert text.index(BEGIN) < text.index(END)
