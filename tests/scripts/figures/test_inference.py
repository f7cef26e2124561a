"""Which detectors stand in front."""

from scripts.figures.inference import INFERENCE
from scripts.figures.tables import ResultsFile


def call(model, contender, milliseconds, batch_size=1):
    size = {"size_hw": [800, 1333], "batch_size": batch_size, "precision": "bf16"}
    return {"model": model, "contender": contender, "status": "timed", "wall_ms_p50": milliseconds} | size


def test_the_first_batch_of_detectors_that_were_timed_both_ways():
    rows = [call("dino", "eager", 40.0), call("dino", "graph", 10.0), call("refine", "graph", 9.0)]
    rows += [call("one_stage", "eager", 30.0), call("one_stage", "graph", 5.0), call("dino", "graph", 80.0, 8)]
    assert INFERENCE.front([ResultsFile({"rows": rows}, "inference.json")]) == [
        (
            "inference as a CUDA graph, bf16, 1 of 800 x 1333",
            "dino 10.0 ms<br>one_stage 5.0 ms",
            "eager 40.0 ms (4 x)<br>eager 30.0 ms (6 x)",
            "CPU",
            "[inference.json](inference.json)",
        )
    ]
    assert INFERENCE.front([ResultsFile({"rows": rows[2:3]}, "inference.json")]) == []


def test_of_files_of_one_batch_the_one_with_the_most_detectors():
    def file(name, *models, batch_size=1):
        rows = [call(model, form, 10.0, batch_size) for model in models for form in ("eager", "graph")]
        return ResultsFile({"rows": rows}, name)

    files = [
        file("a", "dino"),
        file("b", "dino", "refine"),
        file("c", "refine", "dino"),
        file("d", "dino", batch_size=8),
    ]
    assert [row[-1] for row in INFERENCE.front(files)] == ["[b](b)", "[d](d)"]
