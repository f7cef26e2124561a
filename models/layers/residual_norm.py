"""Dropout, residual and LayerNorm behind every block of the transformer."""

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, layer_norm


class ResidualNorm(nn.LayerNorm):
    """LayerNorm(residual + dropout(branch)); its parameters are those of `torch.nn.LayerNorm`."""

    def __init__(self, d_model: int, *, dropout: float) -> None:
        """Creates the norm.

        Args:
            d_model: width C.
            dropout: probability of dropping a channel of the branch, in 0..1.
        """
        super().__init__(d_model)
        self.dropout = dropout

    def forward(self, residual: Tensor, branch: Tensor, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        """Joins a block's result with its input.

        Args:
            residual: float [..., C], the block's input.
            branch: float [..., C], its result.
            dtype: dtype of the output: that of the products that read it.

        Returns:
            dtype [..., C]; statistics are float32.
        """
        summed = residual + dropout(branch, self.dropout, self.training)
        return layer_norm(summed, self.normalized_shape, self.weight, self.bias, self.eps).to(dtype)
