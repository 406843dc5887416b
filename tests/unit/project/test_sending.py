"""Sending a project: interrupted, and by two at once."""

import errno
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from clusterkit.errors import SubmitFailed
from clusterkit.plan import Tree
from clusterkit.sync import receiver, snapshot, upload
from clusterkit.sync.snapshot import take
from clusterkit.sync.upload import Upload
from clusterkit.transport import LocalTransport
from tests.unit.project.projects import (
    BAD_NAME,
    LOCAL,
    contents,
    deliver,
    expected,
    leftovers,
    paths,
    tree_of,
    write,
)


def uploading(found):
    return Upload(found, Tree(str(found.root), "/nowhere", found.digest, ""))


# ---------------------------------------------------------------- sending


def test_upload_delivers_files_modes_and_links_unchanged(checkout, tmp_path):
    dice = random.Random(7)
    write(checkout / "run.sh", "#!/bin/sh\n", 0o755)
    write(checkout / "empty")
    write(checkout / "random", dice.randbytes(100_000))
    write(checkout / "text", b"all the same\n" * 50_000)
    for name in ("-x", "a\nb", BAD_NAME, "日" * 85, "x" * 255):
        write(checkout / "odd" / name, name.encode(errors="surrogateescape"))
    (checkout / "link").symlink_to("train.py")
    (checkout / "dangling").symlink_to("/nowhere/at all")
    (checkout / "folder-link").symlink_to("lib")
    found = take(checkout)
    number, path = deliver(tmp_path, found)
    assert number == len([entry for entry in found.entries if entry.target is None])
    assert contents(path) == expected(found)
    assert leftovers(tmp_path) == []
    assert os.readlink(path.parent / "current") == path.name


@pytest.mark.parametrize("locale", ["C", "POSIX", "de_DE.ISO-8859-1"])
def test_upload_keeps_file_names_under_any_host_locale(checkout, tmp_path, monkeypatch, locale):
    write(checkout / "naïve 日本", "x")
    write(checkout / BAD_NAME, "x")
    found = take(checkout)
    monkeypatch.setenv("LC_ALL", locale)
    monkeypatch.setenv("PYTHONCOERCECLOCALE", "0")
    _, path = deliver(tmp_path, found)
    assert contents(path) == expected(found)


def test_upload_to_path_with_shell_characters_works(checkout, weird_tmp_path):
    found = take(checkout)
    _, path = deliver(weird_tmp_path, found)
    assert contents(path) == expected(found)


def test_upload_of_empty_project_creates_folder(tmp_path):
    (tmp_path / "nothing").mkdir()
    found = take(tmp_path / "nothing")
    number, path = deliver(tmp_path, found)
    assert number == 0
    assert path.is_dir()
    assert snapshot.summary(found.facts()) == "0 files, 0.0 MB"


def test_second_upload_of_same_snapshot_sends_nothing(checkout, tmp_path):
    found = take(checkout)
    deliver(tmp_path, found)
    assert deliver(tmp_path, take(checkout))[0] == 0


def test_upload_sends_changed_files_and_hard_links_others(checkout, tmp_path):
    for number in range(20):
        write(checkout / f"f{number}", f"{number}")
    first = take(checkout)
    _, old = deliver(tmp_path, first)
    write(checkout / "f7", "changed")
    write(checkout / "renamed", (checkout / "f8").read_bytes())
    (checkout / "f8").unlink()
    (checkout / "f9").chmod(0o755)
    second = take(checkout)
    number, new = deliver(tmp_path, second)
    assert number == 2  # f9's mode has changed: a link would change it for the old tree too
    assert contents(new) == expected(second)
    assert {k: v for k, v in contents(old).items() if k in ("f7", "f8", "f9")} == {
        "f7": (0o644, b"7"),
        "f8": (0o644, b"8"),
        "f9": (0o644, b"9"),
    }
    assert set(contents(old)) == set(paths(first))
    assert (new / "f1").stat().st_ino == (old / "f1").stat().st_ino
    assert (new / "renamed").stat().st_ino == (old / "f8").stat().st_ino


def test_host_without_hard_links_reports_all_files_missing(checkout, tmp_path, monkeypatch):
    deliver(tmp_path, take(checkout))
    write(checkout / "more", "x")
    found = take(checkout)
    entries = json.loads(found.listing)
    tree = Path(tree_of(tmp_path, found).path)

    def refuse(*_):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "into").mkdir()
    record, missing = receiver._link_known(
        entries, tmp_path / "into", receiver._known(tree, entries)
    )
    assert (record, missing) == ({}, list(range(len(entries))))


@pytest.mark.parametrize("size", [0, 1, 1000, 1001, 5000, 10_007])
@pytest.mark.parametrize("compresses", [True, False])
def test_file_is_sent_in_pieces_compressed_where_smaller(
    folder, tmp_path, monkeypatch, size, compresses
):
    monkeypatch.setattr(receiver, "PIECE_BYTES", 1000)
    data = b"z" * size if compresses else random.Random(1).randbytes(size)
    write(folder / "big", data)
    found = take(folder)
    pieces = list(uploading(found).pieces([0]))
    assert len(pieces) == max(1, -(-size // 1000))
    assert sum(length for length, _ in pieces) == size
    assert (sum(len(piece) for _, piece in pieces) < size / 2) == (compresses and size >= 1000)
    _, path = deliver(tmp_path, found)
    assert (path / "big").read_bytes() == data


@pytest.mark.parametrize(("limit", "times"), [(1000, 1), (250, 3)])
def test_upload_to_several_hosts_reads_files_once_within_cache_limit(
    folder, monkeypatch, limit, times
):
    for number in range(6):
        write(folder / f"f{number}", bytes([number]) * 100)
    monkeypatch.setattr(upload, "CACHED_BYTES", limit)
    found = take(folder)
    reads = []
    real = Path.open
    monkeypatch.setattr(
        Path, "open", lambda self, *a, **k: (reads.append(self.name), real(self, *a, **k))[1]
    )
    everything = range(len(found.entries))
    sent = uploading(found)
    whole = [list(sent.pieces(everything)) for _ in range(3)]
    assert whole[0] == whole[1] == whole[2]
    assert Counter(reads) == dict.fromkeys([entry.path for entry in found.entries], times)


def test_piece_cache_is_correct_for_hosts_missing_different_files(folder):
    for number in range(50):
        write(folder / f"f{number:02}", os.urandom(number * 7))
    sent, fresh = uploading(take(folder)), uploading(take(folder))
    results = {}

    def ask(seed):
        missing = sorted(random.Random(seed).sample(range(50), 25))
        results[seed] = (missing, list(sent.pieces(missing)))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    for missing, pieces in results.values():
        assert pieces == [piece for number in missing for piece in fresh.pieces([number])]


def test_upload_progress_runs_from_zero_to_total_size(checkout, tmp_path):
    told = []
    found = take(checkout)
    deliver(tmp_path, found, progress=lambda *about: told.append(about))
    assert told[0] == ("h0", 0, found.size)
    assert told[-1] == ("h0", found.size, found.size)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


# ---------------------------------------------------------------- while it is sent


@pytest.mark.parametrize("change", ["other", "longer and longer", ""])
def test_file_changed_during_upload_fails_upload_without_tree(folder, tmp_path, change):
    write(folder / "train.py", "first")
    found = take(folder)
    write(folder / "train.py", change)
    with pytest.raises(SubmitFailed, match=r"host h0: .* train\.py changed while it was copied"):
        deliver(tmp_path, found)
    assert contents(tmp_path / "host") == {"projects/p/.lock": (0o600, b"")}


def test_file_that_grows_during_upload_is_sent_as_snapshotted(folder, tmp_path):
    write(folder / "train.py", "first")
    found = take(folder)
    write(folder / "train.py", "first, and more")
    _, path = deliver(tmp_path, found)
    assert (path / "train.py").read_bytes() == b"first"


def test_file_removed_during_upload_fails_upload_without_tree(folder, tmp_path):
    found = take(folder)
    (folder / "train.py").unlink()
    with pytest.raises(SubmitFailed, match=r"train\.py: no such file or directory while") as error:
        deliver(tmp_path, found)
    assert error.value.hint == "submit again"
    assert not tree_exists(tmp_path, found)
    write(folder / "train.py", "print('trained')\n")
    _, path = deliver(tmp_path, found)
    assert contents(path) == expected(found)
    assert leftovers(tmp_path) == []


def tree_exists(tmp_path, found):
    return Path(tree_of(tmp_path, found).path).exists()


class Interrupted(LocalTransport):
    """Kills the receiver with -9 once it has been sent so many pieces."""

    def __init__(self, after):
        self.after = after

    def open(self, host, argv, *, env=None):
        stream = super().open(host, argv, env=env)
        real, count = stream.write, [self.after]

        def write(data):
            if not count[0]:
                os.kill(stream._process.pid, signal.SIGKILL)
                stream._process.wait()
            count[0] -= 1
            real(data)

        stream.write = write
        return stream


@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_killed_receiver_leaves_no_tree_and_next_upload_cleans_up(
    folder, tmp_path, after, monkeypatch
):
    monkeypatch.setattr(upload, "BATCH_BYTES", 1)
    for number in range(6):
        write(folder / f"f{number}", f"{number}")
    found = take(folder)
    tree = tree_of(tmp_path, found)
    with pytest.raises(SubmitFailed, match="host h0: copying the project was interrupted"):
        Upload(found, tree).send("h0", sys.executable, Interrupted(after))
    assert not Path(tree.path).exists()
    _, path = deliver(tmp_path, found)
    assert contents(path) == expected(found)
    assert leftovers(tmp_path) == []


def test_upload_after_receiver_killed_during_repair_completes_repair(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(upload, "BATCH_BYTES", 1)
    for number in range(6):
        write(folder / f"f{number}", f"{number}")
    found = take(folder)
    _, path = deliver(tmp_path, found)
    for number in range(6):
        write(path / f"f{number}", "spoilt by a program")
    with pytest.raises(SubmitFailed, match="was interrupted"):
        Upload(found, tree_of(tmp_path, found)).send("h0", sys.executable, Interrupted(3))
    assert deliver(tmp_path, found)[0] >= 3
    assert contents(path) == expected(found)
    assert leftovers(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 256 KiB where the host's folder is."""
    place = tmp_path / "host"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(place)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("size", [1 << 20, 250 << 10])
def test_full_disk_on_host_fails_upload_and_leaves_no_files(folder, tmp_path, small_disk, size):
    for number in range(20):
        write(folder / f"f{number:02}", os.urandom(1 << 10))
    write(folder / "g", os.urandom(size))
    found = take(folder)
    with pytest.raises(SubmitFailed, match=r"host h0: .* No space left on device") as error:
        deliver(tmp_path, found)
    assert "make room there" in (error.value.hint or "")
    assert contents(small_disk) == {"projects/p/.lock": (0o600, b"")}
    (folder / "g").unlink()
    found = take(folder)
    _, path = deliver(tmp_path, found)
    assert contents(path) == expected(found)


def test_file_above_size_limit_of_host_fails_upload(folder, tmp_path):
    write(folder / "big", os.urandom(1 << 20))
    found = take(folder)
    tree = tree_of(tmp_path, found)
    limited = tmp_path / "python"
    limited.write_text(f'#!/bin/sh\nulimit -f 100\ntrap "" XFSZ\nexec {sys.executable} "$@"\n')
    limited.chmod(0o755)
    with pytest.raises(SubmitFailed, match=r"host h0: .* File too large"):
        Upload(found, tree).send("h0", str(limited), LOCAL)
    assert not Path(tree.path).exists()
    assert leftovers(tmp_path) == []


def test_unwritable_destination_fails_upload_with_workdir_hint(folder, tmp_path):
    write(tmp_path / "host", "a file")
    with pytest.raises(SubmitFailed, match=r"host h0: .*: Not a directory: ") as error:
        deliver(tmp_path, take(folder))
    assert "workdir" in (error.value.hint or "")


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("exit 3", "copying the project was interrupted: "),
        ("echo no such module >&2; exit 1", "was interrupted: no such module"),
        ("echo '{not json'", "was interrupted: b'{not json'"),
        ("cat >/dev/null", "copying the project was interrupted: "),
    ],
)
def test_receiver_that_cannot_run_fails_upload_with_its_output(folder, tmp_path, python, said):
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\n{python}\n")
    fake.chmod(0o755)
    found = take(folder)
    if python.startswith("cat"):  # it would wait for more
        fake.write_text("#!/bin/sh\nhead -c 100 >/dev/null\n")
    with pytest.raises(SubmitFailed) as error:
        Upload(found, tree_of(tmp_path, found)).send("h0", str(fake), LOCAL)
    assert error.value.message.startswith("host h0: ")
    assert said in error.value.message


def test_silent_receiver_fails_upload(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(upload, "QUIET_SECONDS", 0.1)
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nexec sleep 60\n")
    fake.chmod(0o755)
    found = take(folder)
    with pytest.raises(SubmitFailed, match="h0 no longer answers"):
        Upload(found, tree_of(tmp_path, found)).send("h0", str(fake), LOCAL)


def test_receiver_answers_malformed_input_with_error_and_keeps_nothing(tmp_path):
    def converse(path, entries, data):
        listing = receiver.zlib.compress(json.dumps(entries).encode())
        request = json.dumps({"path": str(path)}).encode() + b"\n"
        done = subprocess.run(
            [sys.executable, "-I", receiver.__file__], capture_output=True,
            input=request + receiver.COUNT.pack(len(listing)) + listing + data,
        )  # fmt: skip
        assert done.stderr == b""
        return json.loads(done.stdout.splitlines()[-1])

    path = tmp_path / "p" / "tree"
    one = [["f", 0o644, 3, receiver.digest_of(b"abc"), None]]
    head = receiver.HEADER.pack
    assert "the sender disconnected" in converse(path, one, b"")["error"]
    assert "the sender disconnected" in converse(path, one, head(0, 0, 3) + b"ab")["error"]
    assert "file 7 came where 0 was due" in converse(path, one, head(7, 0, 3) + b"abc")["error"]
    assert "f changed" in converse(path, one, head(0, 0, 3) + b"abd")["error"]
    assert "incorrect header check" in converse(path, one, head(0, 1, 3) + b"abc")["error"]
    assert sorted(os.listdir(path.parent)) == [".lock"]
    assert converse(path, one, head(0, 2, 1) + b"a" + head(0, 0, 2) + b"bc") == {"done": 1}
    assert (path / "f").read_bytes() == b"abc"


# ---------------------------------------------------------------- two at once


def test_concurrent_uploads_of_same_tree_send_files_once(folder, tmp_path):
    for number in range(200):
        write(folder / f"d{number % 7}" / f"f{number}", os.urandom(100))
    found = take(folder)
    tree = tree_of(tmp_path, found)
    sent, errors = [], []

    def work():
        try:
            sent.append(Upload(found, tree).send("h0", sys.executable, LOCAL))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(sent) == [0, 0, 0, 201]
    assert contents(Path(tree.path)) == expected(found)


@pytest.mark.parametrize("answer", ["return", "raise OSError(37, 'No locks available')"])
def test_hosts_without_working_locks_fill_shared_folder_correctly(folder, tmp_path, answer):
    """As on NFS without locks, or with locks that count on one host alone."""
    for number in range(200):
        write(folder / f"d{number % 7}" / f"f{number}", os.urandom(100))
    found = take(folder)
    for round in ("new", "damaged"):
        with pytest.MonkeyPatch.context() as patch:
            script = Path(receiver.__file__).read_text()
            unlocked = f"import fcntl\ndef _flock(*_): {answer}\nfcntl.flock = _flock\n"
            changed = write(tmp_path / "receiver.py", script.replace("import fcntl\n", unlocked))
            patch.setattr(receiver, "__file__", str(changed))
            tree = tree_of(tmp_path, found)
            with ThreadPoolExecutor(6) as pool:
                sends = [
                    pool.submit(Upload(found, tree).send, f"h{host}", sys.executable, LOCAL)
                    for host in range(6)
                ]
                assert [send.exception() for send in sends] == [None] * 6, round
        assert contents(Path(tree.path)) == expected(found)
        assert leftovers(tmp_path) == []
        deliver(tmp_path, found)
        assert deliver(tmp_path, found)[0] == 0
        write(Path(tree.path) / "d0" / "f0", "changed by a program")


def test_drafts_of_other_host_are_removed_only_once_old(folder, tmp_path):
    found = take(folder)
    _, tree = deliver(tmp_path, found)
    write(tree.parent / ".draft-other.1.abc.tree" / "f", "half")
    deliver(tmp_path, found)
    assert leftovers(tmp_path) == [".draft-other.1.abc.tree"]
    os.utime(tree.parent / ".draft-other.1.abc.tree", (0, 0))
    deliver(tmp_path, found)
    assert leftovers(tmp_path) == []


def test_receiver_waiting_for_lock_reports_waiting_repeatedly(tmp_path):
    text = Path(receiver.__file__).read_text()
    assert "\nWAITING_SECONDS = 10.0\n" in text
    quick = write(tmp_path / "quick.py", text.replace("SECONDS = 10.0", "SECONDS = 0.1"))
    (tmp_path / "p").mkdir()
    with (tmp_path / "p" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with LOCAL.open("h0", [sys.executable, "-I", str(quick)]) as stream:
            request = json.dumps({"path": str(tmp_path / "p" / "tree")}).encode() + b"\n"
            listing = receiver.zlib.compress(b"[]")
            stream.write(request + receiver.COUNT.pack(len(listing)) + listing)
            waited = [json.loads(stream.read(60))["waiting"] for _ in range(3)]
            assert waited == sorted(waited)
            assert not (tmp_path / "p" / "tree").exists()
            fcntl.flock(lock, fcntl.LOCK_UN)
            answers = upload._answers(stream, "h0")
            assert next(answers) == {"missing": []}
            assert next(answers) == {"done": 0}


def test_upload_waits_for_receiver_that_reports_waiting(folder, tmp_path):
    said = ['{"waiting": 10.0}'] * 3 + ['{"missing": []}', '{"waiting": 1}', '{"done": 0}']
    script = "#!/bin/sh\nprintf '%s\\n' " + " ".join(f"'{line}'" for line in said)
    fake = write(tmp_path / "python", f"{script}\ncat >/dev/null\n", 0o755)
    found = take(folder)
    assert Upload(found, tree_of(tmp_path, found)).send("h0", str(fake), LOCAL) == 0
