"""Runs on SSH hosts that go well."""

from __future__ import annotations

import secrets
import subprocess
from pathlib import Path

import pytest

from clusterkit.run.status import State
from tests.lab import Lab
from tests.live.ssh.runs.running import Submit, describe, ended, on, saying

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


def test_project_that_contains_clusterkit_home_runs(
    submit: Submit, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As when it is started from $HOME: the run's own folder is written while the rest is copied.
    monkeypatch.setenv("CLUSTERKIT_HOME", str(place / ".clusterkit"))
    run = submit(1)
    assert run.wait().state is State.SUCCEEDED
    assert run.plan.trees[0].what.startswith("2 files, ")


def test_ranks_run_on_their_hosts_and_logs_return_their_lines(submit: Submit) -> None:
    run = submit(1)
    status, _ = ended(run)
    assert status.state is State.SUCCEEDED
    assert [(node.node, node.host, node.exit_code) for node in status.nodes] == [
        (0, "h0", 0),
        (1, "h1", 0),
    ]
    lines = {(line.node, line.rank, line.text) for line in run.logs()}
    assert {(0, 0, "hello from 0 h0"), (1, 1, "hello from 1 h1"), (1, 1, "done")} <= lines
    assert [line.text for line in run.logs(rank=1)] == ["hello from 1 h1", "done"]


def test_delete_removes_run_folder_from_hosts(submit: Submit, lab: Lab) -> None:
    run = submit(1)
    ended(run)
    folder = run.plan.run_dir
    assert on(lab, "h1", f"test -d {folder}").returncode == 0
    run.delete()
    assert not run.path.exists()
    for host in lab.hosts:
        assert on(lab, host.name, f"test -e {folder}").returncode == 1


def test_submit_copies_uncommitted_files_but_not_ignored_files(
    submit: Submit, lab: Lab, place: Path
) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *words], check=True, capture_output=True)

    git("init", "-q")
    (place / ".gitignore").write_text("*.bin\n")
    (place / "big.bin").write_bytes(bytes(10))
    (place / "kept.txt").write_text("first")
    git("add", ".")
    git("commit", "-qm", "x")
    (place / "kept.txt").write_text("second, not committed")
    (place / "new.txt").write_text("never added")
    first = submit(1)
    ended(first)
    folder = first.plan.trees[0].path
    shown = on(lab, "h1", f"cd {folder} && cat kept.txt new.txt && ls -A").stdout
    assert "second, not committed" in shown
    assert "never added" in shown
    assert "big.bin" not in shown
    (place / "kept.txt").write_text("third")
    second = submit(1)
    ended(second)
    assert second.plan.trees[0].path != folder
    # The tree of the first run is as it was.
    assert on(lab, "h1", f"cat {folder}/kept.txt").stdout == "second, not committed"
    inode = "stat -c %i " + " ".join(f"{r.plan.trees[0].path}/new.txt" for r in (first, second))
    one, other = on(lab, "h1", inode).stdout.split()
    assert one == other, "a file that had not changed was sent again"


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "mpirun"])
def test_every_launcher_starts_ranks_on_all_hosts(
    submit: Submit, lab: Lab, launcher: str, place: Path
) -> None:
    describe(lab, stop_grace=10, lost_after=30)
    (place / "tick.py").write_text(
        "import os\nprint('rank', *(os.environ[k] for k in "
        "('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'NODE_RANK')), os.uname().nodename, flush=True)\n"
    )
    run = submit(1, gpus=2, settings=(f"launcher={launcher}",))
    status, _ = ended(run, 90)
    assert status.state is State.SUCCEEDED, list(run.logs())
    told = sorted((x.rank, x.text) for x in run.logs() if x.text.startswith("rank "))
    assert told == [
        (0, "rank 0 4 0 0 h0"),
        (1, "rank 1 4 1 0 h0"),
        (2, "rank 2 4 0 1 h1"),
        (3, "rank 3 4 1 1 h1"),
    ]


def test_status_names_failed_rank_of_silent_mpirun(submit: Submit, lab: Lab, place: Path) -> None:
    describe(lab, stop_grace=10, lost_after=30)
    (place / "tick.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '3':\n    sys.exit(7)\ntime.sleep(600)\n"
    )
    quiet = "env={OMPI_MCA_orte_execute_quiet: '1'}"
    run = submit(1, gpus=2, settings=("launcher=mpirun", quiet))
    failure = ended(run, 60)[0].failure
    assert failure is not None
    assert (failure.node, failure.rank, failure.exit_code) == (1, 3, 7)
    assert [line for line in run.logs() if "process" in line.text] == []


def test_elastic_torchrun_uses_both_hosts(submit: Submit, lab: Lab, place: Path) -> None:
    describe(lab, stop_grace=10, lost_after=30)
    (place / "tick.py").write_text(
        "import os\nprint('world', os.environ['WORLD_SIZE'], os.uname().nodename, flush=True)\n"
    )
    run = submit(1, nodes="1:2", settings=("launcher=torchrun",))
    status, _ = ended(run, 90)
    assert status.state is State.SUCCEEDED, list(run.logs())
    told = {line.text for line in run.logs() if line.text.startswith("world ")}
    assert told == {"world 2 h0", "world 2 h1"}


def test_secret_reaches_ranks_but_no_file_or_command_line(
    submit: Submit, lab: Lab, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = f"hunter2-{secrets.token_hex(8)}"
    monkeypatch.setenv("API_TOKEN", token)
    (place / "tick.py").write_text(
        "import os, time\nprint(len(os.environ['API_TOKEN']), flush=True)\ntime.sleep(60)\n"
    )
    run = submit(1, settings=("secrets=[API_TOKEN]",))
    saying(run, str(len(token)), 2)
    hidden = token[:7] + "[" + token[7] + "]" + token[8:]  # so that grep does not find itself
    for host in lab.hosts:
        found = on(
            lab, host.name, f"cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '{hidden}'"
        ).stdout
        assert found.strip() == "0"
        assert on(lab, host.name, f"grep -rl '{hidden}' /root/clusterkit").stdout == ""
    assert not [
        path for path in run.path.rglob("*") if path.is_file() and token in path.read_text()
    ]
