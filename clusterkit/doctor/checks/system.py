"""Are processor, operating system and libraries the same everywhere?"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from clusterkit.doctor.base import Answers, Check, Finding, Level, Script, Subject, common, read

NAME = "system"


class Seen(Struct):
    """What programs are built for."""

    machine: str
    kernel: str
    """Major and minor number."""
    system: str
    libc: str


_WORDS: dict[str, tuple[str, Level]] = {
    "machine": ("a processor of kind", "fail"),
    "libc": ("the C library", "warn"),
    "system": ("the system", "warn"),
    "kernel": ("the kernel", "warn"),
}


def collect(given: dict[str, Any]) -> Any:
    import os

    release = {}
    try:
        with open("/etc/os-release", encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.strip().partition("=")
                release[key] = value.strip("\"'")
    except OSError:
        pass
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


SYSTEM = Script("system", collect, safe=True)


def judge(answers: Answers, subject: Subject) -> list[Finding]:
    seen, findings = read(NAME, SYSTEM, answers, subject, Seen)
    usual = {
        key: common({host: getattr(system, key) for host, system in seen.items()}, "")
        for key in _WORDS
    }
    for host, system in seen.items():
        unlike = [
            Finding(
                NAME,
                host,
                level,
                f"{words} {getattr(system, key)}, but {usual[key]} on the other hosts",
                "leave the host out, or install the same system"
                if key == "machine"
                else "uname -a",
            )
            for key, (words, level) in _WORDS.items()
            if getattr(system, key) != usual[key]
        ]
        told = f"{system.system}, kernel {system.kernel}, {system.machine}"
        findings += unlike or [Finding(NAME, host, "ok", told)]
    return findings


CHECK = Check(
    NAME, "Processor, system, C library and kernel are the same everywhere.", judge, (SYSTEM,)
)
