"""The READMEs of jobs/, word for word: their commands run here, and print what the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from clusterkit import agent, api
from tests.live.ssh.test_tutorial import commands, expected, general

ROOT = Path(__file__).parents[2]
PAGES = ("tour", "sentiment")
COMMANDS = [
    (page, command, shown)
    for page in PAGES
    for text in re.findall(
        r"```console\n(.*?)```", (ROOT / "jobs" / page / "README.md").read_text(), re.DOTALL
    )
    for command, shown in commands(text)
]
EACH_TIME = (
    "clusterkit submit jobs/tour/collectives.yaml",
    "clusterkit submit jobs/tour/ddp-spawn.yaml -- --epochs 1",
)
"""All of them take minutes."""

pytestmark = [pytest.mark.live, pytest.mark.needs("deepspeed")]


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        pytest.param(
            command, shown, id=command, marks=() if command in EACH_TIME else pytest.mark.thorough
        )
        for _, command, shown in COMMANDS
    ],
)
def test_command_of_readme_prints_what_the_page_shows(
    command: str, shown: list[str], tmp_path: Path, own_home: Path
) -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("CLUSTERKIT_")}
    env = kept | {
        "CLUSTERKIT_HOME": str(own_home),
        "CLUSTERKIT_DEVICE": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",  # more wait for each other where other tests run
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),  # torch and torchrun leave folders there
    }
    try:
        done = subprocess.run(
            command, shell=True, cwd=ROOT, env=env, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=280,
        )  # fmt: skip
    finally:
        for status in api.runs():
            run = api.attach(status.run)
            run.cancel()
            assert agent.processes_of(str(run.path)) == []
    printed = "".join(f"{general(line)}\n" for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stdout
    assert expected(shown).fullmatch(printed), done.stdout


def test_readmes_run_every_job_file_of_their_folder() -> None:
    assert set(EACH_TIME) <= {command for _, command, _ in COMMANDS}
    for page in PAGES:
        there = {str(path.relative_to(ROOT)) for path in (ROOT / "jobs" / page).glob("*.yaml")}
        submitted = " ".join(command for each, command, _ in COMMANDS if each == page).split()
        assert there <= set(submitted)
