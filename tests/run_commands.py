"""Runs commands one after the other, each in a process forked from this one, which has made the imports that take long.

Usage: python run_commands.py; a line of standard input is a command as JSON: the `words` behind `python`, its `folder`
and `variables`. A line of standard output is what came of it: exit status, standard output and standard error, which
are complete once no process holds them any more. This process neither differentiates nor touches a GPU: after that one
that is forked from it could not.
"""

import gc
import json
import os
import runpy
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import train  # noqa: F401 - for its imports

TIMEOUT_S = 300


def become(words: list[str], folder: str, variables: dict[str, str], streams: tuple[int, ...]) -> None:
    """Takes over folder, variables, search path and streams, as a process has them that a shell starts."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[0] = folder if words[0] == "-m" else os.path.dirname(words[0])
    sys.path[1:1] = [path for path in variables["PYTHONPATH"].split(os.pathsep) if path not in sys.path]
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    signal.alarm(TIMEOUT_S)


def run(words: list[str]) -> None:
    """Runs a file, or a module behind `-m`, as Python does with the words of its command line."""
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def read(stream: int) -> str:
    """Reads what processes write, until the last of them has closed it."""
    with open(stream) as file:
        return file.read()


def main() -> None:
    """Forks for every command and waits for its end."""
    gc.freeze()  # or every process looks through, and so copies, what all share
    for line in sys.stdin:
        command = json.loads(line)
        readers, writers = zip(os.pipe(), os.pipe(), strict=True)
        child = os.fork()
        if child == 0:
            become(**command, streams=(os.open(os.devnull, os.O_RDONLY), *writers))
            run(command["words"])
            return
        for writer in writers:
            os.close(writer)
        with ThreadPoolExecutor() as threads:
            stdout, stderr = threads.map(read, readers)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps([status, stdout, stderr]), flush=True)


if __name__ == "__main__":
    main()
