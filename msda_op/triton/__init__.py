"""Triton kernels of multi-scale deformable attention and their launches."""
