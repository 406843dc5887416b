"""States of nodes on hosts, also when these are gone."""

import os
import posixpath
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from clusterkit import api, backends
from clusterkit.backends.ssh import observe
from clusterkit.backends.ssh.config import LoginRefused
from clusterkit.backends.ssh.known_hosts import HostKeyProblem
from clusterkit.errors import Unavailable
from clusterkit.lifecycle.outcome import without_spares
from clusterkit.output import mirror
from clusterkit.output.mirror import NodeView
from clusterkit.run.folder import RunFolder, RunHandle, node_dir
from clusterkit.run.status import RunStatus, State
from clusterkit.sync import snapshot
from clusterkit.sync.upload import Upload
from clusterkit.transport import LocalTransport
from tests.unit.ssh_backend.hosts import SSH, Hosts, facts, host_facts, job, plan

# ---------------------------------------------------------------- judging


def view(
    number, *, begun=True, alive=True, ended=False, silent=None, known=True, files=(), error=None
):
    made = NodeView(number, f"h{number}", known=known, begun=begun, alive=alive, ended=ended)
    made.files = dict(files)
    if silent is not None:
        made.error = error or Unavailable(f"host h{number} does not answer")
        made.silent_since = mirror.awake() - silent
    return made


def judged(*views, patience=30.0):
    made = plan(facts(*map(host_facts, range(len(views)))), nodes=len(views))
    handle = RunHandle(RunFolder(Path("no", "folder")), made)
    seen = observe.observation(handle, list(views), patience)
    return None if seen is None else [(node.state, node.reason) for node in seen.nodes]


def test_status_of_host_silent_beyond_patience_is_unknown():
    (state, reason), other = judged(view(0, silent=31), view(1))
    assert state is State.UNKNOWN
    assert reason == "host h0 does not answer (no answer for 31 s)"
    assert other == (State.RUNNING, None)
    (state, reason), _ = judged(view(0, silent=29), view(1))
    assert state is State.RUNNING
    assert "no answer for 29 s" in reason
    (state, _), _ = judged(view(0, silent=5, begun=False, alive=False), view(1))
    assert state is State.PENDING


def test_status_is_unknown_when_all_hosts_are_silent():
    assert [state for state, _ in judged(view(0, silent=99), view(1, silent=99))] == [
        State.UNKNOWN,
        State.UNKNOWN,
    ]


def test_status_of_single_silent_host_is_unknown_not_final():
    ((state, reason),) = judged(view(0, silent=999))
    assert state is State.UNKNOWN  # which ends nothing
    assert "no answer for 999 s" in reason


def test_succeeded_node_leaves_silent_node_unknown():
    files = {"exit.json": b'{"exit_code": 0, "at": 1.0, "reason": null}'}
    done = view(0, alive=False, ended=True, files=files)
    assert [state for state, _ in judged(done, view(1, silent=99))] == [
        State.SUCCEEDED,
        State.UNKNOWN,
    ]


def test_host_silence_counts_from_submitter_return():
    """The first host answers seconds before the others do."""
    now = [1000.0]
    views = [view(0, silent=0), view(1, silent=0), view(2, silent=0)]
    for each in views:
        each.clock, each.silent_since = (lambda: now[0]), 1000.0
    handle = RunHandle(RunFolder(Path("no", "folder")), plan(facts(*map(host_facts, range(3)))))
    now[0] += 600
    observe.observation(handle, views, 30.0)
    views[0].take({"begun": True, "alive": True, "ended": False}, b"")
    for seconds, state in ((0, State.RUNNING), (29, State.RUNNING), (1, State.UNKNOWN)):
        now[0] += seconds
        seen = observe.observation(handle, views, 30.0)
        assert [node.state for node in seen.nodes] == [State.RUNNING, state, state]


@pytest.mark.parametrize(
    "error",
    [
        HostKeyProblem("host h1: its host key has changed", hint="ssh-keygen -R h1"),
        LoginRefused("host h1 does not let user me in", hint="ssh-copy-id h1"),
        mirror.Unreadable("a node's report cannot be read: 'motd'", hint="look at it"),
    ],
)
def test_host_that_sends_no_report_is_unknown_with_cause_and_hint(error):
    _, (state, reason) = judged(view(0), view(1, silent=600, error=error))
    assert state is State.UNKNOWN
    assert reason.startswith(f"{error.message} (it answers, but sends no report for 600 s); ")
    assert reason.endswith(error.hint)


def test_pause_of_submitter_does_not_count_as_host_silence():
    """SIGSTOP, a suspended machine: the hosts have spoken, this process has not listened."""
    now = [100.0]
    clock = mirror.PauseAwareClock(lambda: now[0])
    views = [view(0), view(1)]
    for each in views:
        each.clock = clock
        each.take({}, b"")
        each.take({"begun": True, "alive": True, "ended": False}, b"")
    now[0] += 3600
    views[0].lost(Unavailable("host h0 does not answer"))  # its connection broke off meanwhile
    assert judged(*views)[0][0] is State.RUNNING
    for _ in range(31):
        now[0] += 1
        clock()
    assert judged(*views)[0][0] is State.UNKNOWN


def test_exit_file_of_silent_live_node_counts_as_success():
    files = {"exit.json": b'{"exit_code": 0, "at": 1.0, "reason": null}'}
    half_heard = view(0, alive=True, ended=False, silent=99, files=files)
    assert judged(half_heard, view(1))[0][0] is State.SUCCEEDED


def test_status_with_zero_patience_is_unknown_for_silent_host():
    assert judged(view(0, silent=0.1), view(1), patience=0.0)[0][0] is State.UNKNOWN


def test_ended_node_stays_succeeded_when_host_becomes_silent():
    files = {"exit.json": b'{"exit_code": 0, "at": 1.0, "reason": null}'}
    ended = view(0, alive=False, ended=True, silent=99, files=files)
    assert judged(ended, view(1))[0][0] is State.SUCCEEDED


def test_started_node_counts_as_running_until_host_answers(tmp_path):
    """Else whoever attaches would end it, where others succeeded: it may be saving its work."""
    made = plan(facts(), nodes="1:2", launcher="torchrun")
    handle = RunHandle(RunFolder(tmp_path), made)
    ended = b'{"exit_code": 0, "at": 1.0, "reason": null}'
    for node, files in enumerate(({"exit.json": ended}, {"started.json": b'{"host": "h1"}'})):
        handle.folder.node_dir(1, node).mkdir(parents=True)
        for name, content in files.items():
            (handle.folder.node_dir(1, node) / name).write_bytes(content)
    views = observe.views(handle)
    seen = without_spares(made, observe.observation(handle, views, 30.0))
    assert [node.state for node in seen.nodes] == [State.SUCCEEDED, State.RUNNING]
    assert seen.state is State.RUNNING
    views[1].take({"begun": True, "alive": False, "ended": True}, b"")
    seen = without_spares(made, observe.observation(handle, views, 30.0))
    assert [node.state for node in seen.nodes] == [State.SUCCEEDED, State.FAILED]


def test_hosts_without_run_files_yield_no_status_or_unknown():
    assert judged(view(0, known=False), view(1, known=False)) is None
    (state, reason), _ = judged(view(0, known=False), view(1))
    assert state is State.UNKNOWN
    assert reason == "nothing is left of the run on host h0"


# ---------------------------------------------------------------- for real


def test_ssh_run_on_two_simulated_hosts_mirrors_logs_and_cleans_up(tmp_path, entry_of, cwd):
    """Project sent, nodes started, files mirrored, leftovers ended, all gone: no sshd needed."""
    program = "import os, sys\nprint('rank', os.environ['RANK'], 'in', os.getcwd())\n"
    (cwd / "train.py").write_text(program + "sys.exit(int(os.environ['RANK']) * 3)\n")
    transport = Hosts()
    entry = entry_of(sync=True)
    mine = job(workdir=str(cwd), launcher="forkserver", nodes=2, env={"ODD": "it's $HOME"})
    found = SSH.probe(entry, transport, mine)
    made = SSH.plan(mine, entry, found, "demo-1")
    sent = snapshot.take(cwd, "train.py")
    for host in made.hosts:
        for tree in made.trees[:1]:
            Upload(sent, tree).send(host, made.python, transport)
    SSH.submit(made, transport)
    handle = RunHandle(RunFolder(tmp_path / "mirror"), made)
    watcher = SSH.watch(handle, transport)
    deadline = time.monotonic() + 120
    while True:
        seen = watcher.status()
        if {node.state for node in seen.nodes} <= {State.SUCCEEDED, State.FAILED}:
            break
        assert time.monotonic() < deadline, seen
        time.sleep(0.05)
    watcher.close()
    assert [(node.state, node.exit_code) for node in seen.nodes] == [
        (State.SUCCEEDED, 0),
        (State.FAILED, 3),
    ]
    assert sorted((end.rank, end.exit_code) for end in seen.rank_exits) == [(0, 0), (1, 3)]
    lines = [line.text for batch in handle.folder.log(1, (0, 1)) for line in batch]
    assert sorted(lines) == [f"rank {n} in {made.trees[0].path}" for n in range(2)]
    local = tmp_path / "mirror" / "attempts" / "1" / "node-1" / "log"
    assert local.read_bytes() == Path(node_dir(made.run_dir, 1, 1), "log").read_bytes()
    SSH.cancel(handle, transport)
    SSH.remove_remote_files(handle, transport)
    SSH.remove_remote_files(handle, transport)
    assert not Path(made.run_dir).exists()
    assert Path(made.trees[0].path).exists()
    assert SSH.status(RunHandle(RunFolder(tmp_path / "other"), made), transport) is None
    assert posixpath.dirname(made.run_dir) == str(tmp_path / "my work" / "runs")


# ---------------------------------------------------------------- when hosts are gone


def test_remove_remote_files_on_shared_folder_deletes_each_path_once(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    script = f'#!/bin/sh\necho "$3" >>{tmp_path}/asked\nexec /bin/rm "$@"\n'
    (tmp_path / "bin/rm").write_text(script)
    (tmp_path / "bin/rm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    made = plan(facts(*map(host_facts, range(8))), nodes=8)
    made = msgspec.structs.replace(made, run_dir=str(tmp_path / "runs/demo-1"), shared=None)
    handle = RunHandle(RunFolder(tmp_path / "here"), made)
    for number in range(300):
        path = Path(made.run_dir, "attempts", str(number % 10), f"node-{number}", "log")
        path.parent.mkdir(parents=True)
        path.write_text("line\n")
    SSH.remove_remote_files(handle, LocalTransport())
    assert os.listdir(tmp_path / "runs") == []
    # Two that remove the same files would each report those that the other has removed.
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == len(set(asked))


class Gone(LocalTransport):
    """No host answers."""

    def open(self, host, argv, *, env=None):
        raise Unavailable(f"host {host} does not answer")


def brought(node, handle, text, exit_json=b'{"exit_code": 0, "at": 1.0, "reason": null}'):
    """What a node has written, as it is in the run's folder here."""
    path = handle.folder.node_dir(handle.attempt, node)
    path.mkdir(parents=True)
    (path / "log").write_text(f"2026-11-21T20:11:58.{node:06d}Z {node} {text}\n")
    if exit_json is not None:
        (path / "exit.json").write_bytes(exit_json)


def test_status_takes_known_node_exit_from_mirror_when_hosts_are_gone():
    handle = RunHandle(RunFolder.create("demo-1"), plan(facts(), nodes=2))
    brought(0, handle, "zero")
    brought(1, handle, "one", exit_json=None)
    seen = SSH.status(handle, Gone())
    assert [node.state for node in seen.nodes] == [State.SUCCEEDED, State.UNKNOWN]
    brought(1, replace(handle, attempt=2), "one")
    (handle.folder.node_dir(1, 1) / "exit.json").write_bytes(
        b'{"exit_code": 3, "at": 1.0, "reason": null}'
    )
    seen = SSH.status(handle, Gone())
    assert [(node.state, node.exit_code) for node in seen.nodes] == [
        (State.SUCCEEDED, 0),
        (State.FAILED, 3),
    ]
    watcher = SSH.watch(handle, Gone())
    assert watcher.status().nodes == seen.nodes
    watcher.close()


def test_finished_run_reads_logs_and_metrics_without_hosts(monkeypatch):
    monkeypatch.setattr(backends, "transport_for", lambda cluster: pytest.fail("asks the hosts"))
    folder = RunFolder.create("demo-1")
    made = plan(facts(), nodes=2)
    folder.save_plan(facts(), made)
    folder.write_json(
        "state.json",
        RunStatus(run="demo-1", job="demo", cluster="lab", backend="ssh", state=State.SUCCEEDED),
    )
    brought(0, RunHandle(folder, made), '@clusterkit {"event": "metrics", "step": 1, "loss": 2.0}')
    brought(1, RunHandle(folder, made), "hello")
    run = api.get("demo-1")
    assert [(line.node, line.rank) for line in run.logs()] == [(0, 0), (1, 1)]
    assert [line.text for line in run.logs(node=1, follow=True)] == ["hello"]
    assert run.metrics() == [{"step": 1, "loss": 2.0}]
