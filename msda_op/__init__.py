"""Multi-scale deformable attention: definition, reference and Triton kernels."""

from msda_op.api import fused_ms_deform_attn, ms_deform_attn
from msda_op.backends import BACKENDS, choose_backend, require_backend
from msda_op.gradients import Gradients, ms_deform_attn_backward
from msda_op.grid_sample import grid_sample
from msda_op.locations import sampling_locations_from_offsets

__all__ = [
    "BACKENDS",
    "Gradients",
    "choose_backend",
    "fused_ms_deform_attn",
    "grid_sample",
    "ms_deform_attn",
    "ms_deform_attn_backward",
    "require_backend",
    "sampling_locations_from_offsets",
]
