"""docs/doctor.md tells of every check."""

import re
from pathlib import Path

import pytest

from clusterkit.doctor import every_check
from clusterkit.doctor.hosts.checks import folders, login, resources, system

CHECKS = [check for checks in every_check().values() for check in checks]
PAGE = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_doctor_page_lists_every_check_with_purpose(check):
    quick = "yes" if check.quick else ""
    assert f"| `{check.name}` | {quick} | {check.purpose} |" in PAGE


def test_doctor_page_lists_no_unknown_check():
    rows = re.findall(r"^\| `([a-z-]+)` \|", PAGE.partition("## JSON")[0], re.MULTILINE)
    assert {check.name for check in CHECKS} == set(rows)


def row(name):
    cells = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
    return cells[-1]


def test_doctor_page_thresholds_match_code():
    assert f"more than {login.SLOW:g} s" in row("reachable")
    assert f"more than {system.CLOCK_WARN:g} s" in row("clock")
    assert (
        f"more than {system.CLOCK_FAIL:g} s; {system.CLOCK_ELASTIC:g} s for an elastic job"
        in row("clock")
    )
    assert f"less than {resources.MEMORY_WARN >> 30} GiB" in row("memory")
    assert f"less than {resources.MEMORY_FAIL >> 20} MiB" in row("memory")
    assert f"less than {resources.SHM_WARN >> 30} GiB" in row("shm")
    assert f"less than {resources.SHM_FAIL >> 20} MiB" in row("shm")
    assert f"{folders.BYTES_WARN >> 30} GiB or room for {folders.INODES_WARN:,} files" in row(
        "disk"
    )
    assert f"{folders.BYTES_FAIL >> 20} MiB or {folders.INODES_FAIL:,} files" in row("disk")
