"""`clusterkit init`: what it reads of a script, what it writes, and that this loads and plans."""

from __future__ import annotations

import os
import pty
import sys
from pathlib import Path

import pytest

from clusterkit import api
from clusterkit.cluster import SshCluster
from clusterkit.errors import BadInput
from clusterkit.jobfile import loader
from clusterkit.lifecycle import scaffold
from clusterkit.lifecycle.scaffold import Machine

DDP = """import argparse, torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.add_argument("out")
parser.add_argument("rest", nargs="*")
parser.add_argument("--lr", type=float, default=0.1)
dist.init_process_group()
"""
MACHINE = Machine(cpus=8, gpus=(), python=None, torch="2.13.0", backends=("local", "ssh"))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaffold, "machine", lambda: MACHINE)


def script(folder: Path, text: str = DDP, name: str = "train.py") -> str:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return name


@pytest.mark.parametrize(
    ("text", "distributed", "ranks"),
    [
        (DDP, "torch.distributed", "auto"),
        ("from torch.nn.parallel import DistributedDataParallel", "torch.distributed", "auto"),
        ("import torch\nimport deepspeed", "deepspeed", "auto"),
        ("from accelerate import Accelerator", "accelerate", "auto"),
        ("from transformers import Trainer\nTrainer(model)", "transformers.Trainer", "auto"),
        ("from transformers import AutoModel", "", 1),
        ("import torch", "", 1),
        ("import torch.multiprocessing as mp\nmp.spawn(f)\ninit_process_group()",
         "torch.distributed", 1),
    ],
)  # fmt: skip
def test_init_sets_gpus_per_node_by_distributed_library_of_script(cwd, text, distributed, ranks):
    found = scaffold.inspect(script(cwd, text))
    assert found.distributed == distributed
    scaffold.write(found, MACHINE)
    job = loader.load_job("job.yaml")
    assert (job.program, job.name, job.gpus_per_node) == ("train.py", "train", ranks)


def test_init_detects_distributed_library_in_imported_module(cwd):
    script(cwd, "from torch.distributed import fsdp", "parallel.py")
    assert scaffold.inspect(script(cwd, "import parallel")).distributed == "torch.distributed"


def test_init_notes_missing_required_arguments_of_script(cwd, cli):
    script(cwd)
    done = cli("init", "train.py", "--", "--lr", "0.5", "it's; $HOME")
    assert "note: train.py requires --data: add it to args in job.yaml" in done.err
    assert loader.load_job("job.yaml").args == ("--lr", "0.5", "it's; $HOME")
    (cwd / "job.yaml").unlink()
    (cwd / "clusters.yaml").unlink()
    assert "note:" not in cli("init", "train.py", "--", "--data=x", "y").err


def test_init_writes_job_that_plans_and_prints_submit_command(cwd, cli, facts, monkeypatch):
    script(cwd)
    done = cli("init", "train.py", "--nodes", "2", "--", "--data", "x")
    assert done.out == "clusterkit submit job.yaml\n"
    plan = api.plan("job.yaml", facts=facts, doctor=False)
    assert (plan.nodes, plan.world_size) == (2, 2)
    assert loader.cluster_names() == ["local"]


def test_init_hosts_option_writes_hostfile_and_sets_nodes(cwd, cli):
    script(cwd)
    done = cli("init", "train.py", "-c", "ssh", "--hosts", "ada@gpu1, gpu2:2222", "--json")
    assert done.json["files"] == ["hostfile", "clusters.yaml", "job.yaml"]
    assert done.json["command"] == ["clusterkit", "submit", "job.yaml", "--cluster", "ssh"]
    assert loader.load_job("job.yaml").nodes == 2
    entry = api.resolved_cluster("ssh")
    assert isinstance(entry, SshCluster)
    hosts = [(host.user, host.name, host.port) for host in entry.hosts]
    assert hosts == [("ada", "gpu1", None), (None, "gpu2", 2222)]


@pytest.mark.parametrize("where", ["compose", "kubernetes", "slurm"])
def test_init_writes_loadable_entry_for_other_backends(cwd, cli, where):
    script(cwd)
    done = cli("init", "train.py", "--cluster", where)
    assert (done.code, done.out) == (0, f"clusterkit submit job.yaml --cluster {where}\n")
    assert api.resolved_cluster(where).backend == where
    assert ("`image`" in done.err) == (where != "slurm")


def test_init_hosts_option_with_existing_hostfile_refers_to_file(cwd, cli):
    script(cwd)
    (cwd / "hosts.txt").write_text("a slots=2\nb slots=2\n")
    assert cli("init", "train.py", "--cluster", "ssh", "--hosts", "hosts.txt").code == 0
    entry = api.resolved_cluster("ssh")
    assert isinstance(entry, SshCluster)
    assert [host.name for host in entry.hosts] == ["a", "b"]
    assert not (cwd / "hostfile").exists()


@pytest.mark.parametrize(
    "text",
    [
        "import lightning\ntrainer = lightning.Trainer()\ntrainer.fit(model)\n",
        "from transformers import Trainer\nt = Trainer(model)\nt.train()\n",
        "import torch\nfor step in range(3):\n    pass\n",
        "def main():\n    pass\nmain()\n",
    ],
)
def test_init_finds_program_without_main_guard(cwd, cli, text):
    script(cwd, text)
    script(cwd, "import warnings\nwarnings.simplefilter('error')\ndef f(): pass\n", "model.py")
    assert cli("init", "-y").code == 0
    assert loader.load_job("job.yaml").program == "train.py"


def test_init_hosts_option_alone_selects_ssh(cwd, cli):
    script(cwd)
    assert cli("init", "--hosts", "gpu1,gpu2").out.endswith("submit job.yaml --cluster ssh\n")
    assert loader.load_job("job.yaml").nodes == 2


def test_init_without_script_takes_arguments_after_dashes(cwd, cli):
    script(cwd)
    assert cli("init", "--cluster", "slurm", "--", "--data", "y").code == 0
    job = loader.load_job("job.yaml")
    assert (job.program, job.args) == ("train.py", ("--data", "y"))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("init", "--", "train.py", "--lr", "1"), "clusterkit init train.py -- --lr 1"),
        (("init", "train.py", "--cluster", "slurm", "--hosts", "h1"), "cluster slurm takes no ho"),
        (("init", "gone.py"), "gone.py: no such file or directory"),
        (("init", "train.py", "--cluster", "slrum"), "did you mean slurm?"),
        (("init", "train.py", "--cluster", "ssh"), "which hosts?"),
        (("init", "train.py", "--cluster", "ssh", "--hosts", "a;b"), "a;b"),
        (("init", "train.py", "--nodes", "0"), "nodes: 0: a run needs at least 1 node"),
        (("init", "notes.txt"), "notes.txt is not a Python file"),
    ],
)
def test_init_refuses_invalid_input_without_writing_files(cwd, refused, argv, said):
    script(cwd)
    (cwd / "notes.txt").write_text("no program")
    assert said in refused(*argv)
    assert sorted(path.name for path in cwd.iterdir()) == ["notes.txt", "train.py"]


def test_init_overwrites_no_existing_file(cwd, refused, cli):
    script(cwd)
    (cwd / "job.yaml").write_text("name: mine\n")
    assert "job.yaml already exists" in refused("init", "train.py")
    assert not (cwd / "clusters.yaml").exists()
    (cwd / "job.yaml").unlink()
    (cwd / "clusters.yaml").write_text("here: {backend: local}\n")
    said = refused("init", "train.py", "--cluster", "slurm")
    assert "clusters.yaml exists, without an entry slurm" in said
    assert "slurm:\n" in said
    done = cli("init", "train.py", "--cluster", "here", "--json")
    assert done.json["files"] == ["job.yaml"]
    assert (cwd / "clusters.yaml").read_text() == "here: {backend: local}\n"


def test_init_without_terminal_takes_only_distributed_program(cwd, cli, refused):
    said = refused("init")
    assert "which program? none in this folder" in said
    script(cwd)
    script(cwd, "import torch\nif __name__ == '__main__': pass", "evaluate.py")
    script(cwd, "import torch", "model.py")
    script(cwd, DDP, "tests/train.py")
    assert [found.path for found in scaffold.scripts()] == ["train.py", "evaluate.py"]
    assert cli("init").code == 0
    assert loader.load_job("job.yaml").program == "train.py"
    script(cwd, DDP, "finetune.py")
    assert "which program? there are train.py, finetune.py" in refused("init")


def test_init_notes_program_without_distributed_library(cwd, cli):
    script(cwd, "import torch\nif __name__ == '__main__': pass")
    assert "uses neither torch.distributed nor" in cli("init").err


def test_init_writes_interpreter_with_torch_or_notes_its_absence(cwd):
    found = scaffold.inspect(script(cwd))
    other = Machine(cpus=8, gpus=("H100", "H100"), python="/p/bin/python", torch="2", backends=())
    scaffold.write(found, other)
    entry = loader.read_cluster("local").cluster
    assert entry.python == "/p/bin/python"
    assert "2 x H100 on this machine" in (cwd / "job.yaml").read_text()
    (cwd / "job.yaml").unlink()
    (cwd / "clusters.yaml").unlink()
    none = Machine(cpus=8, gpus=(), python=None, torch=None, backends=())
    assert any(
        "no Python of this project has torch" in note for note in scaffold.write(found, none).notes
    )


@pytest.mark.parametrize(
    ("answers", "written"),
    [
        ("\n\n\n", ["clusters.yaml", "job.yaml"]),
        ("other.py\nssh\ngpu1,gpu2\n", ["clusters.yaml", "hostfile", "job.yaml"]),
        ("\nslurm\n2:4\n", ["clusters.yaml", "job.yaml"]),
    ],
)
def test_init_on_terminal_asks_three_questions(cwd, cli, monkeypatch, answers, written):
    script(cwd)
    script(cwd, DDP, "other.py")
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "wb", buffering=0) as keyboard, os.fdopen(theirs) as terminal:
        keyboard.write(answers.encode())
        monkeypatch.setattr(sys, "stdin", terminal)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        done = cli("init")
    assert done.code == 0
    assert sorted(p.name for p in cwd.iterdir() if p.suffix != ".py") == written
    assert done.err.count("?") == 3
    assert done.out.startswith("clusterkit submit job.yaml")


def test_inspect_error_for_missing_script_names_no_job_key(cwd):
    with pytest.raises(BadInput) as refusal:
        scaffold.inspect("gone.py")
    assert not str(refusal.value).startswith("program:")


def test_init_notes_syntax_error_and_missing_positional_argument(cli, cwd):
    (cwd / "train.py").write_text("import torch.distributed\nx = (\n")
    done = cli("init", "train.py")
    assert done.code == 0
    assert "note: train.py:2: SyntaxError: '(' was never closed\n" in done.err
    text = "import argparse\np = argparse.ArgumentParser()\np.add_argument('data')\n"
    (cwd / "other.py").write_text(text)
    (cwd / "job.yaml").unlink()
    assert "note: other.py requires data: add it to args in job.yaml" in cli("init", "other.py").err
