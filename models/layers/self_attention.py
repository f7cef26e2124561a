"""Attention of the object queries to each other."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention


class SelfAttention(nn.Module):
    """Multi-head attention whose queries and keys know positions and whose values do not (arXiv 2005.12872, A.1).

    Parameters have the names and the initialisation of `torch.nn.MultiheadAttention`.
    """

    def __init__(self, *, d_model: int, num_heads: int, dropout: float) -> None:
        """Creates the projections.

        Args:
            d_model: width C, a multiple of num_heads.
            num_heads: number of heads M.
            dropout: probability of dropping an attention weight, in 0..1.
        """
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * d_model, d_model))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * d_model))
        self.out_proj = nn.Linear(d_model, d_model)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, positioned: Tensor, content: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Mixes the contents.

        Args:
            positioned: float [B, Q, C], contents plus positions: queries and keys come from these, in one product.
            content: float [B, Q, C], the values.
            attention_mask: bool [Q, Q], True where the query of the row must not see that of the column; None where
                all see all.

        Returns:
            float [B, Q, C].
        """
        width = content.shape[-1]
        weights, biases = (tensor.split((2 * width, width)) for tensor in (self.in_proj_weight, self.in_proj_bias))
        query, key = linear(positioned, weights[0], biases[0]).split(width, dim=-1)
        value = linear(content, weights[1], biases[1])
        query, key, value = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (query, key, value))
        visible = None if attention_mask is None else ~attention_mask
        dropout = self.dropout if self.training else 0.0
        attended = scaled_dot_product_attention(query, key, value, attn_mask=visible, dropout_p=dropout)
        return self.out_proj(attended.transpose(1, 2).flatten(2))
