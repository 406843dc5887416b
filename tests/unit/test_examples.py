"""The job files that come with clusterkit, and the wheel that brings them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest
from setuptools import Distribution

from clusterkit.jobfile import catalogue, examples, loader
from clusterkit.sync import snapshot

ROOT = Path(__file__).parents[2]


def shipped(folder: str = "jobs") -> set[str]:
    """Files of a folder that are tracked."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", folder], cwd=ROOT, capture_output=True, text=True
    ).stdout
    return {name for name in listed.split("\0") if name}


def test_jobs_examples_lists_every_job_file(cwd, cli):
    done = cli("jobs", "--examples")
    names = examples.names()
    assert len(set(names)) == len(names)
    assert sorted(names) == sorted(path.stem for path in (ROOT / "jobs").rglob("*.yaml"))
    shown = [line.split()[0] for line in done.out.splitlines()]
    assert [name.rpartition("/")[2] for name in shown] == ["JOB", *names]
    assert {"ddp", "tour/rpc", "sentiment/sentiment-zero3"} <= set(shown)
    assert not done.err
    assert [entry["name"] for entry in cli("jobs", "--examples", "--json").json] == names


def test_each_example_is_copied_with_all_its_imports_and_data(cwd):
    """A module that is left behind would count as a package that is to be installed."""
    for name in examples.names():
        copied = examples.example(name)
        assert copied[0].stem == name
        job = loader.load_job(copied[0])
        assert job.workdir == str(cwd)
        assert str(job.program) in map(str, copied)
        there = msgspec.structs.replace(job, workdir=str(ROOT))
        assert catalogue.packages(job) == catalogue.packages(there)
    there = {str(path.relative_to(cwd)) for path in (cwd / "jobs").rglob("*") if path.is_file()}
    assert there == {name for name in shipped() if not name.endswith("make_reviews.py")}


def test_jobs_copy_writes_example_and_its_files_only(cwd, cli):
    done = cli("jobs", "--copy", "ddp-launch")
    assert done.out.splitlines() == [
        "jobs/tour/ddp-launch.yaml", "jobs/tour/README.md", "jobs/tour/ddp_start.py",
        "jobs/train/ddp.py",
    ]  # fmt: skip
    assert done.err == "to start it: clusterkit submit jobs/tour/ddp-launch.yaml\n"
    assert cli("jobs", "--copy", "tour/ddp-launch").out == done.out
    assert "jobs/data/reviews.csv" in cli("jobs", "--copy", "sentiment", "--json").json


def test_jobs_copy_refuses_to_overwrite_changed_file(cwd, refused, cli):
    (cwd / "jobs" / "train").mkdir(parents=True)
    (cwd / "jobs" / "train" / "ddp.py").write_text("mine")
    said = refused("jobs", "--copy", "ddp-torchrun")
    assert f"jobs{os.sep}train{os.sep}ddp.py already exists" in said
    assert not (cwd / "jobs" / "tour").exists()
    (cwd / "jobs" / "train" / "ddp.py").unlink()
    assert [cli("jobs", "--copy", "ddp-torchrun").code for _ in range(2)] == [0, 0]


def test_unknown_example_is_refused_with_nearest(cwd, refused):
    assert "there is no example 'dpd'" in refused("jobs", "--copy", "dpd")
    assert "did you mean" in refused("jobs", "--copy", "zero33")


@pytest.mark.parametrize("cut", ["", "zero"])
def test_shell_completion_offers_example_names(cut):
    from clusterkit.cli.jobs import _complete

    assert _complete(None, None, cut) == [  # type: ignore[arg-type]
        name for name in examples.names() if name.startswith(cut)
    ]


def test_wheel_holds_every_example_and_package_file(monkeypatch):
    monkeypatch.chdir(ROOT)
    built = Distribution({"script_name": "setup.py"})
    built.parse_config_files()
    command = built.get_command_obj("build_py")
    command.ensure_finalized()
    inside = {os.path.relpath(path, command.build_lib) for path in command.get_outputs(0)}
    examples_inside = {name for name in inside if name.startswith("clusterkit/jobs/")}
    assert examples_inside == {f"clusterkit/{name}" for name in shipped()}
    assert shipped("clusterkit") - {"clusterkit/jobs"} <= inside


def test_package_sent_to_hosts_omits_examples(tmp_path, monkeypatch):
    """As from a wheel, which has them as files of the package."""
    package = tmp_path / "clusterkit"
    (package / "jobs" / "train").mkdir(parents=True)
    for name in ("__init__.py", "keys.json", "jobs/train/ddp.py"):
        (package / name).write_text("")
    monkeypatch.setattr(snapshot.resources, "files", lambda _: package)
    sent = [entry.path for entry in snapshot.own_package().entries]
    assert sent == ["clusterkit/__init__.py", "clusterkit/keys.json"]
