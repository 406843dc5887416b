"""Who is told of a run: by command and by web address, in bounded time, never in the way."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from clusterkit.cluster import NotifySpec
from clusterkit.jobfile import loader
from clusterkit.lifecycle import notify
from clusterkit.lifecycle.supervisor import Supervisor
from clusterkit.run.folder import Event, RunFolder
from clusterkit.run.status import Failure, RunStatus, State


def status(state: State, failure: Failure | None = None) -> RunStatus:
    return RunStatus(
        run="demo-1", job="demo", cluster="local", backend="local", state=state, attempt=2,
        started_at=1.0, failure=failure,
    )  # fmt: skip


def writer(path: object, *more: str) -> NotifySpec:
    """Tells a program that writes what it is told into a file."""
    program = f"import os, sys; open({str(path)!r}, 'w').write(sys.stdin.read())"
    return NotifySpec(command=(sys.executable, "-c", "; ".join([program, *more])))


@pytest.mark.parametrize(
    ("state", "event", "text"),
    [
        (State.SUCCEEDED, "ended", "demo-1 SUCCEEDED"),
        (State.CANCELLED, "ended", "demo-1 CANCELLED"),
        (State.FAILED, "failed", "demo-1 FAILED: rank 3 on node 1: ValueError: bad"),
        (State.RESTARTING, "restarted",
         "demo-1: attempt 2 failed: rank 3 on node 1: ValueError: bad; starting again"),
    ],
)  # fmt: skip
def test_notification_has_event_and_text_for_state(state, event, text):
    failed = state in (State.FAILED, State.RESTARTING)
    failure = Failure(node=1, rank=3, exit_code=1, cause="ValueError: bad") if failed else None
    told = notify.notification(status(state, failure))
    assert (told.event, told.text) == (event, text)


def test_notify_command_gets_notification_on_stdin(tmp_path):
    said: list[str] = []
    notify.notify(writer(tmp_path / "told"), status(State.SUCCEEDED), said.append)
    told = json.loads((tmp_path / "told").read_text())
    assert (told["event"], told["status"]["state"]) == ("ended", "SUCCEEDED")
    assert said == [f"{sys.executable} was notified: ended"]


def test_notify_skips_missing_spec_and_unselected_events(tmp_path):
    notify.notify(None, status(State.FAILED), pytest.fail)
    spec = NotifySpec(command=("false",), on=("failed",))
    notify.notify(spec, status(State.SUCCEEDED), pytest.fail)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("/nowhere/tell",), "notify: /nowhere/tell: No such file or directory"),
        (("sh", "-c", "echo oh >&2; echo no >&2; exit 3"), "notify: sh: exit code 3: no"),
        (("sh", "-c", "exec sleep 600"), "notify: sh: no answer within 0.2 s"),
    ],
)
def test_failing_notify_command_is_noted(monkeypatch, command, said):
    monkeypatch.setattr(notify, "SECONDS", 0.2 if "600" in command[-1] else 10.0)
    notes: list[str] = []
    notify.notify(NotifySpec(command=command), status(State.FAILED), notes.append)
    assert notes == [said]


@pytest.fixture
def server():
    """A web server that keeps what is posted, and refuses /no."""
    posted: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            posted.append((self.path, body))
            self.send_response(404 if self.path == "/no" else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    made = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    made.posted = posted  # type: ignore[attr-defined]
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def test_notify_posts_to_url_without_printing_url(server, monkeypatch):
    address = f"http://127.0.0.1:{server.server_port}"
    spec = NotifySpec(url_from="HOOK")
    monkeypatch.setenv("HOOK", f"{address}/secret")
    assert (
        notify.send(spec, notify.notification(status(State.FAILED))) == "$HOOK was notified: failed"
    )
    ((path, body),) = server.posted
    assert path == "/secret"
    assert json.loads(body)["text"] == "demo-1 FAILED"
    monkeypatch.setenv("HOOK", f"{address}/no")
    notes: list[str] = []
    notify.notify(spec, status(State.FAILED), notes.append)
    assert notes == ["notify: $HOOK: HTTP 404"]
    for value, why in (("", "is not set"), ("file:///etc/passwd", "is not an http\\(s\\) URL")):
        monkeypatch.setenv("HOOK", value)
        with pytest.raises(notify.NotifyFailed, match=rf"notify: \$HOOK {why}"):
            notify.send(spec, notify.notification(status(State.FAILED)))


def test_supervisor_notifies_of_end_and_records_event(cwd, unstarted_run, tmp_path):
    command = writer(tmp_path / "told").command
    (cwd / "clusters.yaml").write_text(
        json.dumps({"local": {"backend": "local", "notify": {"command": command}}})
    )
    run = unstarted_run()
    folder = RunFolder(run.path)
    supervisor = Supervisor(folder)
    supervisor.failure = Failure(exit_code=7, cause="bad")
    supervisor._finish(State.FAILED)
    assert json.loads((tmp_path / "told").read_text())["status"]["exit_code"] == 7
    assert folder.read_json("state.json", RunStatus).state is State.FAILED
    texts = [event.text for event in folder.records("events.jsonl", Event)]
    assert texts == [f"{sys.executable} was notified: failed"]


def test_doctor_notify_option_sends_test_notification(cwd, cli, refused, tmp_path):
    assert "cluster local has no `notify`" in refused("doctor", "--notify")
    command = list(writer(tmp_path / "told").command)
    entries = {"a": {"backend": "local", "notify": {"command": command}},
               "b": {"backend": "local", "notify": {"command": ["false"]}}}  # fmt: skip
    (cwd / "clusters.yaml").write_text(json.dumps(entries))
    done = cli("doctor", "--notify", "--cluster", "a")
    assert (done.code, done.err) == (0, f"{sys.executable} was notified: test\n")
    assert json.loads((tmp_path / "told").read_text())["event"] == "test"
    done = cli("doctor", "--notify", "--cluster", "b")
    assert (done.code, done.err) == (125, "error: notify: false: exit code 1: \n")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{}", "one of `command` and `url_from`"),
        ("{command: [a], url_from: B}", "one of `command` and `url_from`"),
        ("{url_from: https://x}", "url_from"),
        ("{command: [a], on: [sometimes]}", "allowed: ended, failed, restarted"),
    ],
)
def test_invalid_notify_entry_is_refused_with_line(cwd, refused, write_job, entry, said):
    (cwd / "clusters.yaml").write_text(f"local:\n  backend: local\n  notify: {entry}\n")
    error = refused("plan", write_job())
    assert "clusters.yaml:3" in error
    assert said in error
    assert loader.cluster_names() == ["local"]
