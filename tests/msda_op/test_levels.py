"""The level table."""

import torch

from msda_op.levels import device_tables, level_starts, may_be_thin, read_shapes, read_starts

CPU = torch.device("cpu")


def test_starts_follow_from_sizes() -> None:
    assert level_starts(((3, 4), (1, 1), (5, 2))) == (0, 12, 13)


def test_reads_tensors_and_sequences_alike() -> None:
    assert read_shapes(torch.tensor([[3, 4], [1, 2]])) == read_shapes([[3, 4], [1, 2]]) == ((3, 4), (1, 2))
    assert read_starts(torch.tensor([0, 12], dtype=torch.int32)) == read_starts([0, 12]) == (0, 12)


def test_pairs_become_tables_once() -> None:
    shapes, starts = device_tables(((3, 4), (1, 2)), None, CPU)
    assert shapes.tolist() == [[3, 4], [1, 2]]
    assert starts.tolist() == [0, 12]
    assert device_tables(((3, 4), (1, 2)), (0, 12), CPU)[0] is shapes


def test_tables_on_the_device_are_passed_on_unread() -> None:
    shapes, starts = torch.tensor([[3, 4]], dtype=torch.int32), torch.tensor([0])
    same_shapes, same_starts = device_tables(shapes, starts, CPU)
    assert same_shapes is shapes
    assert same_starts is starts


def test_only_pairs_tell_that_no_level_is_thin() -> None:
    assert not may_be_thin(((3, 4), (2, 2)))
    assert may_be_thin(((3, 4), (1, 2)))
    assert may_be_thin([[3, 4], [5, 1]])
    assert may_be_thin(torch.tensor(((3, 4), (2, 2))))


def test_tables_first_built_in_inference_mode_can_be_saved_for_a_backward_pass() -> None:
    with torch.inference_mode():
        shapes, _ = device_tables(((7, 11),), None, CPU)
    assert not shapes.is_inference()
