"""Arguments and text of the compile check; what it finds is tested with the kernels."""

import argparse
from collections import Counter

import pytest

from parity.assembly import Sass, report_kernel
from scripts.compile_kernels_check import format_report, parse_targets


def test_targets_are_read() -> None:
    assert parse_targets("80,90,100") == (80, 90, 100)


@pytest.mark.parametrize("text", ["", "sm_90", "75", "80,"])
def test_wrong_targets_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="targets must be compute capabilities from 80 on, got"):
        parse_targets(text)


def test_text_names_what_was_found_and_what_is_wrong() -> None:
    sass = Sass(Counter({"LDG.E.128": 8, "ATOMG.E.CAS": 1}), registers=64, stack_bytes=16, shared_bytes=0)
    text = format_report(report_kernel("backward.backward_kernel", "encoder bf16", 80, 1, 512, 128, "", sass))
    assert text.startswith("sm_80 backward.backward_kernel: encoder bf16\n")
    assert "registers 64, spills 16 bytes" in text
    assert "8 LDG.E.128" in text
    assert "atomics in PTX none; in SASS 1 ATOMG.E.CAS" in text
    assert text.count("PROBLEM") == 2
