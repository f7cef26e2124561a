"""Which trainings stand beside each other in front."""

import pytest

from scripts.figures.tables import ResultsFile
from scripts.figures.trainings import SCALING, TRAINING

HEART = {"train_json": "v.json", "train_images": "v", "val_json": "v.json", "val_images": "v", "limit_val": 32}


def training(op, commit="1111111", gpu="X1", data=HEART, **scores):
    environment = {"gpus": [gpu], "commit": commit, "command": f"python train.py experiment=overfit op={op}"}
    return ResultsFile(
        {
            "steps": 7,
            "train_seconds": 60.0,
            "img_per_s_median": 3.0,
            "peak_memory_mib": float("nan"),
            "validation": {f"val/{name}": score for name, score in scores.items()},
            "manifest": {"environment": environment, "config": {"data": data}},
        },
        f"{op}.json",
    )


def test_both_ops_of_one_commit_and_machine_are_a_pair():
    assert TRAINING.front([training("triton", AP=0.9), training("reference", AP=0.8)]) == [
        (
            "AP by heart, `experiment=overfit`",
            "90.0 in 1.0 min, default",
            "PyTorch `grid_sample` 80.0 in 1.0 min, default",
            "X1",
            "[1111111](triton.json), [1111111](reference.json)",
        )
    ]


@pytest.mark.parametrize("other", [{"commit": "2222222"}, {"gpu": "X2"}])
def test_trainings_of_different_commits_or_machines_are_none(other):
    assert TRAINING.front([training("triton", AP=0.9), training("reference", AP=0.8, **other)]) == []


def test_a_training_told_by_other_images_stands_alone():
    (cells,) = TRAINING.front([training("triton", data=HEART | {"val_json": "w.json"}, AP=0.5, AP50=0.8)])
    assert cells[:3] == (
        "AP50 on other images than trained on, `experiment=overfit op=triton`",
        "80.0 in 1.0 min",
        "",
    )
    assert TRAINING.front([training("triton", data=HEART | {"val_json": "w.json"})]) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"settings": ["trainer=ddp_graphs", "cuda_graphs=true"]}, "`trainer=ddp_graphs cuda_graphs=true`"),
        ({"command": "python -m scripts.scaling --coco /data/a=b"}, "`trainer=ddp op=triton precision=bf16`"),
        ({"command": "python -m scripts.scaling --coco /x --trainer fsdp compile=true"}, "`trainer=fsdp compile=true`"),
    ],
)
def test_several_gpus_are_told_with_what_they_trained(content, words):
    rates = {"gpus": 2, "img_per_s_one": 10.0, "img_per_s_all": 19.0, "speed_up": 1.9}
    environment = {"environment": {"command": content.pop("command", "")}}
    (row,) = SCALING.rows({**environment, **rates, **content, "evaluation_equals_one_gpu": True})
    assert row == (words, "2", "10.0", "19.0", "1.90 x", "yes")


def test_the_fastest_of_several_gpus_stand_in_front():
    def measured(name, rate):
        rates = {"gpus": 2, "img_per_s_one": 10.0, "img_per_s_all": rate, "speed_up": rate / 10}
        content = {"settings": [f"trainer={name}"], **rates, "evaluation_equals_one_gpu": True}
        return ResultsFile({"environment": {"gpus": ["X1"], "commit": "1111111"}, **content}, f"{name}.json")

    (cells,) = SCALING.front([measured("ddp", 18.0), measured("ddp_graphs", 19.0)])
    assert cells == (
        "training on 2 GPUs, `trainer=ddp_graphs`",
        "19.0 images/s",
        "one GPU 10.0 images/s (1.90 x)",
        "X1",
        "[1111111](ddp_graphs.json)",
    )
