"""A program's own files, and the spelling of its local rank."""

import shutil
from pathlib import Path

import pytest

from clusterkit.jobfile import request, sources

PROGRAMS = Path(__file__).parent / "local_rank"
WORD = "${clusterkit.local_rank}"


def args_of(line, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return request.read(line.split()).job.args


@pytest.fixture
def project(tmp_path):
    shutil.copytree(PROGRAMS, tmp_path / "p")
    return tmp_path / "p"


@pytest.mark.parametrize(
    ("line", "argument"),
    [
        ("python -m torch.distributed.launch old.py", "--local_rank"),
        ("python -m torch.distributed.launch new.py", "--local-rank"),
        ("python -m torch.distributed.launch nouse.py", "--local-rank"),
        ("python -m torch.distributed.launch both.py", "--local-rank"),
        ("deepspeed both.py", "--local_rank"),
        ("deepspeed new.py", "--local-rank"),
        ("deepspeed nouse.py", "--local_rank"),
        ("python -m torch.distributed.launch split/train.py", "--local_rank"),
        ("python -m torch.distributed.launch -m pkg.old", "--local_rank"),
        ("python -m torch.distributed.launch -m pkg.extract", "--local-rank"),
        ("deepspeed --module pkg.extract", "--local-rank"),
        ("deepspeed --module pkg.relative", "--local-rank"),
        ("deepspeed --module pkg", "--local-rank"),
        ("deepspeed --no_python ./run", "--local_rank"),
    ],
)
def test_local_rank_argument_uses_spelling_program_reads(line, argument, project, monkeypatch):
    assert args_of(f"{line} --lr 1", project, monkeypatch) == (f"{argument}={WORD}", "--lr", "1")


@pytest.mark.parametrize(
    "line",
    ["deepspeed --no_local_rank old.py", "torchrun old.py", "python old.py",
     "python -m torch.distributed.launch --use_env old.py"],
)  # fmt: skip
def test_launcher_without_local_rank_argument_passes_none(line, project, monkeypatch):
    assert args_of(line, project, monkeypatch) == ()


def test_imported_sources_follow_pythonpath_and_stop_at_import_cycle(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/a.py").write_text("import b")
    (tmp_path / "lib/b.py").write_text("from a import *\nNAME = '--local_rank'")
    (tmp_path / "train.py").write_text("# --local-rank, since torch 2.0\ndef f():\n  import a\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "lib")
    spec = request.read(["python", "-m", "torch.distributed.launch", "train.py"]).job
    assert spec.args == (f"--local_rank={WORD}",)
    paths = [Path(path).name for path, _ in sources.imported(*sources.starts_of(spec))]
    assert paths == ["train.py", "a.py", "b.py"]
