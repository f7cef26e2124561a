"""Triton kernels of multi-scale deformable attention."""
