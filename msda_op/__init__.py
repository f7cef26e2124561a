"""Multi-scale deformable attention: definition, reference and Triton kernels."""
