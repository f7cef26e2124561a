"""Multi-scale deformable attention with its projections: the attention of the encoder and of the decoder."""

import math

import torch
from torch import Tensor, nn

import msda_op
from models.layers.joint_linear import JointLinear
from models.layers.linear import Linear


class MSDeformAttn(nn.Module):
    """Attends to K sampled points a level and head, at learned offsets from a reference point.

    output(q) = sum_m W_m sum_l sum_k A_mlqk W'_m x_l(p_q + offset_mlqk)  (arXiv 2010.04159, eq. 3)
    """

    def __init__(
        self, *, d_model: int, num_heads: int, num_levels: int, num_points: int, backend: str, fused: bool
    ) -> None:
        """Creates the projections.

        Args:
            d_model: width C of query and features, a multiple of num_heads.
            num_heads: number of heads M.
            num_levels: number of feature levels L.
            num_points: number of sampling points K of a head on each level.
            backend: backend of the op, one of `msda_op.BACKENDS`.
            fused: whether the op itself computes locations and softmax, which saves their memory and traffic; the
                results agree up to rounding.

        Raises:
            ValueError: if d_model is not a multiple of num_heads, or the backend is unknown.
        """
        super().__init__()
        if d_model % num_heads:
            raise ValueError(f"d_model must be a multiple of num_heads={num_heads}, got {d_model}; change one of them")
        if backend not in msda_op.BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(msda_op.BACKENDS)}, got {backend!r}; choose one")
        self.num_heads = num_heads
        self.num_levels = num_levels
        self.num_points = num_points
        self.backend = backend
        self.fused = fused
        self.sampling_offsets = nn.Linear(d_model, num_heads * num_levels * num_points * 2)
        self.attention_weights = nn.Linear(d_model, num_heads * num_levels * num_points)
        self.sampling = JointLinear(self.sampling_offsets, self.attention_weights)
        self.value_proj = Linear(d_model, d_model)
        self.output_proj = Linear(d_model, d_model)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Lets every head look in its own direction, point k at distance k + 1, with equal weights."""
        nn.init.zeros_(self.sampling_offsets.weight)
        with torch.no_grad():
            self.sampling_offsets.bias.copy_(self._initial_offsets().flatten())
        nn.init.zeros_(self.attention_weights.weight)
        nn.init.zeros_(self.attention_weights.bias)
        for projection in (self.value_proj, self.output_proj):
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)

    def forward(
        self,
        query: Tensor,
        reference_points: Tensor,
        features: Tensor,
        spatial_shapes: tuple[tuple[int, int], ...],
        padding_mask: Tensor,
    ) -> Tensor:
        """Samples the features around the reference points.

        Args:
            query: float [B, Q, C].
            reference_points: float32 [B, Q, L, 2] (x, y) or [B, Q, L, 4] (cx, cy, w, h); 0..1 spans the padded level.
            features: float [B, S, C], the levels one after another.
            spatial_shapes: L host pairs (h, w).
            padding_mask: bool [B, S], True = padding, which contributes zeros.

        Returns:
            float [B, Q, C].

        Notes:
            Differentiable in query, reference points and features. Locations and attention weights are float32
            whatever the autocast dtype.
        """
        value = self.value_proj(features, padding_mask).unflatten(-1, (self.num_heads, -1))
        offsets, logits = self.sampling(query)
        samples = (*query.shape[:2], self.num_heads, self.num_levels, self.num_points)
        offsets, logits = offsets.view(*samples, 2), logits.view(samples)  # the op reads parts of a product as they are
        if self.fused:
            sampled = msda_op.fused_ms_deform_attn(
                value, spatial_shapes, None, reference_points.float(), offsets, logits, backend=self.backend
            )
        else:
            locations = msda_op.sampling_locations_from_offsets(reference_points, offsets, spatial_shapes)
            weights = logits.float().flatten(3).softmax(-1).view(samples)
            sampled = msda_op.ms_deform_attn(value, spatial_shapes, None, locations, weights, backend=self.backend)
        return self.output_proj(sampled)

    def _initial_offsets(self) -> Tensor:
        """Returns the offsets at initialisation, [M, L, K, 2] (x, y), in pixels of the level."""
        angles = torch.arange(self.num_heads, dtype=torch.float32) * (2 * math.pi / self.num_heads)
        directions = torch.stack((angles.cos(), angles.sin()), dim=-1)
        directions = directions / directions.abs().amax(-1, keepdim=True)
        distances = torch.arange(1, self.num_points + 1, dtype=torch.float32)
        offsets = directions[:, None, None, :] * distances[:, None]
        return offsets.expand(-1, self.num_levels, -1, -1)
