"""Frames, and one look at a node elsewhere."""

import fcntl
import io
import json
import os
import random
import subprocess
import types

import pytest

from clusterkit.agent import limits, processes, report
from clusterkit.backends.ssh import observe
from clusterkit.errors import RunFolderError, SubmitFailed
from clusterkit.output.mirror import Frames, NodeView, folder_lock, pull
from tests.unit.mirror.nodes import begin, end, opener


def frame(header, data=b""):
    return json.dumps({**header, "bytes": len(data)}).encode() + b"\n" + data


def look(node_dir, view):
    with folder_lock(view), opener(node_dir, follow=False)(view) as stream:
        pull(view, stream)
        return stream.exit_code(60)


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
