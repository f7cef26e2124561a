"""Dropout, residual and LayerNorm behind every block of the transformer."""

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, layer_norm


class ResidualNorm(nn.LayerNorm):
    """LayerNorm(residual + dropout(branch)); its parameters are those of `torch.nn.LayerNorm`."""

    def __init__(self, d_model: int, *, dropout: float, fused: bool) -> None:
        """Creates the norm.

        Args:
            d_model: width C.
            dropout: probability of dropping a channel of the branch, in 0..1.
            fused: whether float32 and half-precision tensors on a GPU go through one Triton kernel, with dropout from
                numbers of its own; elsewhere the same is composed of PyTorch's functions.
        """
        super().__init__(d_model)
        self.dropout = dropout
        self.fused = fused

    def forward(self, residual: Tensor, branch: Tensor, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        """Joins a block's result with its input.

        Args:
            residual: float [..., C], the block's input.
            branch: float [..., C], its result.
            dtype: dtype of the output: that of the products that read it.

        Returns:
            dtype [..., C]; statistics are float32.
        """
        if self.fused and branch.is_cuda and residual.dtype != torch.float64 and self.dropout < 1:
            from models.layers.fused_norm import residual_norm  # Triton, which is not installed everywhere

            drops = self.training and self.dropout > 0
            seed = torch.randint(2**62, (1,), device=branch.device) if drops else None
            probability = self.dropout if drops else 0.0
            return residual_norm(residual, branch, self.weight, self.bias, seed, probability, self.eps, dtype)
        summed = residual + dropout(branch, self.dropout, self.training)
        return layer_norm(summed, self.normalized_shape, self.weight, self.bias, self.eps).to(dtype)
