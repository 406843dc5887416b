"""Which files of a project are sent, and what is refused."""

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from clusterkit.errors import BadInput, RunFolderError
from clusterkit.sync import snapshot
from clusterkit.sync.snapshot import take
from tests.unit.project.projects import BAD_NAME, git, paths, write

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
