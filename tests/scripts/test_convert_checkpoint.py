import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from models.checkpoints import read_weights
from scripts.convert_checkpoint import main


@pytest.fixture(scope="module")
def official(tmp_path_factory, request):
    """An official checkpoint of a small two-stage model with random weights."""
    configs = request.config.rootpath / "configs"
    with initialize_config_dir(str(configs), version_base="1.3"):
        cfg = compose("train", overrides=["model.transformer.num_encoder_layers=1", "num_classes=4"])
    torch.manual_seed(0)
    weights = instantiate(cfg.model).state_dict()
    weights = {key: tensor for key, tensor in weights.items() if not key.endswith("num_batches_tracked")}
    path = tmp_path_factory.mktemp("official") / "checkpoint.pth"
    torch.save({"model": weights}, path)
    return path


@pytest.mark.parametrize("layout", ["hf_v4", "hf_v5"])
@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
def test_official_to_hugging_face_and_back_is_bit_equal(official, layout, suffix, tmp_path, capsys):
    there, back = tmp_path / f"model{suffix}", tmp_path / "back.pth"
    assert main([str(official), str(there), "--to", layout, "--backbone", "transformers"]) == 0
    assert main([str(there), str(back), "--to", "official"]) == 0
    before, after = read_weights(official, ema=False), read_weights(back, ema=False)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    assert f"wrote {len(before)} tensors in the layout official" in capsys.readouterr().out


def test_kernels_that_lie_channels_last_are_written_row_by_row(official, tmp_path):
    weights = {
        key: tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
        for key, tensor in read_weights(official, ema=False).items()
    }
    assert not weights["backbone.0.body.conv1.weight"].is_contiguous()
    torch.save({"model": weights}, tmp_path / "channels_last.pth")
    target = tmp_path / "model.safetensors"
    assert main([str(tmp_path / "channels_last.pth"), str(target), "--to", "official"]) == 0
    after = read_weights(target, ema=False)
    assert after.keys() == weights.keys()
    assert all(after[key].is_contiguous() and torch.equal(after[key], tensor) for key, tensor in weights.items())


def test_a_bad_source_is_one_line_and_exit_code_1(tmp_path, capsys):
    source = tmp_path / "source.pth"
    source.write_text("not a checkpoint")
    assert main([str(source), str(tmp_path / "target.pth"), "--to", "official"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: weights must be a checkpoint")
    assert message.count("\n") == 1
    assert not (tmp_path / "target.pth").exists()
