"""A project on its way to hosts: which files count, and that they arrive whole or not at all.

The receiver is the real one, a process of its own, spoken with through `LocalTransport`.
"""

import errno
import fcntl
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from clusterkit.errors import BadInput, RunFolderError, SubmitFailed
from clusterkit.plan import Tree
from clusterkit.sync import receiver, snapshot, upload
from clusterkit.sync.snapshot import own_package, take
from clusterkit.sync.upload import Upload
from clusterkit.transport import LocalTransport

LOCAL = LocalTransport()
BAD_NAME = os.fsdecode(b"latin-\xe9")


def git(folder, *words):
    done = subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "protocol.file.allow=always",
         "-c", "init.defaultBranch=main", "-c", "commit.gpgsign=false", *words],
        cwd=folder, capture_output=True, text=True,
        env={**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def write(path, data=b"", mode=0o644):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    path.chmod(mode)
    return path


@pytest.fixture
def checkout(tmp_path):
    """A git checkout with one commit."""
    root = tmp_path / "my project"
    root.mkdir()
    git(root, "init", "-q")
    write(root / "train.py", "print('trained')\n")
    write(root / "lib" / "a.py", "a = 1\n")
    write(root / ".gitignore", "*.log\n/data/\n")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    return root


@pytest.fixture
def folder(tmp_path):
    """A folder that is in no checkout."""
    root = tmp_path / "plain"
    write(root / "train.py", "print('trained')\n")
    return root


def paths(found):
    return [entry.path for entry in found.entries]


def tree_of(tmp_path, found, name=None):
    path = tmp_path / "host" / "projects" / "p" / (name or found.digest[:16])
    return Tree(str(found.root), str(path), found.digest, "")


def uploading(found):
    return Upload(found, Tree(str(found.root), "/nowhere", found.digest, ""))


def deliver(tmp_path, found, name=None, **more):
    """Send a snapshot to this machine; gives the number of files sent, and the folder."""
    tree = tree_of(tmp_path, found, name)
    return Upload(found, tree).send("h0", sys.executable, LOCAL, **more), Path(tree.path)


def contents(root):
    """Every file and link below a folder, with what tells them apart."""
    found = {}
    for folder, below, files in os.walk(root):
        for name in [*files, *below]:
            path = Path(folder, name)
            if path.is_symlink():
                found[str(path.relative_to(root))] = ("->", os.readlink(path))
            elif path.is_file():
                mode = stat.S_IMODE(path.stat().st_mode)
                found[str(path.relative_to(root))] = (mode, path.read_bytes())
    return found


def expected(found):
    wanted = {}
    for entry in found.entries:
        if entry.target is not None:
            wanted[entry.path] = ("->", entry.target)
        else:
            wanted[entry.path] = (entry.mode, (found.root / entry.path).read_bytes())
    return wanted


def leftovers(tmp_path):
    """What lies beside the trees that is no tree, no record and no `current`."""
    return [path.name for path in (tmp_path / "host/projects/p").glob(".*") if path.name != ".lock"]


# ---------------------------------------------------------------- which files count


def test_snapshot_of_checkout_takes_tracked_and_new_files_not_ignored(checkout):
    write(checkout / "train.py", "print('changed')\n")
    write(checkout / "new.py", "new = 1\n")
    write(checkout / "noise.log", "x")
    write(checkout / "data" / "huge.bin", "x")
    (checkout / "lib" / "a.py").unlink()
    found = take(checkout, "train.py")
    assert paths(found) == [".gitignore", "new.py", "train.py"]
    assert found.root == checkout
    assert found.how == "tracked or new, not ignored"


def test_snapshot_from_subfolder_takes_whole_checkout(checkout):
    found = take(checkout / "lib", "a.py")
    assert found.root == checkout
    assert paths(found) == [".gitignore", "lib/a.py", "train.py"]
    assert take(checkout / "lib", "../train.py").digest == found.digest


def test_digest_changes_with_path_mode_content_and_link_target(checkout):
    first = take(checkout)
    assert take(checkout).digest == first.digest
    seen = {first.digest}

    def differs():
        digest = take(checkout).digest
        assert digest not in seen
        seen.add(digest)

    (checkout / "train.py").chmod(0o755)
    differs()
    write(checkout / "train.py", "other")
    differs()
    (checkout / "lib" / "a.py").rename(checkout / "lib" / "b.py")
    differs()
    (checkout / "link").symlink_to("train.py")
    differs()
    (checkout / "link").unlink()
    (checkout / "link").symlink_to("lib")
    differs()


def test_digest_ignores_group_and_other_permissions(checkout):
    before = take(checkout).digest
    (checkout / "train.py").chmod(0o600)
    assert take(checkout).digest == before


def test_snapshot_takes_files_with_unusual_names(checkout):
    names = [
        "-rf",
        "--help",
        "a\nb",
        "tab\t",
        "sp ace",
        'q"',
        "it's",
        "$HOME",
        "naïve 日本",
        "*",
        "\\",
    ]
    names += [BAD_NAME, "x" * 255, "日" * 85, "~", ".hidden", "trailing ", "a;b", ":(top)x", "..."]
    for number, name in enumerate(names):
        write(checkout / name, f"{number}")
    assert set(paths(take(checkout))) == {*names, ".gitignore", "train.py", "lib/a.py"}


def test_snapshot_takes_submodule_files_and_skips_empty_submodule(checkout, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    write(other / "s.py", "s = 1\n")
    write(other / ".gitignore", "*.tmp\n")
    git(other, "add", ".")
    git(other, "commit", "-qm", "first")
    git(checkout, "submodule", "--quiet", "add", str(other), "third/sub")
    git(checkout, "commit", "-qm", "with submodule")
    write(checkout / "third/sub/more.py", "more")
    write(checkout / "third/sub/junk.tmp", "junk")
    assert [path for path in paths(take(checkout)) if path.startswith("third")] == [
        "third/sub/.gitignore",
        "third/sub/more.py",
        "third/sub/s.py",
    ]
    bare = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(checkout), str(bare))
    assert (bare / "third/sub").is_dir()
    assert paths(take(bare)) == [".gitignore", ".gitmodules", "lib/a.py", "train.py"]


def test_nested_checkout_follows_its_own_gitignore(checkout):
    inner = checkout / "vendored"
    inner.mkdir()
    git(inner, "init", "-q")
    write(inner / "v.py", "v")
    write(inner / "v.tmp", "v")
    write(inner / "deep.log", "not ignored here")
    write(inner / ".gitignore", "*.tmp\n")
    (checkout / "empty").mkdir()
    git(checkout / "empty", "init", "-q")
    assert [path for path in paths(take(checkout)) if "/" in path] == [
        "lib/a.py",
        "vendored/.gitignore",
        "vendored/deep.log",
        "vendored/v.py",
    ]


def test_snapshot_of_git_worktree_takes_its_own_files(checkout, tmp_path):
    git(checkout, "worktree", "add", "-q", str(tmp_path / "tree"), "-b", "side")
    write(tmp_path / "tree" / "side.py", "side")
    found = take(tmp_path / "tree", "side.py")
    assert found.root == tmp_path / "tree"
    assert paths(found) == [".gitignore", "lib/a.py", "side.py", "train.py"]


def test_snapshot_lists_conflicted_file_once(checkout):
    git(checkout, "checkout", "-qb", "side")
    write(checkout / "train.py", "side\n")
    git(checkout, "commit", "-qam", "side")
    git(checkout, "checkout", "-q", "main")
    write(checkout / "train.py", "main\n")
    git(checkout, "commit", "-qam", "main")
    who = ["-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run(["git", *who, "merge", "side"], cwd=checkout, capture_output=True)
    assert git(checkout, "ls-files", "-u")
    assert paths(take(checkout)) == [".gitignore", "lib/a.py", "train.py"]


def test_snapshot_takes_folder_turned_file_and_file_turned_folder(checkout):
    shutil.rmtree(checkout / "lib")
    write(checkout / "lib", "now a file")
    (checkout / "train.py").unlink()
    write(checkout / "train.py" / "inner.py", "now a folder")
    assert paths(take(checkout)) == [".gitignore", "lib", "train.py/inner.py"]


def test_snapshot_keeps_symbolic_links_with_their_targets(checkout, tmp_path):
    for name, target in {
        "to-file": "train.py", "to-folder": "lib", "dangling": "nowhere",
        "absolute": str(tmp_path / "elsewhere"), "up": "../..", "self": "self",
    }.items():  # fmt: skip
        (checkout / name).symlink_to(target)
    found = {entry.path: entry.target for entry in take(checkout).entries if entry.target}
    assert found == {
        "to-file": "train.py", "to-folder": "lib", "dangling": "nowhere",
        "absolute": str(tmp_path / "elsewhere"), "up": "../..", "self": "self",
    }  # fmt: skip


def test_snapshot_skips_named_pipes(folder):
    os.mkfifo(folder / "pipe")
    (folder / "zero").symlink_to("/dev/zero")
    assert paths(take(folder)) == ["train.py", "zero"]


def test_snapshot_outside_git_takes_all_files_except_caches(folder):
    for name in ("data/x.bin", ".env", "a.log", "deep/er/y"):
        write(folder / name, "x")
    for name in (".git", ".venv", "venv", "__pycache__", "node_modules", "deep/.mypy_cache"):
        write(folder / name / "f", "x")
    write(folder / "b.pyc", "x")
    write(folder / "sub" / ".git", "gitdir: elsewhere")
    found = take(folder, "train.py")
    assert paths(found) == [".env", "a.log", "data/x.bin", "deep/er/y", "train.py"]
    assert (found.root, found.how) == (folder, "all but caches")


@pytest.mark.parametrize("in_git", [True, False])
@pytest.mark.parametrize("way", ["itself", "by a link"])
def test_snapshot_excludes_clusterkit_home(checkout, folder, tmp_path, monkeypatch, in_git, way):
    root = checkout if in_git else folder
    runs = root / ".clusterkit"
    monkeypatch.setenv("CLUSTERKIT_HOME", str(runs))
    before = take(root, "train.py")
    write(runs / "runs" / "r-1" / "run.json", "{}")
    write(root / ".clusterkit-notes", "stay\n")
    if way == "by a link":
        (tmp_path / "link").symlink_to(root)
        root = tmp_path / "link"
    found = take(root, "train.py")
    assert paths(found) == sorted([*paths(before), ".clusterkit-notes"])
    with pytest.raises(BadInput, match="lies in CLUSTERKIT_HOME"):
        take(root, ".clusterkit/runs/r-1/run.json")


@pytest.mark.parametrize("place", ["home", "/"])
def test_root_folder_or_clusterkit_home_is_refused_as_project(folder, monkeypatch, place):
    monkeypatch.setenv("CLUSTERKIT_HOME", str(folder))
    monkeypatch.setattr(snapshot, "_all_files", None)
    with pytest.raises(BadInput, match="it cannot be copied to the hosts"):
        take(folder if place == "home" else Path("/"))


def test_project_containing_home_folder_gives_remark(folder, monkeypatch):
    assert take(folder).facts().remark is None
    monkeypatch.setenv("HOME", str(folder))
    assert "keys and histories too (1 file, 0.0 MB)" in (take(folder).facts().remark or "")
    monkeypatch.setenv("HOME", str(folder / "below"))
    assert take(folder).facts().remark is not None
    monkeypatch.setenv("HOME", str(folder.parent))
    assert take(folder).facts().remark is None


def test_snapshot_without_git_on_path_takes_all_files(checkout, monkeypatch):
    write(checkout / "noise.log", "x")
    monkeypatch.setenv("PATH", "/nowhere")
    found = take(checkout, "train.py")
    assert paths(found) == [".gitignore", "lib/a.py", "noise.log", "train.py"]
    assert found.how == "all but caches"


def test_folder_ignored_by_checkout_is_project_of_its_own(checkout):
    write(checkout / "data" / "job" / "train.py", "x")
    write(checkout / "data" / "job" / "noise.log", "x")
    found = take(checkout / "data" / "job", "train.py")
    assert found.root == checkout / "data" / "job"
    assert paths(found) == ["noise.log", "train.py"]


def test_snapshot_ignores_git_environment_variables(checkout, tmp_path, monkeypatch):
    # As it is in a git hook of another project.
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git/index"))
    assert paths(take(checkout, "train.py")) == [".gitignore", "lib/a.py", "train.py"]


@pytest.mark.skipif(os.getuid() != 0, reason="needs a folder of another user's")
def test_checkout_owned_by_other_user_is_refused_with_git_hint(checkout, monkeypatch):
    write(checkout / "data" / "secret", "x")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    os.chown(checkout, 65534, 65534)
    os.chown(checkout / ".git", 65534, 65534)
    with pytest.raises(BadInput, match=r"git does not read .*dubious ownership") as error:
        take(checkout)
    assert error.value.hint == f"git config --global --add safe.directory {checkout}"


def test_checkout_reached_by_symbolic_link_has_same_digest(checkout, tmp_path):
    (tmp_path / "link").symlink_to(checkout)
    found = take(tmp_path / "link" / "lib", "a.py")
    assert found.root == tmp_path / "link"
    assert found.digest == take(checkout).digest


def test_symbolic_link_into_subfolder_of_checkout_is_refused(checkout, tmp_path):
    (tmp_path / "link").symlink_to(checkout / "lib")
    with pytest.raises(BadInput, match="is a symbolic link into the checkout") as error:
        take(tmp_path / "link", "a.py")
    assert error.value.hint == f"start from {checkout / 'lib'}"


# ---------------------------------------------------------------- what is refused


def test_program_ignored_by_git_is_refused(checkout):
    write(checkout / "data" / "train.py", "x")
    with pytest.raises(BadInput, match=r"program: data/train\.py is ignored by git") as error:
        take(checkout, "data/train.py")
    (command,) = [part for part in (error.value.hint or "").split(" says")[:1]]
    assert command == f"git -C {checkout} check-ignore -v data/train.py"


def test_program_in_cache_folder_is_refused(folder):
    write(folder / ".venv" / "train.py", "x")
    with pytest.raises(BadInput, match="lies in a folder that is not copied") as error:
        take(folder, ".venv/train.py")
    assert ".venv" in (error.value.hint or "")


@pytest.mark.parametrize("program", ["../other.py", "/usr/bin/env"])
def test_program_outside_project_is_refused(checkout, program):
    write(checkout.parent / "other.py", "x")
    with pytest.raises(BadInput, match="lies outside of") as error:
        take(checkout, program)
    assert "sync: false" in (error.value.hint or "")


def test_program_given_by_absolute_path_is_accepted(checkout):
    assert take(checkout, str(checkout / "train.py")).digest == take(checkout).digest


def test_program_name_beginning_with_two_dots_is_accepted(checkout):
    write(checkout / "..train.py", "x")
    assert "..train.py" in paths(take(checkout, "..train.py"))


def test_program_reached_by_link_within_project_is_accepted(checkout):
    (checkout / "link").symlink_to("lib")
    assert "link" in paths(take(checkout, "link/a.py"))


def test_program_reached_by_link_out_of_project_is_refused(checkout, tmp_path):
    write(tmp_path / "elsewhere" / "a.py", "x")
    (checkout / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInput, match=r"program: link/a\.py"):
        take(checkout, "link/a.py")


def test_oversized_project_is_refused_naming_largest_file(checkout):
    with (checkout / "model.bin").open("wb") as file:
        file.truncate(3 << 40)  # three TiB: reading them would not end
    with pytest.raises(BadInput, match="is 3145728 MiB: too much to copy") as error:
        take(checkout)
    assert "model.bin, 3145728 MiB" in error.value.message
    assert ".gitignore" in (error.value.hint or "")


def test_ignored_data_does_not_count_towards_size(checkout):
    (checkout / "data").mkdir()
    with (checkout / "data" / "model.bin").open("wb") as file:
        file.truncate(3 << 40)
    assert take(checkout).size < 1000


def test_unreadable_file_is_reported_by_name(checkout, monkeypatch):
    def refuse(path, *args, **kwargs):
        if Path(path).name == "a.py":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open(path, *args, **kwargs)

    monkeypatch.setattr(snapshot, "open", refuse, raising=False)
    with pytest.raises(RunFolderError, match=r"lib/a\.py: permission denied") as error:
        take(checkout)
    assert "ignore it, or fix it" in (error.value.hint or "")


def test_unreadable_folder_is_reported_by_name(folder, monkeypatch):
    write(folder / "locked" / "f", "x")
    real = os.scandir

    def refuse(path):
        if str(path).endswith("locked"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(RunFolderError, match="locked: permission denied"):
        take(folder)


def test_checkout_with_damaged_index_is_refused(checkout):
    (checkout / ".git" / "index").write_bytes(b"no index")
    with pytest.raises(BadInput, match="git ls-files fails in") as error:
        take(checkout)
    assert "git status" in (error.value.hint or "")


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


# ---------------------------------------------------------------- repair


def spoil_content(path):
    write(path / "lib" / "a.py", "import os; os.abort()\n")


def spoil_same_size(path):
    before = (path / "lib" / "a.py").stat()
    data = (path / "lib" / "a.py").read_bytes()
    write(path / "lib" / "a.py", data[::-1])
    os.utime(path / "lib" / "a.py", ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def spoil_mode(path):
    (path / "lib" / "a.py").chmod(0o600)


def spoil_gone(path):
    (path / "lib" / "a.py").unlink()


def spoil_folder_gone(path):
    shutil.rmtree(path / "lib")


def spoil_file_is_folder(path):
    (path / "lib" / "a.py").unlink()
    write(path / "lib" / "a.py" / "x" / "y", "z")


def spoil_folder_is_file(path):
    shutil.rmtree(path / "lib")
    write(path / "lib", "file")


def spoil_folder_is_link(path):
    (path / "lib").rename(path.parent.parent / "moved")
    (path / "lib").symlink_to(path.parent.parent / "moved")


def spoil_file_is_link(path):
    (path / "lib" / "a.py").unlink()
    (path / "lib" / "a.py").symlink_to("/etc/passwd")


def spoil_link(path):
    (path / "link").unlink()
    (path / "link").symlink_to("elsewhere")


def spoil_link_is_folder(path):
    (path / "link").unlink()
    write(path / "link" / "x", "y")


def spoil_record(path):
    path.with_name(f"{path.name}.json").write_text('[{"torn')


def spoil_record_kind(path):
    path.with_name(f"{path.name}.json").write_text("[1, 2]")


def spoil_record_entries(path):
    path.with_name(f"{path.name}.json").write_text('{"lib/a.py": 5}')


def spoil_record_gone(path):
    path.with_name(f"{path.name}.json").unlink()


SPOILT = {name.removeprefix("spoil_"): f for name, f in globals().items() if "spoil_" in name}


@pytest.mark.parametrize("how", sorted(SPOILT))
def test_tree_changed_by_program_is_repaired(checkout, tmp_path, how):
    (checkout / "link").symlink_to("lib")
    found = take(checkout)
    _, path = deliver(tmp_path, found)
    write(path / "output" / "made by the program", "stays")
    SPOILT[how](path)
    deliver(tmp_path, found)
    there = contents(path)
    assert there.pop("output/made by the program") == (0o644, b"stays")
    assert there == expected(found)
    assert not (path / "lib").is_symlink()
    assert deliver(tmp_path, found)[0] == 0
    assert leftovers(tmp_path) == []


def test_file_changed_in_old_tree_is_not_linked_into_new_tree(checkout, tmp_path):
    _, old = deliver(tmp_path, take(checkout))
    spoil_content(old)
    write(checkout / "more.py", "more")
    found = take(checkout)
    number, path = deliver(tmp_path, found)
    assert number == 2
    assert contents(path) == expected(found)


def test_file_changed_during_repair_is_repaired_by_next_upload(checkout, tmp_path, monkeypatch):
    found = take(checkout)
    _, path = deliver(tmp_path, found)
    spoil_gone(path)
    real = Upload.pieces

    def meanwhile(self, missing, **how):
        # The host has looked at its files by now.
        write(path / "train.py", "a program is at work")
        yield from real(self, missing, **how)

    monkeypatch.setattr(Upload, "pieces", meanwhile)
    deliver(tmp_path, found)
    monkeypatch.undo()
    assert deliver(tmp_path, found)[0] == 1
    assert contents(path) == expected(found)


def test_project_files_named_like_drafts_are_delivered(folder, tmp_path):
    for name in (".train.py.new", ".draft-file", "sub/.draft-tree/f", ".lock", "current"):
        write(folder / name, name)
    found = take(folder)
    _, old = deliver(tmp_path, found)
    write(folder / "train.py", "changed")
    second = take(folder)
    _, new = deliver(tmp_path, second)
    assert contents(new) == expected(second)
    assert (old / ".train.py.new").read_bytes() == b".train.py.new"
    assert deliver(tmp_path, second)[0] == 0


def test_file_or_link_in_place_of_tree_is_replaced(checkout, tmp_path):
    found = take(checkout)
    tree = Path(tree_of(tmp_path, found).path)
    for make in (lambda: write(tree, "file"), lambda: tree.symlink_to("nowhere")):
        make()
        deliver(tmp_path, found)
        assert contents(tree) == expected(found)
        shutil.rmtree(tree)


# ---------------------------------------------------------------- pruning


def deliver_many(checkout, tmp_path, number):
    made = []
    for version in range(number):
        write(checkout / "version", f"{version}")
        _, path = deliver(tmp_path, take(checkout))
        os.utime(path, (1000 + version, 1000 + version))
        made.append(path)
    return made


def test_pruning_keeps_newest_trees(checkout, tmp_path):
    made = deliver_many(checkout, tmp_path, receiver.KEEP_TREES + 3)
    assert [path.is_dir() for path in made] == [False] * 3 + [True] * receiver.KEEP_TREES
    records = {path.stem for path in made[0].parent.glob("*.json")}
    assert records == {path.name for path in made[3:]}


def test_pruning_counts_tree_sent_again_as_new(checkout, tmp_path):
    made = deliver_many(checkout, tmp_path, receiver.KEEP_TREES)
    write(checkout / "version", "0")
    assert deliver(tmp_path, take(checkout))[1] == made[0]
    write(checkout / "version", "one more")
    deliver(tmp_path, take(checkout))
    assert [path.is_dir() for path in made] == [True, False, True, True, True]


def test_pruning_keeps_working_folder_of_running_process(checkout, tmp_path):
    made = deliver_many(checkout, tmp_path, 2)
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, cwd=made[0] / "lib") as below,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, cwd=made[1]) as there,
    ):
        later = deliver_many(checkout, tmp_path, receiver.KEEP_TREES + 2)[2:]
        assert made[0].is_dir()
        assert made[1].is_dir()
        assert contents(made[0])["version"] == (0o644, b"0")
        for process in (below, there):
            process.communicate()
    write(checkout / "version", "last")
    deliver(tmp_path, take(checkout))
    assert not made[0].exists()
    assert later[-1].is_dir()


def test_pruning_keeps_trees_of_runs_that_have_not_ended(checkout, tmp_path):
    """It is no process's working folder here: it waits in a queue, or another host runs it."""
    trees, ended = {}, set()

    def submit(run, made=True):
        write(checkout / "version", run)
        found = take(checkout)
        tree = tree_of(tmp_path, found)
        if made:
            (tmp_path / "host/runs" / run).mkdir(parents=True)
        upload = Upload(
            found, tree, run_dir=str(tmp_path / "host/runs" / run), ended=ended.__contains__
        )
        upload.send("h0", sys.executable, LOCAL)
        os.utime(tree.path, (1000 + len(trees), 1000 + len(trees)))
        trees[run] = Path(tree.path)

    for run in ("waits", "ends", "removed", "submitted"):
        submit(run, made=run != "submitted")
    for number in range(receiver.KEEP_TREES):
        submit(f"later-{number}")
    assert all(tree.is_dir() for tree in trees.values())
    ended.add("ends")
    shutil.rmtree(tmp_path / "host/runs/removed")
    for run in ("removed", "submitted"):
        link = trees[run].with_name(f"{trees[run].name}.runs") / run
        os.utime(link, (0, 0) if run == "removed" else None, follow_symlinks=False)
    submit("last")
    gone = {run for run, tree in trees.items() if not tree.exists()}
    assert gone == {"ends", "removed"}
    assert {path.stem for path in trees["last"].parent.glob("*.runs")} == {
        tree.name for run, tree in trees.items() if run not in gone
    }


def test_pruning_survives_tree_that_cannot_be_removed(checkout, tmp_path, monkeypatch):
    made = deliver_many(checkout, tmp_path, receiver.KEEP_TREES + 1)
    assert not made[0].exists()

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(Path, "rename", refuse)
    receiver._prune(made[0].with_name("newest"))
    assert made[1].is_dir()


# ---------------------------------------------------------------- clusterkit itself


def test_delivered_clusterkit_package_can_be_imported(tmp_path):
    found = own_package()
    _, path = deliver(tmp_path, found)
    program = "import clusterkit.runtime, clusterkit; print(clusterkit.__file__)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={"PYTHONPATH": str(path)}, cwd="/", capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(path / "clusterkit" / "__init__.py"), done.stderr
    assert not [name for name in paths(found) if name.endswith(".pyc")]
    assert "clusterkit/jobfile/deepspeed_keys.json" in paths(found)


def test_second_upload_of_2000_files_takes_little_cpu_time(tmp_path):
    root = tmp_path / "many"
    for number in range(2000):
        write(root / f"d{number % 40}" / f"f{number}", f"{number}")
    found = take(root)
    _, path = deliver(tmp_path, found)
    write(root / "d0" / "f0", "changed")
    second = take(root)
    began = time.process_time()
    number, path = deliver(tmp_path, second)
    assert number == 1
    assert time.process_time() - began < 5
    assert contents(path) == expected(second)
