"""What nodes elsewhere write, brought here while they write it: by the real `agent report`."""

import fcntl
import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from clusterkit import agent
from clusterkit.agent import limits, processes, report
from clusterkit.backends.ssh import observe
from clusterkit.errors import RunFolderError, SubmitFailed, Unavailable
from clusterkit.output import mirror
from clusterkit.output.mirror import Frames, NodeView, Watch, folder_lock, pull
from clusterkit.transport import LocalTransport

LOCAL = LocalTransport()


def frame(header, data=b""):
    return json.dumps({**header, "bytes": len(data)}).encode() + b"\n" + data


@pytest.fixture
def node_dir(tmp_path):
    """The folder that a node writes on its host."""
    folder = tmp_path / "host" / "node-0"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def kept(tmp_path):
    """The folder here that its files are brought to."""
    return tmp_path / "here" / "node-0"


def begin(node_dir, pid=None):
    started = agent.identity(pid or os.getpid())
    (node_dir / "started.json").write_text(json.dumps(started))


def end(node_dir, code=0):
    """As the agent does it: the log is whole before exit.json is there, then it is gone."""
    (node_dir / "exit.json").write_text(json.dumps({"exit_code": code, "at": 1.0}))
    (node_dir / "started.json").write_text(
        json.dumps(agent.identity(os.getpid()) | {"start_ticks": 1})
    )


def opener(node_dir, *, follow):
    def open_stream(view):
        known = view.offsets()
        return LOCAL.open(
            view.host,
            [sys.executable, "-m", "clusterkit.agent", "report", str(node_dir), "--log",
             str(known["log"]), "--ranks", str(known["ranks.jsonl"]),
             *(["--follow"] if follow else [])],
        )  # fmt: skip

    return open_stream


def look(node_dir, view):
    with folder_lock(view), opener(node_dir, follow=False)(view) as stream:
        pull(view, stream)
        return stream.exit_code(60)


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


# ---------------------------------------------------------------- frames


def test_frames_are_parsed_for_any_chunking_of_stream():
    told = [
        ({"file": "log"}, bytes(range(256))),
        ({"begun": True}, b""),
        ({"file": "x"}, b"\n{}\n"),
    ]
    data = b"".join(frame(*one) for one in told)
    dice = random.Random(3)
    for _ in range(200):
        frames, found, rest = Frames(), [], data
        while rest:
            size = dice.randint(1, 40)
            found += frames.feed(rest[:size])
            rest = rest[size:]
        assert [({k: v for k, v in h.items() if k != "bytes"}, d) for h, d in found] == told


def test_incomplete_frame_is_held_until_complete():
    frames = Frames()
    assert list(frames.feed(frame({"file": "log"}, b"abc")[:-1])) == []
    assert [data for _, data in frames.feed(b"c")] == [b"abc"]


@pytest.mark.parametrize(
    "garbage",
    [
        b"bash: warning: setlocale\n",
        b"{}\n",
        b"[]\n",
        b"5\n",
        b"null\n",
        b'"text"\n',
        b'{"bytes": "x"}\n',
        b'{"bytes": null}\n',
        b'{"bytes": -1}\n',
        b'{"bytes": -14}\n',
        b'{"bytes": 99999999999999999}\n',
        b"\xff\xfe\x00\n",
        b"[" * 100_000 + b"\n",
        b"\n",
    ],
)
def test_malformed_frame_is_refused(garbage):
    with pytest.raises(SubmitFailed, match="a node's report cannot be read"):
        list(Frames().feed(garbage))


def test_node_view_ignores_files_with_unknown_names(kept):
    kept.mkdir(parents=True)
    view = NodeView(0, "h0", kept)
    for name in ("../x", "/etc/passwd", "state.json", "", ".mirror", 5, ["log"]):
        view.take({"file": name, "bytes": 1}, b"x")
    assert os.listdir(kept) == []


# ---------------------------------------------------------------- one look


def test_report_sends_started_file_before_log(node_dir, monkeypatch):
    read_from = report.read_from

    def slow(path, offset=0):
        found = read_from(path, offset)
        if path.name == "started.json" and found is None:
            # It begins between two looks.
            begin(node_dir)
            (node_dir / "log").write_bytes(b"hello\n")
        return found

    monkeypatch.setattr(report, "read_from", slow)
    out = io.BytesIO()
    report.report(node_dir, out, log=0, ranks=0, follow=False)
    names = [header.get("file") for header, _ in Frames().feed(out.getvalue())]
    assert names == ["started.json", "log", None]


def test_report_copies_all_files_of_ended_node(node_dir, kept):
    begin(node_dir)
    (node_dir / "log").write_bytes(b"T 0 a\nT 0 b\n")
    (node_dir / "ranks.jsonl").write_text('{"rank": 0}\n')
    (node_dir / "agent.log").write_text("complaint\n")
    end(node_dir, 7)
    view = NodeView(0, "h0", kept)
    assert look(node_dir, view) == 0
    assert (view.begun, view.alive, view.ended) == (True, False, True)
    assert (kept / "log").read_bytes() == b"T 0 a\nT 0 b\n"
    assert (kept / "ranks.jsonl").read_text() == '{"rank": 0}\n'
    for name in ("started.json", "exit.json", "agent.log"):
        assert (kept / name).read_bytes() == (node_dir / name).read_bytes() == view.files[name]


@pytest.mark.parametrize(("full", "log"), [(True, b"No space left on device: "), (False, b"")])
def test_report_names_full_disk_for_agent_that_died(full, log, node_dir, kept, monkeypatch):
    begin(node_dir)
    (node_dir / "agent.log").touch()
    (node_dir / "started.json").write_text("{}")  # of no process
    found = os.statvfs(node_dir)
    blocks = 0 if full else found.f_blocks
    names = ("f_bavail", "f_bfree", "f_favail", "f_ffree", "f_files")
    values = (blocks, blocks, found.f_favail, found.f_ffree, found.f_files)
    space = types.SimpleNamespace(**dict(zip(names, values, strict=True)))
    monkeypatch.setattr(os, "statvfs", lambda path: space)
    out = io.BytesIO()
    report.report(node_dir, out, log=0, ranks=0, follow=False)
    sent = {header.get("file"): data for header, data in Frames().feed(out.getvalue())}
    assert sent["agent.log"].startswith(log)
    assert bool(sent["agent.log"]) == full


def test_second_report_sends_only_new_log_bytes(node_dir, kept):
    begin(node_dir)
    (node_dir / "log").write_bytes(b"T 0 a\n")
    look(node_dir, NodeView(0, "h0", kept))
    with (node_dir / "log").open("ab") as file:
        file.write(b"T 0 b\n")
    view = NodeView(0, "h0", kept)
    assert view.offsets()["log"] == 6
    look(node_dir, view)
    assert (kept / "log").read_bytes() == b"T 0 a\nT 0 b\n"
    assert (view.begun, view.alive, view.ended) == (True, True, False)


def test_log_larger_than_one_frame_is_copied_whole(node_dir, kept):
    begin(node_dir)
    data = os.urandom(3 * limits.REPORT_BYTES + 17) + b"\n"
    (node_dir / "log").write_bytes(data)
    look(node_dir, NodeView(0, "h0", kept))
    assert (kept / "log").read_bytes() == data


def test_node_without_files_or_folder_has_not_begun(node_dir, kept):
    view = NodeView(0, "h0", kept)
    assert look(node_dir, view) == 0
    assert (view.begun, view.alive, view.ended) == (False, False, False)
    assert look(node_dir.with_name("gone"), view) == 0
    assert view.begun is False


def test_node_with_pid_file_only_is_alive_while_process_runs(node_dir, kept):
    (node_dir / "pid").write_text(f"{os.getpid()} {processes.boot_id()}\n")
    view = NodeView(0, "h0", kept)
    look(node_dir, view)
    assert (view.begun, view.alive, view.ended) == (True, True, False)
    for gone in ("garbage\n", "", f"{os.getpid()} of-another-boot\n", f"{os.getpid()}\n"):
        (node_dir / "pid").write_text(gone)
        look(node_dir, view)
        assert (view.begun, view.alive, view.ended) == (True, False, True)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"pid": "x"}'])
def test_damaged_started_file_means_not_alive(node_dir, kept, text):
    (node_dir / "started.json").write_text(text)
    view = NodeView(0, "h0", kept)
    assert look(node_dir, view) == 0
    assert view.alive is False


def test_node_view_without_folder_takes_no_log(node_dir):
    begin(node_dir)
    (node_dir / "log").write_bytes(b"x" * 1000)
    (node_dir / "ranks.jsonl").write_text("{}\n")
    end(node_dir)
    view = NodeView(0, "h0")
    look(node_dir, view)
    assert "log" not in view.files
    assert view.files["ranks.jsonl"] == b"{}\n"
    assert view.ended


def test_node_view_writes_nothing_while_another_process_holds_lock(node_dir, kept):
    begin(node_dir)
    (node_dir / "log").write_bytes(b"x")
    kept.mkdir(parents=True)
    with (kept / ".mirror").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        view = NodeView(0, "h0", kept)
        look(node_dir, view)
        assert os.listdir(kept) == [".mirror"]
        assert "started.json" in view.files
        assert view.folder == kept


def test_node_state_is_read_even_if_folder_cannot_be_created(node_dir, kept):
    kept.parent.write_text("a file in the folder's place")
    begin(node_dir)
    view = NodeView(0, "h0", kept)
    look(node_dir, view)
    assert view.alive
    assert view.folder == kept


@pytest.fixture
def full_disk(tmp_path):
    """A disk of 64 KiB where the files are kept."""
    place = tmp_path / "here"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_log_copy_on_full_disk_resumes_once_space_is_free(node_dir, kept, full_disk):
    begin(node_dir)
    data = os.urandom(100_000) + b"\n"
    (node_dir / "log").write_bytes(data)
    view = NodeView(0, "h0", kept)
    with pytest.raises(SubmitFailed, match=r"cannot write .*log: No space left"):
        look(node_dir, view)
    assert view.write_error == f"cannot write {kept / 'log'}: No space left on device"
    (remark,) = observe._judge(view, 0.0).remarks
    assert remark == f"its log here is incomplete: {view.write_error}"
    assert data.startswith((kept / "log").read_bytes())
    subprocess.run(["mount", "-o", "remount,size=1m", str(full_disk)], check=True)
    look(node_dir, view)
    assert (kept / "log").read_bytes() == data
    assert view.write_error is None


def test_file_copy_on_full_disk_leaves_no_partial_file(kept, full_disk):
    kept.mkdir()
    view = NodeView(0, "h0", kept)
    with pytest.raises(RunFolderError, match="No space left"):
        view.take({"file": "exit.json"}, b"x" * 100_000)
    assert os.listdir(kept) == []


# ---------------------------------------------------------------- following


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
