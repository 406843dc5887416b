"""Reaches a login node over SSH, and copies the run folder on the cluster's disk to this machine.

The run folder here gets the same files as the one there (`tail` sends them), so that all readers
of a run read local files, whether the login node is this machine or not.
"""

from __future__ import annotations

import json
import re
from importlib import resources
from typing import Any

import msgspec

from clusterkit import backends
from clusterkit.agent.protocol import GROWING_FILES, WHOLE_FILES
from clusterkit.backends.slurm import tail
from clusterkit.backends.slurm.queue import HERE, LOGIN_PYTHON
from clusterkit.cluster import SlurmCluster, SshCluster
from clusterkit.errors import BadInput, ClusterkitError, SubmitFailed
from clusterkit.files import size_of, write_atomic
from clusterkit.hosts import addresses
from clusterkit.output import mirror
from clusterkit.run.folder import RunHandle
from clusterkit.transport import Stream, Transport

_BOOT = "import sys;exec(compile(sys.stdin.read({}),'tail','exec'))"
_NAME = re.compile(
    r"(job|stop)-\d+|slurm-\d+\.out"
    rf"|attempts/\d+/(next|node-\d+/({'|'.join(map(re.escape, (*GROWING_FILES, *WHOLE_FILES)))}))"
)
"""Names of the files that are accepted: a login node must not write others on this machine."""


def transport(cluster: SlurmCluster) -> Transport:
    """Return the transport of backend ssh to the entry's login node.

    Raises:
        BadInput: `ssh` in the entry is not the name of another machine.
        Unavailable: paramiko is not installed.
    """
    name = str(cluster.ssh)
    try:
        login_node = addresses.host_from(name)
        addresses.check(login_node, "ssh")
    except BadInput:
        login_node = None
    if login_node is None or name == HERE:
        raise BadInput(
            f"ssh: {name} is not a login node on another machine",
            hint="[user@]host[:port]; on a login node itself, leave it out",
            cluster="ssh",
        )
    host = msgspec.structs.replace(login_node, name=name, address=login_node.name)
    python = cluster.python or LOGIN_PYTHON
    return backends.transport_for(SshCluster(hosts=(host,), python=python))


class Copy(mirror.NodeView):
    """The copy of one attempt's files, and whether it is up to date."""

    @classmethod
    def of_run(cls, handle: RunHandle) -> Copy:
        return cls(0, handle.plan.hosts[0], handle.folder.path)

    def take(self, header: dict[str, Any], payload: bytes) -> None:
        super().take(header, b"")  # which stores no file with a path
        name = header.get("file")
        if name is None or self.folder is None or not _NAME.fullmatch(name):
            return
        if (at := header.get("at")) is None:
            write_atomic(self.folder / name, payload, 0o644)
        elif at == size_of(self.folder / name):  # else a part before it could not be written
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            self._append(name, payload)
        else:
            raise SubmitFailed(f"cannot write {self.folder / name}: a part of it is missing")

    def lost(self, error: ClusterkitError) -> None:
        super().lost(error)
        self.begun = False  # set again by the next stream, once it has sent what is new

    @property
    def behind(self) -> str | None:
        """Why the copy may be out of date; empty: not all has arrived yet; None: it is not."""
        if not self.known:
            return None  # the original folder is gone
        if self.error is not None:
            return str(self.error.message)
        return None if self.begun else ""


def is_remote(handle: RunHandle) -> bool:
    """Return whether the nodes write to another folder than the run folder of this machine."""
    return str(handle.folder.path) != handle.plan.run_dir


def copy_once(handle: RunHandle, transport: Transport) -> str | None:
    """Copy what is new. Return `Copy.behind`."""
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
    """Keep copying in a thread, until closed; None: the nodes write to this machine's folder."""
    if not is_remote(handle):
        return None
    return mirror.Watch([Copy.of_run(handle)], lambda view: _report(handle, transport, follow=True))


def behind(watch: mirror.Watch | None) -> str | None:
    """Return `Copy.behind` for the result of `follow`."""
    if watch is None:
        return None
    (copy,) = watch.views
    assert isinstance(copy, Copy)
    return copy.behind


def _report(handle: RunHandle, transport: Transport, *, follow: bool) -> Stream:
    plan, folder = handle.plan, handle.folder.path
    nodes = folder.glob(f"attempts/{handle.attempt}/node-*")
    growing = [path for node in nodes for name in GROWING_FILES if (path := node / name).exists()]
    growing += folder.glob("slurm-*.out")
    request = {
        "folder": plan.run_dir,
        "attempt": handle.attempt,
        "follow": follow,
        "sizes": {str(path.relative_to(folder)): size_of(path) for path in growing},
        "whole": WHOLE_FILES,
        "growing": GROWING_FILES,
    }
    text = (resources.files("clusterkit.backends.slurm") / "tail.py").read_text()
    argv = [plan.python, "-I", "-S", "-X", "utf8", "-c", _BOOT.format(len(text))]
    stream = transport.open(plan.hosts[0], argv)
    stream.write(text.encode() + json.dumps(request).encode())
    stream.close_input()
    return stream
