import pytest
import torch
from torch import nn

from models.layers.self_attention import SelfAttention

WIDTH, NUM_HEADS = 16, 4


def build(dropout: float = 0.0) -> tuple[SelfAttention, nn.MultiheadAttention]:
    torch.manual_seed(0)
    attention = SelfAttention(d_model=WIDTH, num_heads=NUM_HEADS, dropout=dropout)
    torch.manual_seed(0)
    expected = nn.MultiheadAttention(WIDTH, NUM_HEADS, dropout=dropout, batch_first=True)
    return attention, expected


def test_starts_as_pytorchs_attention_under_the_same_names() -> None:
    attention, expected = build()
    assert list(attention.state_dict()) == list(expected.state_dict())
    for name, tensor in expected.state_dict().items():
        assert torch.equal(attention.state_dict()[name], tensor), name


@pytest.mark.parametrize("masked", [False, True])
def test_outputs_and_gradients_are_those_of_pytorchs_attention(masked: bool) -> None:
    attention, expected = build()
    for one, other in zip(attention.parameters(), expected.parameters(), strict=True):
        nn.init.normal_(one, std=0.3)
        other.data.copy_(one)
    positioned, content = torch.randn(2, 3, 7, WIDTH)
    mask = torch.rand(7, 7) < 0.3 if masked else None
    if mask is not None:
        mask.fill_diagonal_(False)
    output = attention(positioned, content, mask)
    reference, _ = expected(positioned, positioned, content, need_weights=False, attn_mask=mask)
    torch.testing.assert_close(output, reference)
    unmasked = attention(positioned, content, None)
    assert masked == ((unmasked - output).abs().max() > 1e-3)
    gradient = torch.randn_like(output)
    output.backward(gradient)
    reference.backward(gradient)
    for one, other in zip(attention.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_drops_in_training_only() -> None:
    attention, _ = build(dropout=0.5)
    tensors = (*torch.randn(2, 1, 5, WIDTH), None)
    assert not torch.equal(attention(*tensors), attention(*tensors))
    attention.eval()
    assert torch.equal(attention(*tensors), attention(*tensors))
