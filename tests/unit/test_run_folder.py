"""The run folder: names, atomic writes, finding a run again."""

import contextlib
import errno
import os
import shutil
import stat
import subprocess
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from clusterkit.errors import BadInput, RunFolderError, RunNotFound
from clusterkit.run import folder as run_folder
from clusterkit.run.begun import Begun
from clusterkit.run.find import all_runs, find_run
from clusterkit.run.folder import RESERVE, Event, RunFolder, Submission
from clusterkit.run.status import RunStatus, State


def event(text, at=1.0):
    return Event(at=at, attempt=1, text=text)


@pytest.fixture
def folder():
    return RunFolder.create("demo-1")


def test_record_end_removes_old_drafts_of_dead_writers(folder, tmp_path):
    with subprocess.Popen(["true"]) as gone:
        pass
    old = time.time() - 3600

    def draft(writer, written=old):
        path = folder.file(f".state.json.{writer}.0123abcd")
        path.write_text("{")
        os.utime(path, (written, written))
        return path

    left, living, fresh = draft(gone.pid), draft(os.getpid()), draft(gone.pid + 1, time.time())
    mine = folder.file(".mine.json")
    mine.write_text("")
    status = RunStatus(run="demo-1", job="demo", cluster="local", backend="local",
                       state=State.FAILED, attempt=1)  # fmt: skip
    folder.record_end(status)
    assert [path.exists() for path in (left, living, fresh, mine)] == [False, True, True, True]


# ---------------------------------------------------------------- names


@given(st.text(max_size=300))
def test_run_id_is_dns_label_for_any_job_name(name):
    run_id = run_folder.new_run_id(name)
    assert run_folder.check_run_id(run_id) == run_id
    assert len(run_id) <= 40
    assert run_id == run_id.lower()
    assert not run_id.startswith("-")


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("Zero 3!", "zero-3"),
        ("日本", "job"),
        ("---", "job"),
        ("x" * 300, "x" * 24),
        ("a" * 23 + "/b", "a" * 23),
    ],
)
def test_job_name_becomes_slug_of_run_id(name, slug):
    assert run_folder.slug(name) == slug


def test_run_ids_made_in_same_second_differ(monkeypatch):
    monkeypatch.setattr(run_folder.time, "strftime", lambda *_: "1121201158")
    first, second = run_folder.new_run_id("demo"), run_folder.new_run_id("demo")
    assert first != second
    assert first[:-4] == second[:-4] == "demo-1121201158-"


def test_run_id_last_is_refused_as_reserved():
    with pytest.raises(BadInput, match="run id 'last': it is reserved for the newest run"):
        RunFolder.create("last")


@pytest.mark.parametrize(("asked", "mode"), [(None, 0o700), ("", 0o700), ("750", 0o750)])
def test_run_folder_mode_is_0700_unless_run_mode_is_set(monkeypatch, asked, mode):
    if asked is not None:
        monkeypatch.setenv("CLUSTERKIT_RUN_MODE", asked)
    before = os.umask(0)
    try:
        path = RunFolder.create("demo-1").path
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize("asked", ["rwx", "600", "1777", "788", "0o700", "-700"])
def test_invalid_run_mode_is_refused(monkeypatch, asked):
    monkeypatch.setenv("CLUSTERKIT_RUN_MODE", asked)
    with pytest.raises(BadInput, match=f"CLUSTERKIT_RUN_MODE: {asked}: not a folder mode"):
        RunFolder.create("demo-1")
    assert not run_folder.home().exists()


@pytest.mark.parametrize("bad", ["", "A", "a b", "-a", "a-", "a/b", "..", "a\n", "é", "x" * 64])
def test_run_id_that_is_not_dns_label_is_refused(bad):
    with pytest.raises(BadInput, match="is not valid"):
        run_folder.check_run_id(bad)


# ---------------------------------------------------------------- creating


def test_home_is_clusterkit_home_or_folder_in_user_home(monkeypatch, clusterkit_home):
    assert run_folder.home() == clusterkit_home
    monkeypatch.delenv("CLUSTERKIT_HOME")
    monkeypatch.setenv("HOME", "/home/u")
    assert str(run_folder.home()) == "/home/u/.clusterkit"
    monkeypatch.setenv("CLUSTERKIT_HOME", "~/else")
    assert str(run_folder.home()) == "/home/u/else"


def test_existing_run_id_is_refused_with_status_hint(folder):
    with pytest.raises(BadInput, match="run demo-1 exists already") as error:
        RunFolder.create("demo-1")
    assert error.value.hint == "clusterkit status demo-1"


def test_concurrent_creates_of_same_run_id_succeed_exactly_once():
    barrier = threading.Barrier(8)
    won, refused = [], []

    def submit():
        barrier.wait()
        try:
            won.append(RunFolder.create("demo-1"))
        except BadInput as error:
            refused.append(error.message)

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert refused == ["run demo-1 exists already"] * 7


def test_home_that_is_file_is_refused_with_hint(clusterkit_home):
    clusterkit_home.write_text("")
    with pytest.raises(RunFolderError, match=r"is not a folder|cannot make") as error:
        RunFolder.create("demo-1")
    assert "CLUSTERKIT_HOME" in (error.value.hint or "")


def test_create_on_full_disk_is_refused(monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pathlib.Path.mkdir", full)
    with pytest.raises(RunFolderError, match=r"cannot make .*demo-1: No space left on device"):
        RunFolder.create("demo-1")


# ---------------------------------------------------------------- documents


def test_document_round_trips_through_json_file(folder):
    folder.write_json("e.json", event("ü"))
    assert folder.read_json("e.json", Event) == event("ü")
    assert folder.read("e.json").endswith(b"}\n")


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b"null", b"{}", b"\xff", b'{"at": "x"}'], ids=repr
)
def test_damaged_document_is_reported_by_name(folder, damage):
    folder.file("e.json").write_bytes(damage)
    with pytest.raises(RunFolderError, match=r"run demo-1: e\.json is damaged"):
        folder.read_json("e.json", Event)
    assert folder.maybe_json("e.json", Event) is None


def test_missing_document_is_reported_by_name(folder):
    with pytest.raises(RunFolderError, match=r"run demo-1: e\.json is missing or unreadable \(No"):
        folder.read_json("e.json", Event)
    assert folder.maybe_json("e.json", Event) is None


def test_folder_in_place_of_document_is_reported_by_name(folder):
    folder.file("e.json").mkdir()
    with pytest.raises(RunFolderError, match=r"e\.json is missing or unreadable \(Is a dir"):
        folder.read_json("e.json", Event)


def test_concurrent_reader_never_sees_partial_document(folder):
    big = [event("x" * 1000) for _ in range(200)]
    folder.write_json("e.json", big)
    stop = threading.Event()

    def write():
        while not stop.is_set():
            folder.write_json("e.json", big)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(30):
            assert folder.read_json("e.json", list[Event]) == big
    finally:
        stop.set()
        writer.join()


def test_records_are_appended_and_damaged_lines_skipped(folder):
    folder.append("events.jsonl", event("one"))
    folder.append("events.jsonl", event("two"))
    with folder.file("events.jsonl").open("ab") as file:
        file.write(b'garbage\n{"at": 3.0, "attem')
    assert [e.text for e in folder.records("events.jsonl", Event)] == ["one", "two"]


def test_records_of_missing_file_are_empty(folder):
    assert folder.records("events.jsonl", Event) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_append_on_full_disk_loses_only_that_record(folder):
    folder.file("events.jsonl").symlink_to("/dev/full")
    folder.append("events.jsonl", event("lost"))
    folder.append("others.jsonl", event("kept"))
    assert [e.text for e in folder.records("others.jsonl", Event)] == ["kept"]


def test_cancel_mark_is_visible_to_other_readers(folder):
    assert not folder.is_cancelled()
    folder.mark_cancelled()
    assert RunFolder(folder.path).is_cancelled()
    folder.mark_cancelled()


def test_write_on_full_disk_fails_with_hint_and_leaves_no_file(tmp_path, monkeypatch):
    disk = tmp_path / "tiny"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        monkeypatch.setenv("CLUSTERKIT_HOME", str(disk))
        folder = RunFolder.create("demo-1")
        with pytest.raises(RunFolderError, match=r"cannot write .*big: No space left on") as error:
            folder.write("big", b"x" * (64 << 10))
        assert "set CLUSTERKIT_HOME" in (error.value.hint or "")
        assert os.listdir(folder.path) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


FULL = {
    "blocks": ("none", "tmpfs", "size=64k"),
    "files": ("none", "tmpfs", "size=1m,nr_inodes=12"),
    "ext4": ("image", "ext4", "loop"),
}


@pytest.fixture(params=FULL)
def full_disk(request, tmp_path, monkeypatch):
    """A run's folder on a file system of its own, and what fills that."""
    device, kind, options = FULL[request.param]
    disk, image = tmp_path / "disk", tmp_path / "image"
    disk.mkdir()
    if device == "image":
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("no mkfs.ext4 here")
        image.write_bytes(b"")
        os.truncate(image, 4 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    device = str(image) if device == "image" else device
    mounted = subprocess.run(
        ["mount", "-t", kind, "-o", options, device, str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount {kind} here: {mounted.stderr.decode().strip()}")

    def fill():
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
            while request.param != "files":
                file.write(bytes(512))
        with contextlib.suppress(OSError):
            for number in range(10_000):
                (disk / f"filler-{number}").write_bytes(b"" if request.param == "files" else b"x")

    try:
        monkeypatch.setenv("CLUSTERKIT_HOME", str(disk))
        yield RunFolder.create("demo-1"), fill
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_begun_attempts_can_be_recorded_on_full_disk(full_disk):
    """Out of blocks or inodes, as over a quota of either: nothing is created, only renamed."""
    folder, fill = full_disk
    assert Begun.read(folder.path) is None
    Begun(1, whole=False).record(folder.path)
    folder.write("state.json", b"x")
    fill()
    for name in ("state.json", "new"):
        with pytest.raises(RunFolderError, match="No space left on device"):
            folder.write(name, b"x" * 4096)
    assert Begun.read(folder.path) == Begun(1, whole=False)
    Begun(1, whole=True).record(folder.path)
    assert Begun.read(folder.path) == Begun(1, whole=True)
    for attempt in (2, 3, 11, 1000):
        Begun(attempt, whole=False).record(folder.path)
        assert Begun.read(folder.path) == Begun(attempt, whole=False)
    assert [name for name in os.listdir(folder.path) if name.startswith("attempt-")] == [
        "attempt-1000.starting"
    ]


def test_cancel_can_be_marked_on_full_disk(full_disk):
    """The supervisor did not hear of it, and started again what `cancel` had ended."""
    folder, fill = full_disk
    folder.write(RESERVE, bytes(8192))
    fill()
    folder.mark_cancelled()
    folder.mark_cancelled()
    assert folder.is_cancelled()


def test_begun_and_cancel_on_read_only_file_system_raise_error(folder, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    Begun(1, whole=False).record(folder.path)
    monkeypatch.setattr(Path, "rename", refuse)
    monkeypatch.setattr(Path, "touch", refuse)
    words = "attempt 2 cannot be recorded in .*demo-1: Read-only file system"
    with pytest.raises(RunFolderError, match=words) as error:
        Begun(2, whole=False).record(folder.path)
    assert "twice" in error.value.hint
    with pytest.raises(RunFolderError, match=r"cannot write .*cancelled: "):
        folder.mark_cancelled()


@pytest.mark.parametrize("state", [None, State.RUNNING, State.SUCCEEDED])
def test_saved_status_of_unfinished_run_advances_to_begun_attempt(folder, state):
    submission = Submission(
        run=folder.run_id, job="j", cluster="c", backend="local", created_at=1.0, clusterkit="0"
    )
    folder.write_json("run.json", submission)
    assert folder.saved_status() is None
    if state is not None:
        before = submission.initial_status(restarts_left=3)
        folder.write_json("state.json", replace(before, state=state, running_since=5.0))
        assert folder.saved_status().attempt == 1
    Begun(2, whole=False).record(folder.path)
    found = folder.saved_status()
    assert found.attempt == (1 if state is State.SUCCEEDED else 2)
    assert found.running_since == (5.0 if state is State.SUCCEEDED else None)
    assert found.restarts_left == (None if state is None else 3)


# ---------------------------------------------------------------- finding


@pytest.fixture
def three():
    now = time.time()
    for number, name in enumerate(["ddp-1", "ddp-2", "zero3-1"]):
        folder = RunFolder.create(name)
        folder.write("run.json", b"{}")
        os.utime(folder.file("run.json"), (now + number, now + number))


def test_runs_are_listed_newest_first(three):
    assert [run.run_id for run in all_runs()] == ["zero3-1", "ddp-2", "ddp-1"]


def test_without_home_folder_no_runs_are_listed():
    assert list(all_runs()) == []


def test_files_in_runs_folder_are_ignored(three, clusterkit_home):
    (clusterkit_home / "runs" / "notes.txt").write_text("")
    assert len(list(all_runs())) == 3


def test_plan_folder_among_runs_is_not_listed_as_run(three, clusterkit_home):
    for name in ("a-plan/plan.txt", "a-plan/job-1", "damaged/plan.txt", "damaged/job.json"):
        path = clusterkit_home / "runs" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    assert {run.run_id for run in all_runs()} == {"ddp-1", "ddp-2", "zero3-1", "damaged"}


@pytest.mark.parametrize(
    ("name", "run_id"), [("ddp-2", "ddp-2"), ("z", "zero3-1"), ("last", "zero3-1")]
)
def test_run_is_found_by_id_prefix_or_last(three, name, run_id):
    assert find_run(name).run_id == run_id


def test_exact_run_id_wins_over_longer_ids_with_same_prefix(three):
    RunFolder.create("ddp")
    assert find_run("ddp").run_id == "ddp"


def test_ambiguous_run_id_is_refused_with_candidates(three):
    with pytest.raises(RunNotFound, match="run 'dd' is ambiguous: ddp-2, ddp-1") as error:
        find_run("dd")
    assert error.value.hint == "give more of its id"
    assert error.value.exit_code == 125


def test_ambiguous_run_id_lists_five_candidates_and_counts_others():
    for number in range(9):
        RunFolder.create(f"a-{number}")
    with pytest.raises(RunNotFound, match=r"ambiguous: (a-\d, ){4}a-\d and 4 more"):
        find_run("a")


def test_unknown_run_id_is_refused_with_newest_runs_in_hint(three, clusterkit_home):
    with pytest.raises(
        RunNotFound, match=f"run 'nope' is unknown under {clusterkit_home}"
    ) as error:
        find_run("nope")
    assert error.value.hint == "the newest runs: zero3-1, ddp-2, ddp-1"


def test_unknown_full_run_id_is_refused_with_attach_hint(three):
    with pytest.raises(RunNotFound, match="run 'ddp-1122110042-umuv' is unknown") as error:
        find_run("ddp-1122110042-umuv")
    assert "clusterkit attach ddp-1122110042-umuv --cluster CLUSTER" in (error.value.hint or "")


@pytest.mark.parametrize("name", ["", "last", "..", "../..", "/etc", "a/../..", "\0", "."])
def test_run_name_cannot_lead_out_of_home(name, clusterkit_home):
    (clusterkit_home / "runs").mkdir(parents=True)
    with pytest.raises(RunNotFound, match="is unknown") as error:
        find_run(name)
    assert error.value.hint == "there are no runs"


def test_interrupt_during_create_leaves_no_folder(clusterkit_home, monkeypatch):
    mkdir = Path.mkdir

    def interrupted(path, *args, **options):
        mkdir(path, *args, **options)
        if path.name == "r":
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt):
        RunFolder.create("r")
    assert list((clusterkit_home / "runs").iterdir()) == []


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_run_mode_applies_under_any_umask(tmp_path, monkeypatch, umask):
    monkeypatch.setenv("CLUSTERKIT_RUN_MODE", "750")
    (tmp_path / "home").mkdir(mode=0o755)
    before = os.umask(umask)
    try:
        made = RunFolder.create("demo", tmp_path / "home")
        made.write("job.yaml", "x")
    finally:
        os.umask(before)
    assert made.path.stat().st_mode & 0o777 == 0o750
    assert (made.path / "job.yaml").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("place", [".", "runs"])
def test_world_writable_home_is_refused(tmp_path, place):
    (tmp_path / "runs").mkdir()
    (tmp_path / place).chmod(0o777)
    with pytest.raises(RunFolderError, match="can be written by everybody") as caught:
        RunFolder.create("demo", tmp_path)
    assert caught.value.hint.startswith(f"chmod go-w {tmp_path / place}")
    (tmp_path / place).chmod(0o755)
    RunFolder.create("demo", tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder to a group, as root alone can")
def test_group_writable_home_is_refused(tmp_path):
    tmp_path.chmod(0o770)
    os.chown(tmp_path, -1, 12345)
    with pytest.raises(RunFolderError, match="can be written by group 12345"):
        RunFolder.create("demo", tmp_path)
