import argparse
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.checkpoints import COCO_IDS, load_weights, read_checkpoint, read_weights
from models.deformable_detr import DeformableDetr

HEADS = ("class_embed.", "transformer.decoder.class_embed.")


def random_weights(model: DeformableDetr) -> dict[str, Tensor]:
    """Copies the state dict with random values, equal where the model shares a tensor."""
    values: dict[int, Tensor] = {}
    weights = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        random = torch.rand_like(tensor) if tensor.is_floating_point() else tensor.clone()
        weights[key] = values.setdefault(id(tensor), random.detach())
    return weights


def save(path: Path, checkpoint: Any) -> Path:
    torch.save(checkpoint, path)
    return path


def test_official_layout(detector: DeformableDetr, tmp_path: Path) -> None:
    weights = random_weights(detector)
    extra = {"transformer.total_ops": torch.zeros(1), "total_params": torch.zeros(1)}
    checkpoint = {"model": weights | extra, "args": argparse.Namespace(lr=2e-4), "epoch": 3}
    load_weights(detector, save(tmp_path / "official.pth", checkpoint))
    assert all(torch.equal(tensor, weights[key]) for key, tensor in detector.state_dict().items())


def test_own_layout(detector: DeformableDetr, tmp_path: Path) -> None:
    weights = random_weights(detector)
    state_dict = {f"model.{key}": tensor for key, tensor in weights.items()} | {"criterion.x": torch.zeros(1)}
    load_weights(detector, save(tmp_path / "own.ckpt", {"state_dict": state_dict, "global_step": 1}))
    assert all(torch.equal(tensor, weights[key]) for key, tensor in detector.state_dict().items())


def test_step_counts_of_norms_may_be_missing(detector: DeformableDetr, tmp_path: Path) -> None:
    weights = {key: t for key, t in random_weights(detector).items() if not key.endswith("num_batches_tracked")}
    load_weights(detector, save(tmp_path / "official.pth", {"model": weights}))
    assert all(torch.equal(detector.state_dict()[key], tensor) for key, tensor in weights.items())


def test_other_classes_drop_the_class_heads_by_name(
    make_detector: Callable[..., DeformableDetr], tmp_path: Path
) -> None:
    source, model = (make_detector(box_refine=True, two_stage=True, num_classes=n) for n in (7, 5))
    weights, before = random_weights(source), {key: t.clone() for key, t in model.state_dict().items()}
    with pytest.warns(UserWarning, match=r"another number of classes.*class_embed\.0\.bias.*decoder\.class_embed\.3"):
        load_weights(model, save(tmp_path / "official.pth", {"model": weights}))
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key] if key.startswith(HEADS) else weights[key])


def edit(weights: dict[str, Tensor], change: str) -> dict[str, Tensor]:
    edited = dict(weights)
    if change == "missing":
        del edited["query_embed.weight"]
    elif change == "unexpected":
        edited["neck.weight"] = torch.zeros(1)
    elif change == "shape":
        edited["query_embed.weight"] = torch.zeros(3, 64)
    elif change == "tied":
        edited["bbox_embed.2.layers.0.bias"] = edited["bbox_embed.2.layers.0.bias"] + 1
    return edited


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"1 missing \(query_embed.weight\)"),
        ("unexpected", r"1 unexpected \(neck.weight\)"),
        ("shape", r"1 of another shape \(query_embed.weight \(3, 64\) for \(11, 64\)\)"),
        ("tied", r"another bbox_embed.2.layers.0.bias than bbox_embed.0.layers.0.bias"),
    ],
)
def test_every_key_is_accounted_for(
    change: str, message: str, make_detector: Callable[..., DeformableDetr], tmp_path: Path
) -> None:
    model = make_detector(box_refine=False)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    path = save(tmp_path / "official.pth", {"model": edit(random_weights(model), change)})
    with pytest.raises(ValueError, match=message) as error:
        load_weights(model, path)
    assert "\n" not in str(error.value)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


class Payload:
    """Would run code when unpickled without care."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("executed",)


def test_unreadable_files_are_refused_in_one_line(
    make_detector: Callable[..., DeformableDetr], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_detector(box_refine=False)
    whole = save(tmp_path / "whole.pth", {"model": model.state_dict()}).read_bytes()
    (tmp_path / "truncated.pth").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.pth").write_bytes(b"")
    (tmp_path / "text.pth").write_text("not a checkpoint")
    (tmp_path / "pickle.pth").write_bytes(pickle.dumps({"model": Payload()}, protocol=2))
    save(tmp_path / "code.pth", {"model": Payload()})
    save(tmp_path / "list.pth", [1])
    save(tmp_path / "layout.pth", {"weights": {}})
    save(tmp_path / "number.pth", {"model": {"class_embed.0.bias": 3}})
    for name in ("truncated", "empty", "text", "pickle", "code", "list", "layout", "number", "absent"):
        with pytest.raises(ValueError, match=r"^weights must") as error:
            load_weights(model, tmp_path / f"{name}.pth")
        assert "\n" not in str(error.value)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty or ends too early"),
        (b"hello world\n", "its content is something else"),  # KeyError
        (b"epoch,step\n1,2\n", "its content is something else"),  # IndexError
        (b"G1.5\n", "its content is something else"),  # struct.error
        (b"X\x02\x00\x00\x00\xff\xff.", "its content is something else"),  # UnicodeDecodeError
        (b"version https://git-lfs.github.com/spec/v1\n", "its content is something else"),
        (b"<!DOCTYPE html>\n<html></html>", "its content is something else"),
        (b"ccollections\nUserDict\n.", "Unsupported global: GLOBAL collections.UserDict)"),
        (b"PK\x05\x06" + bytes(18), "its content is something else"),  # an empty archive
        (b"K\x01.", "Invalid magic number"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_named_with_what_is_expected(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "best.ckpt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^weights must be a checkpoint of tensors") as error:
        read_checkpoint(path)
    assert reason in str(error.value)
    assert repr(str(path)) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("entry", ["best/data.pkl", "notes.txt"])
def test_an_archive_of_other_files_is_refused(entry: str, tmp_path: Path) -> None:
    path = tmp_path / "best.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("best/version", "3")
        archive.writestr(entry, "it was a fine day")
    with pytest.raises(ValueError, match=r"^weights must be a checkpoint of tensors") as error:
        read_checkpoint(path)
    assert "\n" not in str(error.value)


def test_a_model_of_80_classes_takes_coco_rows_of_91_slots(
    make_detector: Callable[..., DeformableDetr], tmp_path: Path
) -> None:
    source, model = (make_detector(box_refine=True, two_stage=True, num_classes=n) for n in (91, 80))
    weights = random_weights(source)
    load_weights(model, save(tmp_path / "official.pth", {"model": weights}))
    assert len(COCO_IDS) == 80
    assert (COCO_IDS[0], COCO_IDS[11], COCO_IDS[79]) == (1, 13, 90)  # person, stop sign, toothbrush
    assert torch.equal(model.state_dict()["class_embed.3.bias"], weights["class_embed.3.bias"][COCO_IDS])
    assert torch.equal(model.state_dict()["bbox_embed.3.layers.0.bias"], weights["bbox_embed.3.layers.0.bias"])


def test_averaged_weights_are_read_on_request(make_detector: Callable[..., DeformableDetr], tmp_path: Path) -> None:
    weights = random_weights(make_detector(box_refine=False))
    averaged = {f"module.{key}": tensor + 1 for key, tensor in weights.items()}
    path = save(tmp_path / "official.pth", {"model": weights, "ema_model": averaged})
    key = "transformer.level_embed"
    assert torch.equal(read_weights(path, ema=False)[key], weights[key])
    assert torch.equal(read_weights(path, ema=True)[key], weights[key] + 1)
    with pytest.raises(ValueError, match="leave ema off"):
        read_weights(save(tmp_path / "plain.pth", {"model": weights}), ema=True)


def test_a_backbone_given_as_detector_is_refused_with_a_hint(
    make_detector: Callable[..., DeformableDetr], tmp_path: Path
) -> None:
    backbone = {"conv1.weight": torch.zeros(1), "layer1.0.conv1.weight": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"pass it as backbone\.weights"):
        load_weights(make_detector(box_refine=False), save(tmp_path / "resnet.pth", backbone))


def test_a_damaged_safetensors_file_is_refused_in_one_line(
    make_detector: Callable[..., DeformableDetr], tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00")
    with pytest.raises(ValueError, match=r"^weights must be a checkpoint") as error:
        load_weights(make_detector(box_refine=False), tmp_path / "model.safetensors")
    assert "\n" not in str(error.value)
