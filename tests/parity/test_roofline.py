"""Bytes of a call against numbers computed by hand."""

from parity.presets import PRESETS, Preset
from parity.roofline import predict_traffic


def test_bytes_of_a_small_call() -> None:
    # B 2, S 6 + 2, Q 3, M 2, L 2, K 4, D 8 in bfloat16.
    preset = Preset("small", ((2, 3), (1, 2)), num_queries=3, num_heads=2, head_dim=8, num_points=4)
    traffic = predict_traffic(preset, batch=2, element_bytes=2)
    value = 2 * 8 * 2 * 8 * 2  # 512
    output = 2 * 3 * 2 * 8 * 2  # 192
    samples = 2 * 3 * 2 * 2 * 4  # 96 samples of two float32 coordinates and a weight
    assert traffic.forward == value + samples * 10 + output == 1664
    assert traffic.backward == 2 * (value + samples * 10) + output == 3136
    assert traffic.forward_gathers == samples * 4 * 8 * 2 == 6144
    assert traffic.backward_gathers == 6144 + samples * 4 * 8 * 4 == 18432


def test_float32_doubles_all_but_the_locations() -> None:
    preset = PRESETS["decoder"]
    half, full = predict_traffic(preset, 4, 2), predict_traffic(preset, 4, 4)
    locations = 4 * 300 * 8 * 4 * 4 * 2 * 4
    assert full.forward - locations == 2 * (half.forward - locations)


def test_gathers_of_the_encoder_are_its_corner_rows() -> None:
    gathers = predict_traffic(PRESETS["encoder"], batch=4, element_bytes=2).forward_gathers
    assert gathers == 45_512_704 * 64
