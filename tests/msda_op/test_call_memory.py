"""What the description of a call tells apart, and what is not described."""

from typing import Any

import pytest
import torch
from torch import Tensor

from msda_op import call_memory, ms_deform_attn
from msda_op.call_memory import describe_call, recall, remember

SHAPES = ((3, 4), (1, 2))
TABLES = (SHAPES, None)


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    return torch.rand(2, 14, 3, 8), torch.rand(2, 8, 3, 2, 4, 2), torch.rand(2, 8, 3, 2, 4)


def test_alike_calls_have_equal_descriptions() -> None:
    call = describe_call(tensors(), TABLES, ("zeros",))
    assert call == describe_call(tensors(), (((3, 4), (1, 2)), None), ("zeros",))
    value, *samples = tensors()
    assert call == describe_call((torch.nn.Parameter(value), *samples), TABLES, ("zeros",))
    assert hash(call) == hash(describe_call(tensors(), TABLES, ("zeros",)))


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value.half(),
        lambda value: value[:1],
        lambda value: value.transpose(1, 3).contiguous().transpose(1, 3),
        lambda value: torch.rand(value.numel() + 1)[1:].view(value.shape),
        lambda value: value.to("meta"),
        lambda value: None,
    ],
    ids=["dtype", "shape", "strides", "alignment", "device", "none"],
)
def test_what_a_kernel_depends_on_is_told_apart(change: Any) -> None:
    value, *samples = tensors()
    call = describe_call((value, *samples), TABLES, ())
    assert call != describe_call((change(value), *samples), TABLES, ())


def test_tables_and_choices_are_told_apart() -> None:
    calls = [
        describe_call(tensors(), tables, choices)
        for tables, choices in ((TABLES, (True,)), (TABLES, (False,)), ((SHAPES, (0, 12)), (True,)))
    ]
    assert len(set(calls)) == 3
    assert describe_call(tensors(), (((4, 3), (1, 2)), None), (True,)) != calls[0]


@pytest.mark.parametrize(
    "tables",
    [
        ([(3, 4), (1, 2)], None),
        (((3, 4), [1, 2]), None),
        (((3.0, 4), (1, 2)), None),
        (((3, 4), (True, 2)), None),
        ((3, 4), None),
        (SHAPES, [0, 12]),
        (SHAPES, (0, 12.0)),
        (SHAPES, torch.tensor((0, 12))),
        (torch.tensor(SHAPES), torch.tensor((0, 12))),
    ],
    ids=str,
)
def test_tables_that_may_change_or_only_equal_sound_ones_are_not_described(tables: tuple[Any, Any]) -> None:
    assert describe_call(tensors(), tables, ()) is None


def test_watched_calls_are_not_described() -> None:
    value, *samples = tensors()
    with torch._subclasses.FakeTensorMode() as mode:
        assert describe_call((mode.from_tensor(value), *samples), TABLES, ()) is None
        assert describe_call((value, *samples), TABLES, ()) is None
    assert describe_call((value, *samples, "text"), TABLES, ()) is None
    seen = []
    torch.vmap(lambda item: seen.append(describe_call((item, *samples), TABLES, ())) or item)(value)
    assert seen == [None]
    assert describe_call((value, *samples), TABLES, ()) is not None


def test_the_oldest_calls_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_memory, "MAX_CALLS", 3)
    ways = [lambda number=number: torch.tensor(number) for number in range(4)]
    for number, way in enumerate(ways):
        remember(number, way)
    assert [recall(number) for number in range(4)] == [None, *ways[1:]]
    assert recall(None) is None


def test_a_remembered_call_is_not_looked_at_again() -> None:
    value, locations, weights = tensors()
    given = []
    choices = ("zeros", False, "BLNC", "BQHLP2", None, False, "auto")
    call = describe_call((value, locations, weights), TABLES, choices)
    remember(call, lambda *arguments: given.append(arguments) or value)
    assert ms_deform_attn(value, SHAPES, None, locations, weights) is value
    assert given == [(value, TABLES, locations, weights)]
    with pytest.raises(ValueError, match="attention_weights must have shape"):
        ms_deform_attn(value, SHAPES, None, locations, weights[:, :-1])
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert ms_deform_attn(value, SHAPES, None, locations, weights) is not value
    finally:
        torch.use_deterministic_algorithms(False)
