"""Multi-scale deformable attention: definition, reference and Triton kernels."""

from msda_op.api import BACKENDS, choose_backend, ms_deform_attn, require_backend
from msda_op.locations import sampling_locations_from_offsets

__all__ = ["BACKENDS", "choose_backend", "ms_deform_attn", "require_backend", "sampling_locations_from_offsets"]
