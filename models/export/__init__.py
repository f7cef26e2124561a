"""Detectors outside the laboratory: CUDA graphs, AOTInductor packages, ONNX, and the artefacts that carry them."""
