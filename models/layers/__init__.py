"""Layers shared by the detectors."""
