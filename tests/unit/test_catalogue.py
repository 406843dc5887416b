"""What `clusterkit jobs` says of the job files of a project, broken ones among them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterkit import api
from clusterkit.errors import BadInput
from clusterkit.jobfile import catalogue
from clusterkit.spec import JobSpec

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(cwd: Path) -> Path:
    """A project with one job, whose program imports this and that."""
    (cwd / "jobs").mkdir()
    (cwd / "train").mkdir()
    (cwd / "train" / "main.py").write_text(
        "import os, torch.nn as nn\n"
        "from beside import help\n"
        "from package import part\n"
        "from clusterkit.runtime import ddp\n"
        "def later():\n"
        "    import transformers.models, deepspeed\n"
    )
    (cwd / "train" / "beside.py").write_text("import beside, main\nfrom numpy.linalg import norm\n")
    (cwd / "train" / "package").mkdir()
    (cwd / "train" / "package" / "part.py").write_text("from . import other\nimport sklearn\n")
    job(cwd, "one", "description: the first\nprogram: train/main.py\n")
    return cwd


def job(project: Path, name: str, text: str) -> Path:
    path = project / "jobs" / f"{name}.yaml"
    path.write_text(text)
    return path


def only(project: Path) -> catalogue.CatalogueEntry:
    (entry,) = catalogue.entries(project / "jobs")
    return entry


def test_entry_lists_packages_of_program_and_modules_beside_it(project: Path) -> None:
    assert only(project) == catalogue.CatalogueEntry(
        name="one",
        path=os.path.join("jobs", "one.yaml"),
        description="the first",
        nodes="1",
        ranks="any number",
        device="GPUs or CPU",
        packages=("numpy", "sklearn", "torch", "transformers"),
    )


@pytest.mark.parametrize(
    ("more", "packages"),
    [
        ("launcher: forkserver\n", ("numpy", "sklearn", "torch", "transformers")),
        ("launcher: deepspeed\n", ("deepspeed", "numpy", "sklearn", "torch", "transformers")),
        ("deepspeed: {}\n", ("deepspeed", "numpy", "sklearn", "torch", "transformers")),
    ],
)
def test_deepspeed_is_listed_only_when_job_asks_for_it(project: Path, more, packages) -> None:
    job(project, "one", f"program: train/main.py\n{more}")
    assert only(project).packages == packages


@pytest.mark.parametrize(
    ("more", "nodes", "ranks"),
    [
        ("batch: {global: 48}", "1", "a divisor of 48"),
        ("batch: {global: 48, micro: 4}", "1", "a divisor of 12"),
        ("batch: {global: 48, micro: 4, accumulation: 2}", "1", "a divisor of 6"),
        ("batch: {micro: 4}", "1", "any number"),
        ("gpus_per_node: 1", "1", "1 rank"),
        ("gpus_per_node: 4\nnodes: 2", "2", "8 ranks"),
        ('gpus_per_node: 2\nnodes: "1:4"', "1:4", "2 to 8 ranks"),
        ('nodes: "1:4"\nbatch: {global: 48}', "1:4", "a divisor of 48"),
    ],
)
def test_entry_states_nodes_and_possible_ranks(project: Path, more, nodes, ranks) -> None:
    job(project, "one", f"program: train/main.py\n{more}\n")
    assert (only(project).nodes, only(project).ranks) == (nodes, ranks)


@pytest.mark.parametrize(("device", "words"), [("cpu", "CPU"), ("cuda", "GPUs")])
def test_entry_names_device_of_job(project: Path, device: str, words: str) -> None:
    job(project, "one", f"program: train/main.py\ndevice: {device}\n")
    assert only(project).device == words


@pytest.mark.parametrize("text", [b"def broken(:\n", b"\xff\xfe\x00x", b"x = 1\0\n"])
def test_module_that_is_invalid_python_does_not_hide_job(project: Path, text: bytes) -> None:
    (project / "train" / "beside.py").write_bytes(text)
    assert "torch" in only(project).packages


def test_command_and_module_jobs_list_only_launcher_packages() -> None:
    assert catalogue.packages(JobSpec(name="x", command=("./x",), launcher="mpirun")) == ()
    assert catalogue.packages(JobSpec(name="x", module="x")) == ()
    assert catalogue.packages(JobSpec(name="x", module="x", nodes="1:2")) == ("torch",)


def test_api_jobs_finds_folder_above_and_skips_folder_without_jobs(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = project / "train" / "jobs"
    below.mkdir()
    (below / "notes.txt").write_text("no job")
    monkeypatch.chdir(below)
    (entry,) = api.jobs()
    assert entry.path == str(project / "jobs" / "one.yaml")
    assert entry.error is None


def test_jobs_without_job_files_is_refused(cwd: Path, refused) -> None:
    (cwd / "jobs").mkdir()
    with pytest.raises(BadInput, match="no folder jobs/ with job files"):
        catalogue.find_folder()
    assert "there is no folder jobs/" in refused("jobs")


def test_jobs_lists_unreadable_job_files_as_errors(project: Path, cli) -> None:
    job(project, "bad", "program: train/main.py\nnodse: 2\n")
    job(project, "gone", "program: train/gone.py\n")
    (project / "jobs" / "other.yml").write_text("command: [./run]\nlauncher: forkserver\n")
    done = cli("jobs")
    assert done.code == 1
    lines = done.out.splitlines()
    assert lines[0].split() == ["JOB", "NODES", "RANKS", "DEVICE", "PACKAGES", "WHAT", "IT", "DOES"]
    assert [line.split()[0] for line in lines[1:]] == ["one", "other"]
    assert done.err.splitlines()[0].startswith("error: jobs/bad.yaml:2: nodse: unknown key")
    assert done.err.splitlines()[1].startswith("error: jobs/gone.yaml:1: program: train/gone.py")
    as_json = cli("jobs", "--json")
    assert as_json.code == 1
    assert [(entry["name"], entry["error"] is None) for entry in as_json.json] == [
        ("bad", False), ("gone", False), ("one", True), ("other", True),
    ]  # fmt: skip


def test_jobs_of_folders_come_last_and_other_yaml_files_there_are_no_jobs(
    project: Path, cli
) -> None:
    for folder in ("tour", "later"):
        (project / "jobs" / folder).mkdir()
        job(project, f"{folder}/another", "program: train/main.py\n")
    job(project, "tour/settings", "model: {program: tiny}\nargs: [command]\n")
    (project / "jobs" / "tour" / "folder.yaml").mkdir()
    done = cli("jobs")
    assert (done.code, done.err) == (0, "")
    names = [line.split()[0] for line in done.out.splitlines()[1:]]
    assert names == ["one", "later/another", "tour/another"]


def test_jobs_lists_every_job_of_repository(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = cli("jobs", "--json")
    assert done.code == 0, done.err
    files = sorted((ROOT / "jobs").rglob("*.yaml"))
    assert sorted(entry["path"] for entry in done.json) == [
        str(path.relative_to(ROOT)) for path in files
    ]
    needs = {entry["name"]: entry["packages"] for entry in done.json}
    assert needs["ddp-spawn"] == ["torch"]
    assert needs["zero3"] == ["deepspeed", "torch"]
    assert needs["sentiment"] == ["torch", "transformers"]
    assert needs["sentiment-trainer"] == ["accelerate", "torch", "transformers"]
    assert all(entry["description"] for entry in done.json)
