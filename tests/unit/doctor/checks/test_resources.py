"""Checks of memory, limits, disks and the shared folder."""

import pytest

from tests.unit.doctor.conftest import make_answer, make_subject

GIB = 1 << 30


# ---------------------------------------------------------------- resources


@pytest.mark.parametrize(
    ("total", "available", "limit", "level"),
    [(24, 20, None, "ok"), (24, 3, None, "warn"), (24, 0.5, None, "fail"), (24, 0, None, "fail"),
     (512, 500, 2, "warn")],
)  # fmt: skip
def test_memory_check_judges_available_memory_and_limit(judged, total, available, limit, level):
    value = {
        "total": total * GIB,
        "available": int(available * GIB),
        "limit": limit and limit * GIB,
    }
    assert judged("memory", make_subject(1, slots=4), value)["h0"].level == level


def test_memory_check_reports_host_with_less_memory(judged):
    usual = {"total": 64 * GIB, "available": 60 * GIB, "limit": None}
    small = {"total": 32 * GIB, "available": 30 * GIB, "limit": None}
    found = judged("memory", make_subject(3), usual, h1=small)
    assert found["h1"].cause == "32 GiB of memory, but 64 GiB on other hosts"


def shm(free, total=16 * GIB, exists=True, writable=True):
    return {"exists": exists, "writable": writable, "free": free, "total": total}


@pytest.mark.parametrize(
    ("value", "level", "remedy"),
    [
        (shm(16 * GIB), "ok", None),
        (shm(64 << 20, 64 << 20), "warn", "remount"),
        (shm(63 << 20, 64 << 20), "fail", "remount"),
        (shm(1 << 20), "fail", "ls -la /dev/shm"),
        (shm(0, 0, exists=False, writable=False), "fail", "mount -t tmpfs"),
        (shm(16 * GIB, writable=False), "fail", "mode=1777"),
    ],
)
def test_shm_check_judges_size_and_access(judged, value, level, remedy):
    judged("shm", make_subject(1), value).says("h0", level, remedy=remedy)


def limits(**changed):
    return {"nofile": 1 << 20, "nproc": None, "memlock": 8 << 20, "core": 0, "root": False,
            "infiniband": False, "core_pattern": "core", "cpus": 64} | changed  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        ({}, "ok", "memlock 8192 KiB"),
        ({"nofile": None, "memlock": None}, "ok", "nofile unlimited"),
        ({"nofile": 300}, "fail", "nofile 300"),
        ({"nofile": 1024}, "warn", "nofile 1024"),
        ({"nproc": 100}, "fail", "nproc 100"),
        ({"nproc": 100, "root": True}, "ok", ""),
        ({"infiniband": True}, "fail", "memlock 8192 KiB"),
        ({"infiniband": True, "memlock": None}, "ok", ""),
        ({"core": None}, "warn", "core: a rank that aborts"),
        ({"core": None, "core_pattern": "|/usr/lib/systemd/systemd-coredump %P"}, "ok", ""),
    ],
)
def test_limits_check_judges_ulimits(judged, changed, level, words):
    found = judged("limits", make_subject(2, slots=8), limits(**changed))
    found.says("h0", level, words)
    if level != "ok":
        assert "/etc/security/limits.d/" in found["h0"].remedy


def test_limits_check_needs_more_nofile_for_more_ranks(judged):
    value = limits(nofile=2000)
    assert judged("limits", make_subject(2, slots=8), value)["h0"].level == "warn"
    assert judged("limits", make_subject(64, slots=8), value)["h0"].level == "fail"


def disk(path="/srv", free=100 * GIB, total=200 * GIB, inodes_free=10**7, inodes=10**8, ro=False):
    return {"path": path, "free": free, "total": total, "inodes_free": inodes_free,
            "inodes": inodes, "read_only": ro}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        ({}, "ok", "/srv 100 GiB"),
        ({"free": 2 * GIB}, "warn", "/srv has 2.0 GiB left of 200 GiB"),
        ({"free": 0}, "fail", "/srv has 0 B left"),
        ({"inodes_free": 10}, "fail", "room for 10 more files (inodes)"),
        ({"inodes_free": 20_000}, "warn", "20000 more files"),
        ({"inodes_free": 0, "inodes": 0}, "ok", ""),
        ({"ro": True}, "fail", "mounted read-only"),
        ({"free": 0, "total": 0}, "ok", ""),
        ({"free": 2 * GIB, "inodes_free": 5}, "fail", "5 more files"),
    ],
)
def test_disk_check_judges_space_inodes_and_read_only_mounts(judged, changed, level, words):
    judged("disk", make_subject(1), [disk("/tmp"), disk(**changed)]).says("h0", level, words)


def test_disk_check_reports_every_full_disk(judged):
    found = judged("disk", make_subject(1), [disk("/a b", free=0), disk("/c", free=0)])
    assert [finding.cause.split()[0] for finding in found.all("h0")] == ["/a", "/c"]
    assert found.all("h0")[0].remedy.startswith("df -h '/a b'")


def folder(**changed):
    return {"path": "/srv/work", "exists": True, "parent": "/srv/work", "error": None,
            "error_name": None, "pipe_error": None, "user": "ann"} | changed  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "level", "words", "remedy"),
    [
        ({}, "ok", "/srv/work", None),
        ({"exists": False, "parent": "/srv"}, "ok", "can be made", None),
        ({"error": "Permission denied", "error_name": "EACCES"}, "fail",
         "/srv/work cannot be written to by ann: Permission denied",
         "sudo install -d -o ann /srv/work"),
        ({"exists": False, "parent": "/", "error": "Permission denied", "error_name": "EACCES"},
         "fail", "/srv/work cannot be made by ann", "sudo install -d -o ann /srv/work"),
        ({"error": "No space left on device", "error_name": "ENOSPC"}, "fail",
         "No space left", "df -h"),
        ({"error": "Disk quota exceeded", "error_name": "EDQUOT"}, "fail", "quota", "df -h"),
        ({"error": "Read-only file system", "error_name": "EROFS"}, "fail", "Read-only", "findmnt"),
        ({"exists": False, "parent": "/srv/f", "error": "/srv/f is not a folder"}, "fail",
         "/srv/f is not a folder", "ls -ld /srv/f"),
        ({"pipe_error": "Operation not permitted"}, "fail", "not support named pipes", "workdir"),
    ],
)  # fmt: skip
def test_workdir_check_judges_creation_writing_and_named_pipes(
    judged, changed, level, words, remedy
):
    judged("workdir", make_subject(1), folder(**changed)).says("h0", level, words, remedy)


# ---------------------------------------------------------------- the shared folder


def shared(subject, written, **read):
    return {
        machine.name: make_answer(
            ({"shared_write": written} if machine.name == "h0" else {})
            | ({"shared_read": read[machine.name]} if machine.name in read else {})
        )
        for machine in subject.hosts
    }


FOUND = {"text": "token", "error": None, "file_system": "nfs4"}


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        ({}, "ok", "/shared"),
        (
            {"text": None, "file_system": "ext4"},
            "fail",
            "files that h0 writes do not appear (it is ext4)",
        ),
        ({"text": None, "file_system": ""}, "fail", "is not shared"),
        ({"text": None, "error": "No such directory"}, "fail", "cannot be read: No such directory"),
        ({"text": None, "error": "Stale file handle"}, "fail", "Stale file handle"),
        ({"text": ""}, "warn", "empty for a while"),
    ],
)
def test_shared_check_fails_unless_hosts_read_file_of_head(judged, changed, level, words):
    subject = make_subject(3, shared="/shared")
    answers = shared(subject, {"error": None}, h1=FOUND | changed, h2=FOUND)
    found = judged("shared", subject, **answers)
    assert found["h0"].level == found["h2"].level == "ok"
    found.says("h1", level, words)


def test_shared_check_blames_only_head_that_cannot_write(judged):
    subject = make_subject(3, shared="/shared")
    found = judged("shared", subject, **shared(subject, {"error": "Read-only file system"}))
    assert found.levels() == {"h0": ["fail"], "h1": ["skip"], "h2": ["skip"]}


def test_shared_check_skips_without_shared_folder(judged):
    assert judged("shared", make_subject(2))["h0"].level == "skip"
