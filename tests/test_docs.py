"""What the documentation says holds: links resolve, commands are understood, examples run, the table agrees."""

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from parity.presets import PRESETS
from parity.roofline import predict_traffic
from parity.step_benchmark import StepCase
from parity.step_peer import make_job

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
LEVELS = ("op", "model", "trajectory", "ensemble", "evaluation", "sensitivity", "speed", "all")
# Words that begin a line of a shell block and are not ours to check.
FOREIGN = ("git ", "pip install ", "pre-commit ", "#", "if [", "cd ", "source ", "python3 -m venv ")


def blocks(page, language):
    return [body for found, body in FENCE.findall(page.read_text()) if found == language]


def shell_lines():
    for page in PAGES:
        for body in blocks(page, "bash"):
            yield from ((page.name, line) for line in body.splitlines() if line.strip())


COMMANDS = list(shell_lines())
EXAMPLES = [(page.name, body) for page in PAGES for body in blocks(page, "python")]


def slug(title):
    """Anchor of a heading, as Markdown renderers make it."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip())


def anchors_of(text):
    return {slug(title) for title in re.findall(r"^#+ (.+)$", FENCE.sub("", text), flags=re.MULTILINE)}


def broken_links(text, folder):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        page = folder / name
        if not page.exists() or (anchor and anchor not in anchors_of(page.read_text() if name else text)):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page):
    assert list(broken_links(page.read_text(), page.parent)) == []


def test_a_broken_link_is_seen():
    text = (
        "# One two\n[a](nowhere.md) [b](op.md#nothing) [c](#one-two) [d](#three) [e](https://e.org) [f](op.md#layouts)"
    )
    assert list(broken_links(text, ROOT / "docs")) == ["nowhere.md", "op.md#nothing", "#three"]


def compose_overrides(name, overrides):
    parsed = OverridesParser.create().parse_overrides(
        [re.sub(r"<run>|\$SLURM_JOB_ID", "mine", item) for item in overrides]
    )
    first_choice = [
        f"{item.key_or_group}={next(iter(item.sweep_iterator()))}" if item.is_sweep_override() else item.input_line
        for item in parsed
    ]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return compose(name, overrides=first_choice)


class Parsed(Exception):
    """Thrown instead of running a command whose arguments are understood."""


def check_script(module, words, monkeypatch):
    original = argparse.ArgumentParser.parse_args

    def parse_and_stop(self, *arguments, **keywords):
        raise Parsed(original(self, *arguments, **keywords))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [module, *words])
    script = importlib.import_module(module)
    monkeypatch.setattr(script, "leave_interpreter", lambda: None, raising=False)  # would start the process anew
    with pytest.raises(Parsed) as caught:
        script.main(words) if script.main.__code__.co_argcount else script.main()
    options = caught.value.args[0]
    compose_overrides("train", getattr(options, "overrides", []))
    if getattr(options, "against", None):
        make_job(options.against, StepCase(tuple(options.overrides), 1, 64, 64, 1), torch.device("cpu"))


def check_command(line, monkeypatch):
    words = [word for word in shlex.split(line, comments=True) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    while words[0] in ("srun", "torchrun", "--nproc_per_node") or words[0].isdigit():
        words = words[1:]
    if words[0] == "make":
        subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, check=True, capture_output=True)
    elif "train.py" in words[:2]:
        rest = [word for word in words[words.index("train.py") + 1 :] if word not in ("-m", "--help")]
        compose_overrides("train", rest)
    elif words[:3] == ["python", "-m", "scripts.export"]:
        compose_overrides("export", words[3:])
    elif words[:3] == ["python", "-m", "parity"]:
        assert words[3] in LEVELS
        compose_overrides("parity", words[4:])
    elif words[:2] == ["python", "-m"] and words[2].startswith("scripts."):
        check_script(words[2], words[3:], monkeypatch)
    else:
        raise AssertionError(f"nobody checks {line!r}")


@pytest.mark.parametrize(("page", "line"), [item for item in COMMANDS if not item[1].startswith(FOREIGN)])
def test_command_is_understood(page, line, monkeypatch):
    check_command(line, monkeypatch)


@pytest.mark.parametrize(
    "line",
    [
        "python train.py data=cocoo",
        "python train.py optimizer.rate=1",
        "python -m parity speed parity=quickest",
        "python -m scripts.benchmark op --preset",
        "python -m scripts.predict photos --modell x",
        "python -m scripts.benchmark step model=deformable_detr --against hf",
        "make coffee",
        "curl somewhere",
    ],
)
def test_a_wrong_command_is_seen(line, monkeypatch, capsys):
    with pytest.raises((Exception, SystemExit)) as caught:
        check_command(line, monkeypatch)
    assert not isinstance(caught.value, Parsed)


@pytest.mark.parametrize(("page", "example"), EXAMPLES)
def test_python_example_runs(page, example):
    needed = re.match(r"# needs (\w+)\n", example)
    if needed:
        pytest.importorskip(needed[1])
    exec(compile(example, page, "exec"), {})


def test_the_roofline_table_is_what_the_code_predicts():
    rows = re.findall(
        r"^\| (\w+) \| (bf16|fp32) \| (.+) \|$", (ROOT / "docs" / "op.md").read_text(), flags=re.MULTILINE
    )
    assert len(rows) == 5
    for name, dtype, numbers in rows:
        traffic = predict_traffic(PRESETS[name], batch=4, element_bytes={"bf16": 2, "fp32": 4}[dtype])
        bytes_moved = (traffic.forward, traffic.backward, traffic.forward_gathers, traffic.backward_gathers)
        expected = [str(PRESETS[name].num_queries), *(f"{count / 1e6:.1f}" for count in bytes_moved)]
        assert numbers.split(" | ") == expected


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert {page.name for page in (ROOT / "docs").glob("*.md")} == set(re.findall(r"(\w+\.md)", navigation))


@pytest.mark.skipif(find_spec("mkdocs") is None or find_spec("material") is None, reason="needs the docs extra")
def test_the_site_builds_strictly_and_without_advertisements(tmp_path):
    make = subprocess.run(["make", "--dry-run", "docs"], cwd=ROOT, capture_output=True, text=True, check=True)
    settings = dict(word.split("=", 1) for word in make.stdout.splitlines()[-1].split() if "=" in word)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert (tmp_path / "op" / "index.html").is_file()
