"""A program does under every launcher what it does under torchrun itself, and does so each time.

Each program runs once by bare torchrun, once by `launcher: torchrun` and twice in a row by the
fork server. Output is compared rank by rank, and the files that the ranks leave.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from clusterkit import api
from clusterkit.spec import JobSpec

PROGRAMS = Path(__file__).parent / "programs" / "as_torchrun"
SECONDS = 240.0
WORDS = (
    "--lr=16",
    "--log-dir",
    "x",
    "a b",
    "",
    "ü",
    "$HOME `id`",
    "--nproc-per-node",
    "3",
    "-m",
    "*",
)
ENV = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "5", "PYTHONUNBUFFERED": "1", "ODD": "a 'b' $c\n",
       "EMPTY": ""}  # fmt: skip
FORKED = 2
ALL = ["bare torchrun", "torchrun", *(f"forkserver, run {number + 1}" for number in range(FORKED))]

pytestmark = pytest.mark.live


@dataclass
class Ended:
    """What each rank has printed, as sorted lines; the first failed rank's exit code; the files."""

    lines: dict[int, list[str]]
    code: int
    files: dict[str, bytes]


@dataclass
class Program:
    """A program of this folder, and its arguments, as ranks of one node."""

    words: tuple[str, ...]
    ranks: int
    folder: Path

    def run_all(self) -> dict[str, Ended]:
        found = {}
        for number, how in enumerate(ALL):
            place = self.folder / str(number)
            shutil.copytree(PROGRAMS, place / "work")
            # Short: sockets of data loaders lie below it, whose paths have 108 characters at most.
            short = tempfile.TemporaryDirectory(prefix="ck")
            with short as temporary, pytest.MonkeyPatch.context() as patch:
                patch.chdir(place / "work")
                patch.setenv("TMPDIR", temporary)
                for name in ("PYTEST_CURRENT_TEST", "PYTHONDONTWRITEBYTECODE"):
                    patch.delenv(name, raising=False)
                for name, value in ENV.items():
                    patch.setenv(name, value)
                run = self.bare if how == "bare torchrun" else self.submitted
                lines, code = run(how.partition(",")[0], place)
            ranks = {
                rank: sorted(
                    _alike(line.replace(str(place), "PLACE").replace(temporary, "TMP"))
                    for line in text
                )
                for rank, text in lines.items()
            }  # fmt: skip
            files = {
                str(path.relative_to(place)): path.read_bytes()
                for path in (place / "work").rglob("*")
                if path.is_file() and "__pycache__" not in path.parts
            }
            found[how] = Ended(ranks, code, files)
        return found

    def bare(self, how: str, place: Path) -> tuple[dict[int, list[str]], int]:
        module = self.words[0] == "-m"
        words = ["-m", *self.words[1:]] if module else [*self.words]
        # What comes after the program is its own, but not what looks like an option before.
        # No shell between, and each stream in a file of the rank's.
        env = {name: value for name, value in os.environ.items() if "CLUSTERKIT" not in name}
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
             str(self.ranks), "--redirects", "3", "--log-dir", str(place / "logs"), *words],
            env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS,
            check=False,
        )  # fmt: skip
        lines: dict[int, list[str]] = {rank: [] for rank in range(self.ranks)}
        for path in (place / "logs").glob("*/attempt_0/*/std*.log"):
            lines[int(path.parent.name)] += path.read_text(errors="replace").splitlines()
        code = re.search(r"exitcode *: (-?[0-9]+)", done.stderr)
        assert code or not done.returncode, done.stderr
        number = int(code[1]) if code else 0
        return lines, number if number >= 0 else 128 - number

    def submitted(self, how: str, place: Path) -> tuple[dict[int, list[str]], int]:
        module = self.words[0] == "-m"
        what = {"module": self.words[1]} if module else {"program": self.words[0]}
        job = JobSpec(name="as", launcher=how, args=self.words[1 + module :], env=ENV, **what)
        run = api.submit(job, gpus=self.ranks)
        try:
            status = run.wait(SECONDS)
            lines: dict[int, list[str]] = {rank: [] for rank in range(self.ranks)}
            for line in run.logs():
                if line.rank is not None:
                    lines[line.rank].append(line.text)
        finally:
            run.cancel()
        return lines, status.exit_code or 0


def _alike(line: str) -> str:
    """Without addresses; the recursion limit is reached two calls earlier (docs/programs.md)."""
    return re.sub(r"0x[0-9a-f]{6,}", "0x", re.sub(r"repeated 99[46] more", "repeated more", line))


def assert_alike(found: dict[str, Ended]) -> None:
    """All launchers, and the fork server's runs, did the same."""
    bare = found["bare torchrun"]
    for how, each in found.items():
        for rank, lines in each.lines.items():
            assert lines == bare.lines[rank], (how, rank)
        assert each.code == bare.code, how
        assert each.files == bare.files, how


@pytest.mark.timeout(900)  # four runs of two ranks that import nearly all of torch
def test_every_launcher_prints_same_as_torchrun_with_own_random_numbers(tmp_path: Path) -> None:
    found = Program(("checks.py", *WORDS), 2, tmp_path).run_all()
    drawn: dict[str, dict[str, tuple[str, int]]] = {}
    for how, each in found.items():
        for rank, lines in each.lines.items():
            for line in [line for line in lines if line.startswith("own ")]:
                _, name, value = line.split(" ", 2)
                first = drawn.setdefault(name, {}).setdefault(value, (how, rank))
                assert first == (how, rank), f"{name}: {how}, rank {rank} drew what {first} did"
                lines.remove(line)
    assert {len(values) for values in drawn.values()} == {2 * len(ALL)}
    assert len(drawn) >= 12
    assert all(len(lines) >= 22 for lines in found["bare torchrun"].lines.values())
    raised = re.compile(r"same \w+ ['\"]\w*Error: ")
    assert not any(raised.match(line) for line in found["bare torchrun"].lines[0])
    assert_alike(found)


def test_every_launcher_ends_program_and_leaves_files_like_torchrun(tmp_path: Path) -> None:
    assert_alike(Program(("ends.py",), 18, tmp_path).run_all())


def test_every_launcher_runs_package_like_torchrun(tmp_path: Path) -> None:
    assert_alike(Program(("-m", "pack", "--local_rank", "x"), 2, tmp_path).run_all())


@pytest.mark.parametrize(
    "way",
    [
        "raises",
        *(
            pytest.param(way, marks=pytest.mark.thorough)
            for way in (
                "exits", "text", "killed", "aborts", "at once", "interrupted", "group", "huge",
                "negative", "recursion",
            )
        ),
    ],
)  # fmt: skip
def test_every_launcher_reports_failed_rank_like_torchrun(way: str, tmp_path: Path) -> None:
    assert_alike(Program(("fails.py", way), 2, tmp_path).run_all())
