"""Secrets, full disks and the repository's jobs, locally."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from clusterkit import agent, api
from clusterkit.jobfile import loader
from clusterkit.run.status import State
from tests.live import inside
from tests.live.local import PROGRAMS, SOON, Submit, kill, rank_pid

pytestmark = pytest.mark.live


def test_secret_reaches_ranks_but_no_file_or_command_line(
    submit: Submit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cret-value")
    program = tmp_path / "check.py"
    program.write_text(
        "import os, pathlib\n"
        "assert os.environ['WANDB_API_KEY'] == 's3cret-value'\n"
        "seen = [p for p in pathlib.Path('/proc').glob('[0-9]*/cmdline')\n"
        "        if b's3cret-value' in p.read_bytes()]\n"
        "print('argument lists', len(seen))\n"
    )
    program.write_text(program.read_text().replace("'s3cret-value'", "'s3cret' + '-value'", 1)
                       .replace("b's3cret-value'", "b's3cret' + b'-value'"))  # fmt: skip
    run = submit(str(program), secrets=("WANDB_API_KEY",))
    assert run.wait(SOON).state is State.SUCCEEDED, run.status()
    assert [line.text for line in run.logs()] == ["argument lists 0"]
    holding = [
        path
        for path in run.path.rglob("*")
        if path.is_file() and b"s3cret-value" in path.read_bytes()
    ]
    assert holding == []


def test_restarted_run_resumes_from_checkpoint_with_identical_losses() -> None:
    def gpt(restarts: int) -> api.Run:
        settings = [f"restarts={restarts}", "checkpoint={every: 5}", "batch={global: 8}"]
        settings += ["device=cpu", "threads_per_rank=1"]
        return api.submit("jobs/ddp.yaml", gpus=2, settings=settings, more_args=["--steps", "30"])

    broken = gpt(restarts=1)
    for line in broken.logs(follow=True):
        if (line.event or {}).get("step") == 12:
            kill(rank_pid(broken, 1))
            break
    status = broken.wait(SOON)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 2)
    (resumed,) = (mark for mark in broken.reported_events() if mark["event"] == "resumed")
    assert resumed["step"] >= 10
    whole = gpt(restarts=0)
    whole.wait(SOON)
    told = {row["step"]: row["loss"] for row in broken.metrics()}
    assert told == {row["step"]: row["loss"] for row in whole.metrics()}


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A CLUSTERKIT_HOME of 512 KiB."""
    if os.geteuid() != 0:
        pytest.skip("small_disk: mounting a tmpfs needs root")
    home = tmp_path / "small"
    home.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(home)], check=True)
    monkeypatch.setenv("CLUSTERKIT_HOME", str(home))
    yield home
    subprocess.run(["umount", "-l", str(home)], check=True)


def test_run_survives_full_disk_and_counts_lost_log_lines(small_disk: Path, tmp_path: Path) -> None:
    done = tmp_path / "done"
    program = tmp_path / "chatty.py"
    program.write_text(
        "import pathlib, sys\nfor n in range(20000): print(n, 'x' * 90)\n"
        f"pathlib.Path({str(done)!r}).touch()\n"
    )
    run = api.submit(["python", str(program)], settings=["launcher=forkserver"])
    status = run.wait(SOON)
    assert status.state is State.SUCCEEDED
    assert done.exists()
    said = [line.text for line in run.logs()]
    kept = sum(text.endswith("x") for text in said)
    gaps = [int(text.split()[0]) for text in said if text.endswith("lost: disk full")]
    assert 0 < kept < 20000
    assert sum(gaps) == 20000 - kept
    assert status.nodes[0].remarks == (f"{20000 - kept} log lines lost: disk full",)
    assert agent.processes_of(str(run.path)) == []


def test_checkpoint_on_full_disk_fails_run_and_leaves_no_file(
    small_disk: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTERKIT_HOME", str(own_home))
    settings = [f"checkpoint={{dir: {small_disk}, every: 2}}", "device=cpu"]
    run = api.submit("jobs/ddp.yaml", gpus=2, settings=settings, more_args=["--steps", "3"])
    status = run.wait(SOON)
    assert status.failure is not None
    assert f"error: cannot write checkpoint {small_disk}/step-00000002" in status.failure.cause
    assert list(small_disk.iterdir()) == []


def test_submit_on_full_disk_gives_one_error_and_leaves_no_run(
    small_disk: Path, clusterkit: list[str]
) -> None:
    (small_disk / "filler").write_bytes(b"x" * (500 << 10))
    done = subprocess.run(
        [*clusterkit, "submit", "--set", "launcher=forkserver", "--", "python",
         str(PROGRAMS / "environment.py")],
        capture_output=True, text=True, timeout=SOON,
    )  # fmt: skip
    assert done.returncode == 125
    assert done.stderr.startswith("error: cannot write ")
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 2
    assert list((small_disk / "runs").iterdir()) == []


# A plan asks this machine's DeepSpeed, which takes seconds, about sections that nothing else in
# `make test` starts a run of. All job files have plans in tests/contract.
ASKED = ("zero1-config", "zero2-offload", "zero3-nvme")


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem in ASKED else pytest.mark.thorough)
        for path in sorted(Path("jobs").rglob("*.yaml"))
    ],
)
def test_every_repository_job_file_plans_on_two_nodes(job: Path) -> None:
    plan = api.plan(job, nodes=2)
    assert plan.topology["nodes"] == 2
    assert loader.load_job(job).description


@pytest.mark.parametrize("launcher", ["forkserver"])
def test_data_loader_workers_survive_until_rank_saved_on_sigterm(
    submit: Submit, tmp_path: Path, launcher: str
) -> None:
    run = submit("save_on_term.py", "--out", tmp_path, gpus=2, launcher=launcher)
    for line in run.logs(follow=True):
        if line.text.startswith("step "):
            break
    run.cancel()
    assert len(list(tmp_path.glob("saved-*"))) == 2
    texts = [line.text for line in run.logs()]
    assert not [text for text in texts if "killed by signal" in text]


def test_commands_inside_local_run(submit: Submit, tmp_path: Path) -> None:
    run = submit("tick.py", 100_000, nodes=2)
    inside.eventually(lambda: sum("ready" in line.text for line in run.logs()) == 2, "no ranks")
    inside.exec_works(run)
    inside.files_are_copied(run, tmp_path)
    inside.port_is_forwarded(run)
    run.cancel()
    inside.refused_after_end(run)
