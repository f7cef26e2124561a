"""The README's tables hold what the files say and nothing else."""

import json
import re
from pathlib import Path

import pytest

from scripts.figures.op import COMPOSED, FUSED, OURS
from scripts.readme_figures import BEGIN, END, FRONT, KINDS, NOTHING, main, make_tables

ROOT = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = {
    "gpus": ["NVIDIA X1"],
    "commit": "0123456789",
    "packages": {"torch": "2.99"},
    "command": "python train.py a=b data.root=/somewhere data.train_json=c.json callbacks.progress=null logger=csv",
}
CALL = {"preset": "encoder", "batch": 4, "dtype": "bf16", "status": "timed"}
STEP = {"overrides": ["precision=bf16"], "batch": 2, "size_hw": [800, 1333]}
OVERFIT = "python train.py experiment=overfit logger=csv"
STREAM = {"who": "triton-detr", "overrides": ["model=dino", "data.size_divisor=64", "data.root=coco"], "batch": 2}
EVENTS = {"recompilations": 0, "captures": 3, "eager_passes": 1}
INFERENCE = {"model": "dino", "precision": "bf16", "size_hw": [800, 1333], "batch_size": 1, "status": "timed"}
PATHS = {"train_json": "t.json", "train_images": "t", "val_json": "v.json", "val_images": "v", "limit_val": None}
SAME = {"train_json": "v.json", "train_images": "v", "limit_val": 32}
RUN = {
    "steps": 70,
    "train_seconds": 99.0,
    "img_per_s_median": 3.04,
    "peak_memory_mib": 2048.0,
    "validation": {"val/AP": 0.123, "val/AP50": 0.456},
    "manifest": {"environment": ENVIRONMENT, "config": {"data": PATHS}},
}


def by_heart(ap, seconds, **environment):
    manifest = {"environment": ENVIRONMENT | environment, "config": {"data": PATHS | SAME}}
    return RUN | {"validation": {"val/AP": ap}, "train_seconds": seconds, "manifest": manifest}


def call(implementation, forward_ms, backward_ms):
    times = {"forward_device_ms_median": forward_ms, "backward_device_ms_median": backward_ms}
    return CALL | {"implementation": implementation} | times


PARITY_MANIFEST = {
    "op": "triton",
    "against": "reference",
    "precision": "bf16-mixed",
    "preset": "full",
    "environment": ENVIRONMENT,
}
FILES = {
    "op.json": [
        call(OURS, 0.25, 0.5),
        call(f"{OURS}, deterministic", 0.25, 0.8),
        call("theirs", 1.5, 4),
        call("original CUDA op", 1.5, 3),
        CALL | {"implementation": "none", "status": "refused"},
        call(OURS, 9, 9),
        call(FUSED, 0.02, 0.03),
        call(COMPOSED, 0.04, 0.06),
    ],
    "step.json": [
        STEP
        | {"who": "triton-detr", "step_ms": {"median": 151.6}, "images_per_s": 13.19, "peak_gib": 6.54}
        | {"largest_batch": {"24": 7, "80": 27}, "largest_batch_found": {"80": 28}},
        STEP | {"who": "other", "overrides": [], "step_ms": {"median": 303.2}, "images_per_s": 6.6},
    ],
    "step_switches.json": [
        STEP | {"who": "triton-detr", "step_ms": {"median": 100.0}, "busy_ms": 81.24, "images_per_s": 20.0},
        STEP
        | {"who": "triton-detr", "step_ms": {"median": 150.0}, "busy_ms": 99.0, "images_per_s": 13.3}
        | {"overrides": ["precision=bf16", "compile=false"]},
    ],
    "data.json": [
        STREAM
        | {"num_workers": 6, "steps": 100, "padded_sizes": 7, "share": 0.9512}
        | {"loader_images_per_s": 95.12, "device_images_per_s": 100.0}
        | EVENTS
    ],
    "sizes.json": [
        STREAM
        | {"boxes": 12, "sizes": 50, "padded_sizes": 9, "size_divisor": 64, "times_fixed": 1.051}
        | {"sizes_ms": {"median": 42.04, "p80": 50.0, "largest": 900.0}}
        | {"first_round_ms": {"median": 600.4, "p80": 700.0, "largest": 900.0}}
        | {"fixed_size_hw": [832, 768], "fixed_ms": {"median": 40.0, "p80": 41.0, "largest": 45.0}}
        | EVENTS
    ],
    "inference.json": [
        INFERENCE | {"contender": "eager", "wall_ms_p50": 21.26},
        INFERENCE | {"contender": "graph", "wall_ms_p50": 5.0},
        INFERENCE | {"model": "refine", "contender": "eager", "wall_ms_p50": 19.0},
        INFERENCE | {"model": "refine", "contender": "graph", "status": "failed"},
    ],
    "scaling.json": {
        "environment": ENVIRONMENT,
        "settings": ["trainer=ddp", "precision=bf16"],
        "gpus": 2,
        "img_per_s_one": 40.0,
        "img_per_s_all": 77.36,
        "speed_up": 1.934,
        "evaluation_equals_one_gpu": False,
    },
    "parity/results.json": {
        "verdict": "PASS",
        "levels": [{"level": "op", "verdict": "PASS"}, {"level": "model", "verdict": "PASS"}],
        "manifest": PARITY_MANIFEST,
    },
    "parity/speed.json": {
        "verdict": "PASS",
        "levels": [
            {
                "level": "speed",
                "verdict": "PASS",
                "data": {
                    "step_ms": {"A": {"median": 150.0}, "A'": {"median": 151.0}, "B": {"median": 100.0}},
                    "ratios": {"A / A'": {}, "A / B": {"ratio": 1.5, "low": 1.25, "high": 1.754}},
                },
            }
        ],
        "manifest": PARITY_MANIFEST | {"against": "cuda"},
    },
    "switches.json": {
        "environment": ENVIRONMENT,
        "overrides": ["parity=full", "op=triton"],
        "rows": [
            {"switches": "none", "level": "model", "words": ["compile=false"], "verdict": "PASS", "seconds": 1.0},
            {"switches": "none", "level": "trajectory", "words": ["compile=false"], "verdict": "FAIL", "seconds": 1.0},
            {"switches": "all", "level": "model", "words": ["compile=true"], "verdict": "PASS", "seconds": 1.0},
        ],
    },
    "run.json": RUN,
    "by_heart.json": by_heart(0.5, 99.0) | {"validation": {}, "peak_memory_mib": float("nan")},
    "a.json": by_heart(0.91, 60.0, command=f"{OVERFIT} op=triton precision=bf16"),
    "b.json": by_heart(0.92, 180.0, command=f"{OVERFIT} op=reference precision=fp32"),
    "other.json": {"rows": []},
}
ROWS = [
    "| the op, encoder, bf16, batch 4, forward and backward | 0.75 ms | original CUDA op 4.50 ms (6 x) | @op.json@ |",
    "| a training step, `precision=bf16`, 2 of 800 x 1333 | 152 ms and 6.5 GiB | other 303 ms (2 x) | @step.json@ |",
    "| training on real data, `model=dino`, batch 2, 6 loader workers | 95.1 images/s, 95.1 % of that beside | "
    "the same batches in GPU memory 100.0 images/s | @data.json@ |",
    "| inference as a CUDA graph, bf16, 1 of 800 x 1333 | dino 5.0 ms | eager 21.3 ms (4.3 x) | @inference.json@ |",
    "| parity suite, full, bf16-mixed: op, model | op=triton **PASS** | op=reference | @parity/results.json@ |",
    "| a step of the parity suite, bf16-mixed, nothing but the op exchanged | op=triton 100 ms | "
    "op=cuda 150 ms (1.50 x, 1.25 to 1.75) | @parity/speed.json@ |",
    "| AP by heart, `experiment=overfit` | 91.0 in 1.0 min and 2.0 GiB, bf16 | "
    "PyTorch `grid_sample` 92.0 in 3.0 min and 2.0 GiB, fp32 | @a.json@, @b.json@ |",
    "| AP50 on other images than trained on, `a=b` | 45.6 in 1.6 min and 2.0 GiB |  | @run.json@ |",
    "| training on 2 GPUs, `trainer=ddp precision=bf16` | 77.4 images/s | one GPU 40.0 images/s (1.93 x) "
    "| @scaling.json@ |",
    "| encoder, batch 4, bf16 | 0.250 + 0.500 | "
    "ours, deterministic 0.250 + 0.800 (1.4 x); theirs 1.50 + 4.00 (7.3 x); "
    "original CUDA op 1.50 + 3.00 (6 x); none refused | @op.json@ |",
    "| encoder, batch 4, bf16, from offsets and logits | 0.0200 + 0.0300 | "
    "softmax + locations + msda_op triton 0.0400 + 0.0600 (2 x) | @op.json@ |",
    "| triton-detr | `precision=bf16` | 2 of 800 x 1333 | 152 | 13.2 | 6.5 GiB, "
    "about 7 in 24 GiB, 28 in 80 GiB | 125 h | @step.json@ |",
    "| other | as given | 2 of 800 x 1333 | 303 | 6.6 |  | 249 h | @step.json@ |",
    "| triton-detr | `precision=bf16` | 2 of 800 x 1333 | 100 | 20.0 |  | 82 h | @step_switches.json@ |",
    "| `precision=bf16` | 2 of 800 x 1333 | 100.0, kernels 81.2 | `compile=false` 150.0 (1.50 x), kernels 99.0 "
    "| @step_switches.json@ |",
    "| `model=dino data.size_divisor=64` | 2 of 7 padded sizes | 95.1, 6 workers | 100.0 | 95.1 % | "
    "0 recompilations, 3 captures, 1 eager passes | @data.json@ |",
    "| `model=dino data.size_divisor=64` | 2 of 50 sizes, padded to 9 | 42.0 | 600, at most 900 | "
    "40.0, 832 x 768 | 1.05 x | 0 recompilations, 3 captures, 1 eager passes | @sizes.json@ |",
    "| dino, bf16 | 1 of 800 x 1333 | eager 21.3, graph 5.0 | @inference.json@ |",
    "| refine, bf16 | 1 of 800 x 1333 | eager 19.0, graph failed | @inference.json@ |",
    "| triton, reference | bf16-mixed, full | **PASS** | op PASS, model PASS | @parity/results.json@ |",
    "| triton, cuda | bf16-mixed, full | **PASS** | speed PASS | @parity/speed.json@ |",
    "| `parity=full op=triton` | none: model PASS, trajectory FAIL<br>all: model PASS | @switches.json@ |",
    "| `experiment=overfit op=triton precision=bf16` | the 32 images trained on | 91.0 |  | 70 | 1.0 min | 3.0 | "
    "2.0 GiB | @a.json@ |",
    "| `experiment=overfit op=reference precision=fp32` | the 32 images trained on | 92.0 |  | 70 | 3.0 min | 3.0 | "
    "2.0 GiB | @b.json@ |",
    "| `a=b` | the 32 images trained on |  |  | 70 | 1.6 min | 3.0 |  | @by_heart.json@ |",
    "| `a=b` | other images | 12.3 | 45.6 | 70 | 1.6 min | 3.0 | 2.0 GiB | @run.json@ |",
    "| `trainer=ddp precision=bf16` | 2 | 40.0 | 77.4 | 1.93 x | **no** | @scaling.json@ |",
]
ROWS = [re.sub("@([^@]*)@", r"[0123456](results/\1)", row) for row in ROWS]


@pytest.fixture
def results(tmp_path):
    for name, content in FILES.items():
        path = tmp_path / "results" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = isinstance(content, list)
        path.write_text(json.dumps({"environment": ENVIRONMENT, "rows": content} if rows else content))
    return tmp_path / "results"


def test_every_kind_of_file_makes_its_rows(results, capsys):
    parts = make_tables(results).split("\n\n")
    titles = [part.split("**")[1] for part in parts if part.startswith("**")]
    assert titles == [f"{section.title}." for section in (FRONT, *(kind.section for kind in KINDS))]
    lines = [part.splitlines() for part in parts if part.startswith("|")]
    assert [parts.index(part) for part in parts if part.startswith("<")] == [2, len(parts) - 1]
    assert [row for _, _, *rows in lines for row in rows] == ROWS
    assert all(len({line.count(" | ") for line in table}) == 1 for table in lines)
    assert sum(part.endswith("Measured on NVIDIA X1, torch 2.99.") for part in parts) == len(titles)
    assert "other.json: no figure" in capsys.readouterr().out


def test_one_op_alone_is_no_pair_and_files_without_a_front_row_are_folded(results):
    (results / "b.json").unlink()
    (results / "run.json").unlink()
    for name in ("op", "step", "step_switches", "data", "inference", "parity/results", "parity/speed", "scaling"):
        (results / f"{name}.json").unlink()
    tables = make_tables(results)
    assert tables.startswith("<details>")
    assert "[0123456](results/a.json)" in tables


def test_the_tables_stand_between_their_markers(results, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    arguments = ["--readme", str(readme), "--results", str(results)]
    assert main([*arguments, "--check"]) == 1
    assert main(arguments) == 0
    assert readme.read_text() == f"before\n{BEGIN}\n{make_tables(results)}\n{END}\nafter\n"
    assert main([*arguments, "--check"]) == 0
    (results / "op.json").write_text("{")
    assert main(arguments) == 1
    assert "results must be JSON" in capsys.readouterr().err
    readme.write_text("no markers")
    assert main(["--readme", str(readme), "--results", str(tmp_path / "none")]) == 1


def test_without_results_a_sentence_says_how_to_measure(tmp_path):
    assert make_tables(tmp_path) == NOTHING


def test_the_readme_has_the_markers():
    text = (ROOT / "README.md").read_text()
    assert text.index(BEGIN) < text.index(END)
