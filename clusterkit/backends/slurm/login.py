"""A login node that is reached over SSH, and the copy here of what the nodes write there.

The run's folder here gets the same files as the one on the cluster's disk (`tail` sends them):
whoever reads of a run reads them here, whether the login node is this machine or not.
"""

from __future__ import annotations

import json
import re
from importlib import resources
from typing import Any

import msgspec

from clusterkit import addresses, backends
from clusterkit.agent.protocol import GROWING_FILES, WHOLE_FILES
from clusterkit.backends.slurm import tail
from clusterkit.backends.slurm.queue import HERE, LOGIN_PYTHON
from clusterkit.cluster import SlurmCluster, SshCluster
from clusterkit.errors import BadInput, ClusterkitError, SubmitFailed
from clusterkit.files import size_of, write_atomic
from clusterkit.output import mirror
from clusterkit.run.folder import RunHandle
from clusterkit.transport import Stream, Transport

_BOOT = "import sys;exec(compile(sys.stdin.read({}),'tail','exec'))"
_NAME = re.compile(
    r"(job|stop)-\d+|slurm-\d+\.out"
    rf"|attempts/\d+/(next|node-\d+/({'|'.join(map(re.escape, (*GROWING_FILES, *WHOLE_FILES)))}))"
)
"""Of files that are taken: nothing that a login node sends may lie elsewhere."""


def transport(cluster: SlurmCluster) -> Transport:
    """What reaches the entry's login node, as backend ssh would.

    Raises:
        BadInput: it is none.
        Unavailable: paramiko is not installed.
    """
    name = str(cluster.ssh)
    try:
        found = addresses.host_from(name)
        addresses.check(found, "ssh")
    except BadInput:
        found = None
    if found is None or name == HERE:
        raise BadInput(
            f"ssh: {name} is no login node on another machine",
            hint="[user@]host[:port]; on a login node itself, leave it out",
            cluster="ssh",
        )
    host = msgspec.structs.replace(found, name=name, address=found.name)
    python = cluster.python or LOGIN_PYTHON
    return backends.transport_for(SshCluster(hosts=(host,), python=python))


class Copy(mirror.NodeView):
    """The files of one attempt, and whether they are as they are there."""

    @classmethod
    def of_run(cls, handle: RunHandle) -> Copy:
        return cls(0, handle.plan.hosts[0], handle.folder.path)

    def take(self, header: dict[str, Any], payload: bytes) -> None:
        super().take(header, b"")  # a path is no name that it knows
        name = header.get("file")
        if name is None or self.folder is None or not _NAME.fullmatch(name):
            return
        if (at := header.get("at")) is None:
            write_atomic(self.folder / name, payload)
        elif at == size_of(self.folder / name):  # not after a part that could not be written
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            self._append(name, payload)
        else:
            raise SubmitFailed(f"cannot write {self.folder / name}: a part of it is missing")

    def lost(self, error: ClusterkitError) -> None:
        super().lost(error)
        self.begun = False  # they come anew, from where they are

    @property
    def behind(self) -> str | None:
        """Why the files may not be as they are there; empty: they have not all come yet; None: they
        are."""
        if not self.known:
            return None  # the folder there is gone: nothing is to come
        if self.error is not None:
            return str(self.error.message)
        return None if self.begun else ""


def is_remote(handle: RunHandle) -> bool:
    """Whether the nodes write to another folder than the run's own here."""
    return str(handle.folder.path) != handle.plan.run_dir


def bring(handle: RunHandle, transport: Transport) -> str | None:
    """Copy what there is by now; returns `Copy.behind`."""
    if not is_remote(handle):
        return None
    copy = Copy.of_run(handle)
    try:
        with mirror.folder_lock(copy), _report(handle, transport, follow=False) as stream:
            mirror.pull(copy, stream)
            if not copy.begun:
                code = stream.exit_code(mirror.QUIET_SECONDS)
                copy.known = code != tail.GONE
                raise SubmitFailed(f"host {copy.host}: {stream.stderr.strip()[-300:]}")
    except ClusterkitError as error:
        copy.lost(error)
    return copy.behind


def follow(handle: RunHandle, transport: Transport) -> mirror.Watch | None:
    """Copy from here on, in a thread, until closed; None: there is nothing to copy."""
    if not is_remote(handle):
        return None
    return mirror.Watch([Copy.of_run(handle)], lambda view: _report(handle, transport, follow=True))


def behind(watch: mirror.Watch | None) -> str | None:
    """`Copy.behind` of what `follow` copies."""
    if watch is None:
        return None
    (copy,) = watch.views
    assert isinstance(copy, Copy)
    return copy.behind


def _report(handle: RunHandle, transport: Transport, *, follow: bool) -> Stream:
    plan, here = handle.plan, handle.folder.path
    nodes = here.glob(f"attempts/{handle.attempt}/node-*")
    growing = [path for node in nodes for name in GROWING_FILES if (path := node / name).exists()]
    growing += here.glob("slurm-*.out")
    asked = {
        "folder": plan.run_dir, "attempt": handle.attempt, "follow": follow,
        "sizes": {str(path.relative_to(here)): size_of(path) for path in growing},
        "whole": WHOLE_FILES, "growing": GROWING_FILES,
    }  # fmt: skip
    text = (resources.files("clusterkit.backends.slurm") / "tail.py").read_text()
    argv = [plan.python, "-I", "-S", "-X", "utf8", "-c", _BOOT.format(len(text))]
    stream = transport.open(plan.hosts[0], argv)
    stream.write(text.encode() + json.dumps(asked).encode())
    stream.close_input()
    return stream
