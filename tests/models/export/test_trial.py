"""Packages that run in a process of their own; `test_artefact` has one that crashes, `test_aoti` one that answers."""

import pytest
import torch

from models.export.certificate import contrasting_inputs
from models.export.trial import answer_apart


def test_an_error_is_told_by_its_last_line(tmp_path):
    package = tmp_path / "detector_64x64.pt2"
    package.write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"detector_64x64.pt2 must load .* got exit status 1: RuntimeError: .* \(see"):
        answer_apart(package, contrasting_inputs((64, 64), 1), torch.device("cpu"))
    assert "Traceback" in (tmp_path / "detector_64x64.log").read_text()
