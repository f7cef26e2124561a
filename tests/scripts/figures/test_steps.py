"""Which steps stand in front, and what is a step with something turned off."""

from parity.step_benchmark import CHECKPOINTING, SWITCHES, StepCase, describe_samples, list_variants
from scripts.figures.steps import STEP, STEP_SWITCHES
from scripts.figures.tables import ResultsFile

MODEL = ("model=dino_4scale", "precision=bf16")
PHASES = {"forward": 1.0, "loss": 1.0, "backward": 1.0, "update": 1.0}


def step(milliseconds, *words, who="triton-detr", batch=4):
    return describe_samples(StepCase((*MODEL, *words), batch, 800, 1333, 12), who, ([milliseconds], [PHASES]))


def front(**files):
    return [cells[:3] for cells in STEP.front([ResultsFile({"rows": rows}, name) for name, rows in files.items()])]


def test_steps_of_the_benchmark_with_switches_are_one_row_beside_the_first_step():
    variants = list_variants(switches=True, checkpointing=True)
    rows = [step(40.0 + 10 * number, "cuda_graphs=true", *words) for number, words in enumerate(variants)]
    ((settings, batch, first, without),) = STEP_SWITCHES.rows({"rows": rows})
    assert (settings, batch, first) == (
        "`model=dino_4scale precision=bf16 cuda_graphs=true`",
        "4 of 800 x 1333",
        "40.0",
    )
    lines = without.split("<br>")
    assert len(lines) == len(SWITCHES) + 1
    assert lines[0] == "`cuda_graphs=false` 50.0 (1.25 x)"
    assert all(word in lines[-1] for words in SWITCHES.values() for word in words)
    kept = STEP.rows({"rows": rows})
    assert [cells[3] for cells in kept] == ["40", "140"]
    assert kept[1][1].endswith(f" {' '.join(CHECKPOINTING)}`")


def test_every_batch_is_compared_with_its_own_first_step():
    rows = [step(40.0, batch=2), step(80.0, "compile=false", batch=2), step(100.0), step(150.0, "compile=false")]
    found = STEP_SWITCHES.rows({"rows": rows})
    assert [cells[1:] for cells in found] == [
        ("2 of 800 x 1333", "40.0", "`compile=false` 80.0 (2.00 x)"),
        ("4 of 800 x 1333", "100.0", "`compile=false` 150.0 (1.50 x)"),
    ]


def test_steps_that_differ_otherwise_have_nothing_turned_off():
    rows = [step(40.0), step(50.0, "precision=fp32"), step(60.0, who="official")]
    assert STEP_SWITCHES.rows({"rows": rows}) == []
    assert [cells[0] for cells in STEP.rows({"rows": rows})] == ["triton-detr", "triton-detr", "official code"]


def test_others_in_front_are_those_of_the_same_batch():
    rows = [step(10.0, batch=2), step(30.0, who="hf", batch=2), step(20.0), step(90.0, who="hf")]
    assert front(file=rows) == [
        ("a training step, `model=dino_4scale precision=bf16`, 2 of 800 x 1333", "10 ms", "transformers 30 ms (3 x)")
    ]


def test_a_step_alone_is_in_front_once_and_where_none_is_beside_other_code():
    alone, more = [step(10.0, "cuda_graphs=true")], [step(20.0, "compile=true"), step(30.0, "compile=false")]
    what = "a training step, `model=dino_4scale precision=bf16 cuda_graphs=true`, 4 of 800 x 1333"
    assert front(alone=alone, more=more) == [(what, "10 ms", "")]
    compared = [step(11.0), step(22.0, who="official")]
    (cells,) = front(alone=alone, compared=compared, more=more)
    assert cells[1:] == ("11 ms", "official code 22 ms (2 x)")
