"""Repair and removal of copies; clusterkit's own."""

import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterkit.sync import receiver
from clusterkit.sync.snapshot import own_package, take
from clusterkit.sync.upload import Upload
from tests.unit.project.projects import (
    LOCAL,
    contents,
    deliver,
    expected,
    leftovers,
    paths,
    tree_of,
    write,
)

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
