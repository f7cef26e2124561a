import math

import pytest
import torch

from models.position_encoding import SinePositionEncoding, sine_embedding


def encode(padding_mask: torch.Tensor, **settings: float) -> torch.Tensor:
    return SinePositionEncoding(channels=8, **{"temperature": 10000, "offset": -0.5} | settings)(padding_mask)


def test_by_hand() -> None:
    encoding = encode(torch.zeros(1, 2, 4, dtype=torch.bool))
    row, column = 2 * math.pi * 1.5 / 2, 2 * math.pi * 0.5 / 4
    expected = [f(angle / d) for angle in (row, column) for d in (1, 100) for f in (math.sin, math.cos)]
    assert encoding.shape == (1, 8, 2, 4)
    assert encoding[0, :, 1, 0].tolist() == pytest.approx(expected, abs=1e-5)


def test_padding_does_not_move_the_unpadded_positions() -> None:
    padding_mask = torch.ones(1, 5, 9, dtype=torch.bool)
    padding_mask[:, :3, :4] = False
    alone = encode(torch.zeros(1, 3, 4, dtype=torch.bool))
    torch.testing.assert_close(encode(padding_mask)[:, :, :3, :4], alone)


def test_offset_and_temperature_matter() -> None:
    padding_mask = torch.zeros(1, 3, 4, dtype=torch.bool)
    assert not torch.allclose(encode(padding_mask), encode(padding_mask, offset=0.0))
    assert not torch.allclose(encode(padding_mask), encode(padding_mask, temperature=20))


def test_is_float32_under_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert encode(torch.zeros(1, 3, 4, dtype=torch.bool)).dtype == torch.float32
        assert sine_embedding(torch.zeros(2, dtype=torch.bfloat16), 4, 20.0).dtype == torch.float32


def test_width_must_be_a_multiple_of_4() -> None:
    with pytest.raises(ValueError, match="channels must be a positive multiple of 4, got 6"):
        SinePositionEncoding(channels=6, temperature=20, offset=0)
