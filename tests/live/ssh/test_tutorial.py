"""docs/tutorial.md, word for word: its commands run on two hosts, and print what the page shows."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import CHECKOUT, Lab, python

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

PAGE = CHECKOUT / "docs" / "tutorial.md"
_BLOCK = re.compile(r"(?:<!-- ([^>]*) -->\n\n)?```(\w+)\n(.*?)```", re.DOTALL)
_VARIES = (
    (re.compile(r"-\d{10}-\w{4}\b"), "-RUN"),
    (re.compile(r"/[0-9a-f]{16}/"), "/DIGEST/"),
    (re.compile(r"\d+ (min|s) ago"), "N ago"),
    (re.compile(r"\d[\d.:+]*"), "N"),
    (re.compile(r" +"), " "),
)
"""Ids, digests, times and other numbers, and the widths of columns that depend on them."""


def general(line: str) -> str:
    """A line without what differs from run to run."""
    for varies, name in _VARIES:
        line = varies.sub(name, line)
    return line.rstrip()


def expected(shown: list[str]) -> re.Pattern[str]:
    """What output has to be: as shown, where a line ``...`` stands for any lines."""
    lines = (re.escape(general(line)).replace(r"\.\.\.", ".*") + "\n" for line in shown)
    return re.compile("".join(r"(?:.*\n)*?" if line == ".*\n" else line for line in lines))


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of a listing, and the lines below it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, *shown = part.splitlines()
        yield command, shown


@pytest.fixture
def shell(lab: Lab, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a user whose ``ssh gpu1`` and ``ssh gpu2`` reach the hosts of the lab."""
    names = {host.name: f"gpu{number}" for number, host in enumerate(lab.hosts, 1)}
    config = lab.ssh_config.read_text()
    for host, name in names.items():
        config = config.replace(f"Host {host} ", f"Host {name} ")
        lab.ssh(host, "ln", "-s", str(python().parent.parent), "/opt/venv")
    (tmp_path / "ssh_config").write_text(config)
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool, command in {
        "ssh": [shutil.which("ssh"), "-F", str(tmp_path / "ssh_config")],
        "clusterkit": [sys.executable, "-m", "clusterkit"],
    }.items():
        (tools / tool).write_text(f'#!/bin/sh\nexec {shlex.join(map(str, command))} "$@"\n')
        (tools / tool).chmod(0o755)
    env = {key: value for key, value in os.environ.items() if not key.startswith("CLUSTERKIT_")}
    path = f"{tools}:{os.environ['PATH']}"
    yield env | {"HOME": str(tmp_path), "PATH": path, "PYTHONPATH": str(CHECKOUT)}
    for run in (tmp_path / ".clusterkit" / "runs").glob("*"):
        subprocess.run([tools / "clusterkit", "cancel", run.name], env=env | {"HOME": tmp_path})
    for host in names:
        lab.ssh(host, "rm", "/opt/venv")


def test_tutorial_commands_print_what_the_page_shows(shell: dict[str, str], tmp_path: Path) -> None:
    project = tmp_path / "my-project"
    project.mkdir()
    code, ran = 0, 0
    for note, language, text in _BLOCK.findall(PAGE.read_text()):
        if note.startswith("file: "):
            (project / note.removeprefix("file: ")).write_text(text)
        if language != "console" or note == "not run":
            continue
        for command, shown in commands(text):
            done = subprocess.run(
                ["sh", "-c", f"(exit {code}); {command}"], cwd=project, env=shell, text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            code, ran = done.returncode, ran + 1
            printed = "".join(f"{general(line)}\n" for line in done.stdout.splitlines())
            assert expected(shown).fullmatch(printed), f"$ {command}\n{done.stdout}"
    assert ran > 10
