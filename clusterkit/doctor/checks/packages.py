"""Are torch, DeepSpeed and what belongs to them there, and the same everywhere?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import HostSubject, Level, Verdict, common, fail, ok, skip
from clusterkit.doctor.check import Answers, Check, Script

_MUST_AGREE = ("torch", "deepspeed", "nvidia-nccl")
_NONE = "none"


class Packages(Struct):
    """Versions in the interpreter of the ranks."""

    interpreter: str
    versions: dict[str, str]
    gone: list[str] = []
    """Those that pip knows of and Python does not find."""

    def cuda(self) -> int | None:
        """CUDA's major version that torch was built for; None: a CPU build, or unknown."""
        suffix = re.search(r"\+cu(\d\d)\d", self.versions.get("torch", ""))
        if suffix:
            return int(suffix[1])
        for package, version in self.versions.items():
            if package.startswith("nvidia-cuda-runtime") and version.partition(".")[0].isdecimal():
                return int(version.partition(".")[0])
        return None


def collect(given: dict[str, Any]) -> Any:
    import importlib.util
    import os
    import re
    import sys

    def there(name: str) -> bool:
        try:
            found = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return False
        # A folder without the package's own files has no origin.
        return found is not None and found.origin is not None

    # What importlib.metadata does, which takes 20 ms to import.
    wanted = r"(torch|deepspeed|transformers|numpy|nvidia-(nccl|cuda-runtime)(-cu\d+)?)\Z"
    versions: dict[str, str] = {}
    for folder in sys.path:
        try:
            entries = os.listdir(folder)
        except OSError:
            continue
        for entry in entries:
            stem, _, kind = entry.rpartition(".")
            name = re.sub("[-_.]+", "-", stem.partition("-")[0]).lower()
            if kind not in ("dist-info", "egg-info") or not re.match(wanted, name):
                continue
            for file_name in ("METADATA", "PKG-INFO", ""):
                try:
                    path = os.path.join(folder, entry, file_name).rstrip("/")
                    with open(path, encoding="utf-8", errors="replace") as file:
                        found = re.search(r"^Version:\s*(\S+)", file.read(4096), re.MULTILINE)
                except OSError:
                    continue
                if found is not None:
                    versions.setdefault(name, found[1])
                break
    gone = [name for name in versions if not name.startswith("nvidia-") and not there(name)]
    return {"interpreter": sys.executable, "versions": versions, "gone": gone}


PACKAGES = Script("packages", collect, Packages)


def needed_packages(subject: HostSubject) -> dict[str, str]:
    """Package to what of the job needs it."""
    needs = subject.needs
    found = {}
    if needs.launcher in ("torchrun", "deepspeed"):
        found["torch"] = f"launcher: {needs.launcher}"
    if needs.launcher == "deepspeed":
        found["deepspeed"] = "launcher: deepspeed"
    elif needs.deepspeed:
        found["deepspeed"] = "the job's deepspeed section"
    return found


def with_its_python(answers: Answers) -> set[str]:
    """Hosts on which the interpreter of the ranks ran, and no other in its place."""
    return {
        host
        for host, answer in answers.of.items()
        if answer.began is not None and answer.interpreter == answers.machines[host].python
    }


def pip_install(python: str, versions: Mapping[str, str], *flags: str) -> str:
    """The command that installs packages; one of no certain version has ``""``."""
    # What stands behind a + says which index it came from; pip finds it where it found the rest.
    pinned = [
        f"{name}=={version.partition('+')[0]}" if version else name
        for name, version in versions.items()
    ]
    return shell.join([python, "-m", "pip", "install", *flags, *pinned])


def judge(answers: Answers) -> Iterator[Verdict]:
    right = with_its_python(answers)
    for host in answers.of:
        if host not in right:
            yield skip(host, f"{answers.machines[host].python} does not work")
    seen = answers.read(PACKAGES, among=right)
    needed = needed_packages(answers.subject)
    names = dict.fromkeys(name for packages in seen.values() for name in packages.versions)
    usual = {
        name: common((packages.versions.get(name, _NONE) for packages in seen.values()), _NONE)
        for name in (*names, *needed)
    }
    for host, packages in seen.items():
        faults = list(_faults(host, packages, needed, usual, answers.machines[host].python))
        versions = [
            f"{name} {packages.versions[name]}"
            for name in ("torch", "deepspeed", "transformers")
            if name in packages.versions
        ]
        yield from faults or [ok(host, ", ".join(versions))]


def _faults(
    host: str, packages: Packages, needed: dict[str, str], usual: dict[str, str], python: str
) -> Iterator[Verdict]:
    for name, most in usual.items():
        version = packages.versions.get(name, _NONE)
        install = pip_install(python, {name: "" if most == _NONE else most})
        if version == _NONE and name in needed:
            cause = f"{needed[name]} needs {name}, which {python} does not have"
            yield fail(host, cause, install)
        elif name in packages.gone:
            cause = f"pip has a note of {name} {version}, but {python} does not find the package"
            mend = pip_install(python, {name: version}, "--force-reinstall", "--no-deps")
            yield fail(host, cause, mend)
        elif version != most and most != _NONE:
            level: Level = "fail" if name.startswith(_MUST_AGREE) else "warn"
            yield Verdict(host, level, f"{name} {version}, but {most} on the other hosts", install)


CHECK = Check(
    "packages",
    "torch (and the CUDA it is built for), NCCL, DeepSpeed and transformers are there as the job "
    "needs them, where Python finds them, and the same everywhere.",
    judge,
    (PACKAGES,),
)
