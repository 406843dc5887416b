"""Following what nodes elsewhere write."""

import fcntl
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from clusterkit.agent import limits
from clusterkit.errors import SubmitFailed, Unavailable
from clusterkit.output import mirror
from clusterkit.output.mirror import NodeView, Watch
from tests.unit.mirror.nodes import LOCAL, begin, end, opener


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


@pytest.fixture
def watch(node_dir, kept):
    """Watch one node; closed with the test."""
    watches = []

    def start(open_stream=None, folder=kept, back=False):
        view = NodeView(0, "h0", folder)
        made = Watch([view], open_stream or opener(node_dir, follow=True), back)
        watches.append(made)
        return made, view

    yield start
    for made in watches:
        made.close()


def test_watch_follows_node_until_exit(node_dir, kept, watch):
    made, view = watch()
    wait_for(lambda: view.received_at is not None)
    assert not view.begun
    begin(node_dir)
    wait_for(lambda: view.alive)
    whole = b""
    for number in range(20):
        line = f"T 0 line {number}\n".encode() * 50
        whole += line
        with (node_dir / "log").open("ab") as file:
            file.write(line)
        if number == 10:
            wait_for(lambda: (kept / "log").exists() and (kept / "log").stat().st_size > 0)
    end(node_dir, 3)
    wait_for(lambda: view.ended)
    for thread in made._threads:
        thread.join(60)
        assert not thread.is_alive()
    assert (kept / "log").read_bytes() == whole
    assert json.loads((kept / "exit.json").read_bytes())["exit_code"] == 3
    assert view.silent_for() is None


class Flaky:
    """Opens the real report, and remembers its processes."""

    def __init__(self, node_dir):
        self._open = opener(node_dir, follow=True)
        self.pids = []
        self.error = None

    def __call__(self, view):
        if self.error is not None:
            raise self.error
        stream = self._open(view)
        self.pids.append(stream._process.pid)
        return stream


def test_watch_resumes_after_host_was_unreachable(node_dir, kept, watch, monkeypatch):
    monkeypatch.setattr(mirror, "AGAIN_SECONDS", 0.05)
    begin(node_dir)
    (node_dir / "log").write_bytes(b"T 0 before\n")
    flaky = Flaky(node_dir)
    _made, view = watch(flaky)
    wait_for(lambda: view.alive)
    flaky.error = Unavailable("host h0 does not answer")
    os.kill(flaky.pids[0], signal.SIGKILL)
    wait_for(lambda: view.error is flaky.error)
    assert view.silent_for() is not None
    assert view.alive  # what was known last
    with (node_dir / "log").open("ab") as file:
        file.write(b"T 0 meanwhile\n")
    flaky.error = None
    wait_for(lambda: view.silent_for() is None)
    wait_for(lambda: (kept / "log").read_bytes() == b"T 0 before\nT 0 meanwhile\n")
    assert view.error is None


def test_silent_time_is_counted_from_last_frame():
    view = NodeView(0, "h0")
    view.take({"begun": True, "alive": True, "ended": False}, b"")
    view.received_at -= 100
    for _ in range(3):
        view.lost(Unavailable("no answer"))
    assert 100 <= view.silent_for() < 110
    view.take({"begun": True}, b"")
    assert view.silent_for() is None


def test_watch_reports_silent_host_as_no_longer_answering(node_dir, watch, monkeypatch):
    monkeypatch.setattr(mirror, "QUIET_SECONDS", 0.2)
    monkeypatch.setattr(mirror, "AGAIN_SECONDS", 0.05)
    _made, view = watch(lambda view: LOCAL.open("h0", ["sleep", "60"]))
    wait_for(lambda: view.error is not None)
    assert "h0 no longer answers" in view.error.message


def test_report_sends_heartbeats_while_node_is_idle(node_dir, watch):
    begin(node_dir)
    _made, view = watch()
    wait_for(lambda: view.alive)
    heard = view.received_at
    wait_for(lambda: view.received_at > heard)
    assert limits.HEARTBEAT_SECONDS < mirror.QUIET_SECONDS / 2


def test_watch_marks_run_without_agent_on_host_as_not_known(watch, monkeypatch):
    monkeypatch.setattr(mirror, "AGAIN_SECONDS", 0.05)
    gone = [sys.executable, "-I", "/nowhere/agent.pyz"]
    _made, view = watch(lambda view: LOCAL.open("h0", gone))
    wait_for(lambda: view.error is not None)
    assert view.known is False
    assert "reporting ended with 2" in view.error.message


def test_watch_refuses_login_shell_output_as_report(watch, monkeypatch):
    monkeypatch.setattr(mirror, "AGAIN_SECONDS", 0.05)
    _made, view = watch(lambda view: LOCAL.open("h0", ["echo", "Welcome!"]))
    wait_for(lambda: view.error is not None)
    assert "a node's report cannot be read: 'Welcome!" in view.error.message


def test_watch_waits_for_short_lock_and_then_copies_log(node_dir, kept, watch, monkeypatch):
    # `clusterkit status` may be looking at the very moment when the supervisor starts to watch.
    begin(node_dir)
    (node_dir / "log").write_bytes(b"T 0 a\n")
    kept.mkdir(parents=True)
    with (kept / ".mirror").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        _made, view = watch()
        time.sleep(0.3)
        assert view.received_at is None
    wait_for(lambda: (kept / "log").exists() and (kept / "log").read_bytes() == b"T 0 a\n")


def test_watch_continues_without_folder_if_lock_is_never_released(
    node_dir, kept, watch, monkeypatch
):
    monkeypatch.setattr(mirror, "LOCK_SECONDS", 0.2)
    begin(node_dir)
    kept.mkdir(parents=True)
    with (kept / ".mirror").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        _made, view = watch()
        wait_for(lambda: view.alive)
        assert not (kept / "started.json").exists()


def test_closing_watch_ends_threads_and_processes_without_output(node_dir, watch, capfd):
    begin(node_dir)
    flaky = Flaky(node_dir)
    for _ in range(5):
        made, view = watch(flaky)
        wait_for(lambda: view.alive)  # noqa: B023 (called at once)
        made.close()
        for thread in made._threads:
            thread.join(60)
            assert not thread.is_alive()
    for pid in flaky.pids:
        assert not Path(f"/proc/{pid}").exists()
    assert capfd.readouterr().err == ""


def test_closing_watch_during_retry_pause_is_prompt(watch, monkeypatch):
    monkeypatch.setattr(mirror, "AGAIN_SECONDS", 30.0)

    def away(view):
        raise Unavailable("host h0 does not answer")

    made, view = watch(away)
    wait_for(lambda: view.error is not None)
    began = time.monotonic()
    made.close()
    assert time.monotonic() - began < 20
    assert not any(thread.is_alive() for thread in made._threads)


def test_closing_watch_with_many_stuck_hosts_is_bounded(watch, monkeypatch):
    monkeypatch.setattr(mirror, "AGAIN_SECONDS", 0.05)
    released = threading.Event()

    def stuck(view):
        released.wait(60)
        raise Unavailable("host h0 does not answer")

    made, _ = watch(stuck)
    made._threads *= 200
    began = time.monotonic()
    made.close()
    assert time.monotonic() - began < 10
    released.set()


def test_watch_follows_node_that_starts_again(node_dir, kept, watch, monkeypatch):
    monkeypatch.setattr(mirror, "BACK_SECONDS", 0.05)
    begin(node_dir)
    _, view = watch(back=True)
    wait_for(lambda: view.alive)
    end(node_dir, 143)
    wait_for(lambda: view.ended and (kept / "exit.json").exists())
    (node_dir / "exit.json").unlink()
    begin(node_dir)
    wait_for(lambda: view.alive and not view.ended)
    assert not (kept / "exit.json").exists()
    assert "exit.json" not in view.files
    end(node_dir, 0)
    wait_for(lambda: view.ended and (kept / "exit.json").exists())


def test_closed_watch_does_not_poll_ended_node_again(node_dir, watch, monkeypatch):
    monkeypatch.setattr(mirror, "BACK_SECONDS", 3600.0)
    opened = []

    def open_stream(view):
        opened.append(view.node)
        return opener(node_dir, follow=True)(view)

    begin(node_dir)
    end(node_dir, 0)
    made, view = watch(open_stream, back=True)
    wait_for(lambda: view.ended)
    made.close()
    assert opened == [0]


def test_usage_file_is_stored_without_counting_as_change(kept):
    kept.mkdir(parents=True, exist_ok=True)
    view = NodeView(0, "h0", kept)
    view.take({"file": "usage.json"}, b"{}")
    assert (view.changes, (kept / "usage.json").read_bytes()) == (0, b"{}")


def test_unreachable_hosts_do_not_delay_other_hosts(tmp_path, node_dir, kept):
    begin(node_dir)

    def open_stream(view):
        if view.host == "away":
            raise Unavailable("host away does not answer")
        return opener(node_dir, follow=True)(view)

    views = [NodeView(n, host, tmp_path / f"k{n}") for n, host in enumerate(("away", "h1", "away"))]
    made = Watch(views, open_stream)
    try:
        wait_for(lambda: views[1].alive and views[0].error and views[2].error)
    finally:
        made.close()


def test_node_end_is_read_even_if_log_cannot_be_written(tmp_path, monkeypatch):
    log, state = b"x" * 10, {"begun": True, "alive": False, "ended": True}
    frames = [({"file": "log"}, log), ({"file": "log"}, log), (state, b"")]
    said = b"".join(
        json.dumps({**header, "bytes": len(data)}).encode() + b"\n" + data
        for header, data in frames
    )

    class Told:
        def __init__(self):
            self.rest = [said[:30], said[30:], b""]

        def read(self, timeout=None):
            return self.rest.pop(0)

    def refuse(name, payload):
        raise SubmitFailed("cannot write log: No space left on device")

    view = mirror.NodeView(0, "h0", tmp_path)
    monkeypatch.setattr(view, "_append", refuse)
    with pytest.raises(SubmitFailed, match="No space left"):
        mirror.pull(view, Told())
    assert view.ended


def test_log_truncated_by_agent_is_mirrored_exactly(node_dir, kept, watch):
    """The agent writes what there is room for, and takes an unfinished line back."""
    _made, view = watch()
    begin(node_dir)
    with (node_dir / "log").open("ab", buffering=0) as log:
        log.write(b"T 0 first\nT 0 unfini")
        wait_for(lambda: (kept / "log").exists() and (kept / "log").stat().st_size > 0)
        heard = view.received_at
        wait_for(lambda: view.received_at > heard)  # a whole look later
        log.truncate(len(b"T 0 first\n"))
        log.write(b"T 0 2\nT 0 third\n")
    end(node_dir)
    wait_for(lambda: view.ended)
    assert (kept / "log").read_bytes() == b"T 0 first\nT 0 2\nT 0 third\n"


@pytest.mark.parametrize("error", [OSError(116, "Stale file handle"), RuntimeError("no thread")])
def test_watch_thread_continues_after_local_error(node_dir, kept, watch, monkeypatch, error):
    monkeypatch.setattr(mirror, "AGAIN_SECONDS", 0.05)
    begin(node_dir)
    failing, real = [error, error], NodeView.take

    def take(self, header, payload):
        if failing:
            raise failing.pop()
        real(self, header, payload)

    monkeypatch.setattr(NodeView, "take", take)
    _made, view = watch()
    wait_for(lambda: view.error is not None or view.alive)
    assert view.alive or str(error) in view.error.message
    wait_for(lambda: view.alive)
    assert view.error is None


def test_watch_ends_started_threads_if_another_cannot_start(node_dir, monkeypatch):
    started, real = [], mirror.threading.Thread.start

    def start(self):
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(self)
        real(self)

    monkeypatch.setattr(mirror.threading.Thread, "start", start)
    views = [NodeView(number, f"h{number}") for number in range(3)]
    with pytest.raises(Unavailable, match="cannot follow 3 hosts: can't start new thread"):
        Watch(views, lambda view: LOCAL.open("h", ["sleep", "600"]))
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()
