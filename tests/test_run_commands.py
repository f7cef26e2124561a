"""Commands that are forked are like those that a shell starts, and one leaves nothing behind for the next."""

import sys

import pytest

PROGRAM = """
import os, sys
import train
print(__name__, sys.argv[1:], os.getcwd(), os.environ.get("GIVEN"), hasattr(train, "changed"), sys.stdin.read() == "")
print("to standard error", file=sys.stderr)
train.changed = True
"""


@pytest.fixture
def start(run_command, tmp_path):
    """Runs a program with words in a folder, where its file is."""

    def run(program, *words, **variables):
        (tmp_path / "program.py").write_text(program)
        return run_command(str(tmp_path / "program.py"), *words, folder=tmp_path, **variables)

    return run


def test_words_folder_variables_and_streams_are_its_own(start, tmp_path):
    first, second = start(PROGRAM, "a b", GIVEN="x"), start(PROGRAM)
    assert first.stdout == f"__main__ ['a b'] {tmp_path} x False True\n"
    assert second.stdout == f"__main__ [] {tmp_path} None False True\n"
    assert first.stderr == second.stderr == "to standard error\n"
    assert first.returncode == second.returncode == 0


@pytest.mark.parametrize(
    ("program", "status"),
    [("raise SystemExit('error: x')", 1), ("1 / 0", 1), ("import os; os.kill(os.getpid(), 9)", -9)],
)
def test_its_end_is_told(start, program, status):
    result = start(program)
    assert result.returncode == status
    assert ("ZeroDivisionError" in result.stderr) == (program == "1 / 0")


def test_a_module_is_found_in_the_folder(run_command, tmp_path):
    (tmp_path / "beside.py").write_text("import sys; print(sys.argv[1:], __spec__.name)")
    result = run_command("-m", "beside", "word", folder=tmp_path)
    assert (result.stdout, result.stderr, result.returncode) == ("['word'] beside\n", "", 0)


def test_what_processes_say_that_outlive_it_is_waited_for(start):
    late = "import time; time.sleep(0.5); print('late')"
    result = start(f"import subprocess, sys; subprocess.Popen([{sys.executable!r}, '-c', {late!r}])")
    assert result.stdout == "late\n"
