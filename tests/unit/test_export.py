"""`clusterkit export`: one file that holds what the plan holds, and does what it does."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from clusterkit import api, backends
from clusterkit.agent import archive

FLAVORS = [form for form, (name, _) in backends.FORMS.items() if name == "kubernetes"]
JOB = """nodes: 2
gpus_per_node: 2
device: cpu
secrets: [TOKEN]
env: {UGLY: "a 'b' $c \\u2028 d"}
"""


@pytest.fixture
def handed(write_job, monkeypatch):
    """What `export` prints of a job."""
    monkeypatch.setenv("TOKEN", "never in a file")

    def make(form: str, text: str = JOB, **options: object) -> str:
        return api.plan_as(write_job(text), form, **options)

    return make


@pytest.mark.parametrize("form", ["pytorchjob", "sbatch"])
def test_export_without_cluster_probes_nothing_and_says_so(
    handed, cli, write_job, form, monkeypatch
):
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.setattr(archive, "build", lambda: b"\xff")
    printed = handed(form)
    assert "# No cluster was looked at: GPUs, cores, Python and port are assumed.\n" in printed
    assert "never in a file" not in printed
    summary = next(line for line in printed.splitlines() if "world size 4" in line)
    assert " ," not in summary
    assert "the default of" not in summary
    done = cli("export", form, write_job(JOB))
    assert (done.code, done.out, done.err) == (0, printed, "")


@pytest.mark.parametrize("form", FLAVORS)
def test_kubernetes_manifest_holds_job_and_its_files(handed, form, monkeypatch):
    monkeypatch.setattr(archive, "build", lambda: b"\xff")  # as YAML the real one takes seconds
    text = JOB.replace("2\n", "2\nlauncher: mpirun\n", 1) if form == "mpijob" else JOB
    objects = list(yaml.safe_load_all(handed(form, text)))
    kinds = [each["kind"].lower() for each in objects]
    assert kinds[0] == "configmap"
    assert form in kinds
    assert {each["metadata"]["namespace"] for each in objects} == {"default"}
    files = objects[0]
    assert {"node.sh", "pod.sh"} <= set(files["data"])
    assert files["binaryData"] == {"agent.pyz": "/w=="}


def test_export_assumes_gpus_that_job_asks_for(handed):
    text = handed("pytorchjob", "gpus_per_node: 8\n")
    assert 'nvidia.com/gpu: "8"' in text or "nvidia.com/gpu: 8" in text
    assert "#SBATCH --gres=gpu:8" in handed("sbatch", "gpus_per_node: 8\nnodes: 2\n")
    assert "#SBATCH --gres" not in handed("sbatch", "gpus_per_node: 8\ndevice: cpu\n")


def unpacked(script: str) -> dict[str, bytes]:
    """What the script writes, by the name of the file; carried out by a real shell."""
    subprocess.run(["sh"], input=script.encode(), check=True)
    written = re.findall(r"^chmod \d+ (.+)$", script, re.MULTILINE)
    paths = [Path(path.strip("'")) for path in written]
    return {path.name: path.read_bytes() for path in paths}


def test_sbatch_script_unpacks_plan_files_and_keeps_options(handed, clusterkit_home):
    text = handed("sbatch")
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    options = [line for line in lines if line.startswith("#SBATCH")]
    assert "#SBATCH --nodes=2" in options
    assert not [line for line in options if str(clusterkit_home) in line]
    assert "# First: export TOKEN=..." in lines
    assert subprocess.run(["bash", "-n"], input=text.encode()).returncode == 0
    start, rest = text.index("mkdir -p"), text.index("set -u\nrun=")
    found = unpacked(text[start:rest])
    assert set(found) == {"node.sh", "agent.pyz"}
    assert found["agent.pyz"] == archive.build()
    assert "\u2028".encode() in found["node.sh"]
    assert text[rest:].count("srun") == 2


def test_manifest_says_how_to_create_peer_token(handed):
    """Without one, a pod of an earlier `kubectl apply` is taken for one of this run."""
    text = handed("pytorchjob")
    (line,) = [line for line in text.splitlines() if line.startswith("# First: ")]
    assert line.endswith("--from-literal=CLUSTERKIT_PEER_TOKEN=$(openssl rand -hex 16)")
    (name,) = re.findall(r"create secret generic (\S+) --from-literal=TOKEN=\.\.\. ", line)
    assert f"name: {name}\n" in text


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("ssh",), "'ssh' is not one of"),
        (("slurm",), "'slurm' is not one of"),
        (("sbatch", "--cluster", "local"), "needs a cluster of backend slurm"),
        (("sbatch", "--set", "launcher=mpirun"), "slurm does not support launcher"),
    ],
)
def test_export_refuses_unsupported_form_or_option(refused, write_job, argv, said):
    form, *options = argv
    assert said in refused("export", form, write_job(), *options)


def test_export_writes_named_output_file(cli, write_job, cwd):
    printed = cli("export", "sbatch", write_job(JOB)).out
    done = cli("export", "sbatch", write_job(JOB), "-o", "ddp.sh")
    assert (done.code, done.out, Path("ddp.sh").read_text()) == (0, "", printed)
    assert "no/ddp.sh" in cli("export", "sbatch", write_job(JOB), "-o", "no/ddp.sh").err


def test_plan_as_option_hints_at_export_verb(refused, write_job):
    assert "hint: clusterkit export sbatch" in refused("plan", write_job(), "--as", "sbatch")


def test_export_accepts_command_after_dashes(cli, write_job):
    write_job()
    done = cli("export", "sbatch", "--nodes", "2", "--", "python", "train.py")
    assert done.code == 0, done.err
    assert "train.py" in done.out


def test_shell_completion_offers_export_forms():
    from click.shell_completion import ShellComplete

    from clusterkit.cli import cli

    found = ShellComplete(cli, {}, "clusterkit", "X").get_completions(["export"], "py")
    assert [item.value for item in found] == ["pytorchjob"]
