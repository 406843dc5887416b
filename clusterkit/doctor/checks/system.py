"""Are processor, operating system and libraries the same everywhere?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from clusterkit.doctor.base import Level, Verdict, common, ok
from clusterkit.doctor.check import Answers, Check, Script
from clusterkit.doctor.driver import text_of


class Seen(Struct):
    """What programs are built for."""

    machine: str
    kernel: str
    """Major and minor number."""
    system: str
    libc: str


_PARTS: dict[str, tuple[str, Level, str]] = {
    "machine": ("a processor of kind", "fail", "leave the host out, or install the same system"),
    "libc": ("the C library", "warn", "uname -a"),
    "system": ("the system", "warn", "uname -a"),
    "kernel": ("the kernel", "warn", "uname -a"),
}
"""What to call it, how bad a difference is, and what to do about it."""


def collect(given: dict[str, Any]) -> Any:
    import os

    release = {}
    for line in text_of("/etc/os-release").splitlines():
        key, _, value = line.strip().partition("=")
        release[key] = value.strip("\"'")
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        libc = "not glibc"
    return {
        "machine": os.uname().machine,
        "kernel": ".".join(os.uname().release.split(".")[:2]),
        "system": f"{release.get('ID', 'linux')} {release.get('VERSION_ID', '')}".strip(),
        "libc": libc,
    }


SYSTEM = Script("system", collect, Seen, safe=True)


def judge(answers: Answers) -> Iterator[Verdict]:
    seen = answers.read(SYSTEM)
    usual = {key: common((getattr(each, key) for each in seen.values()), "") for key in _PARTS}
    for host, system in seen.items():
        unlike = [
            Verdict(host, level, f"{what} {own}, but {usual[key]} on the other hosts", mend)
            for key, (what, level, mend) in _PARTS.items()
            if (own := getattr(system, key)) != usual[key]
        ]
        known = f"{system.system}, kernel {system.kernel}, {system.machine}"
        yield from unlike or [ok(host, known)]


CHECK = Check(
    "system", "Processor, system, C library and kernel are the same everywhere.", judge, (SYSTEM,)
)
