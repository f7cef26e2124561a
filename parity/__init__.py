"""Comparison of attention ops: cases, bounds and verdicts."""
