"""A project that hosts pass on to each other; each "host" is a folder of this machine."""

import json
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from clusterkit.errors import SubmitFailed
from clusterkit.plan import Tree
from clusterkit.sync import relay
from clusterkit.sync.relay import Relay
from clusterkit.sync.snapshot import take
from clusterkit.sync.upload import Upload
from clusterkit.transport import LocalTransport
from tests.unit.project.projects import contents, expected

HOSTS = [f"h{number}" for number in range(7)]


@pytest.fixture
def found(tmp_path, monkeypatch):
    """A project that is worth passing on, with a link and an empty file."""
    monkeypatch.setattr(relay, "WORTHWHILE_BYTES", 1000)
    root = tmp_path / "project"
    (root / "lib").mkdir(parents=True)
    (root / "train.py").write_text("print('trained')\n")
    (root / "lib" / "empty").write_text("")
    (root / "lib" / "data").write_bytes(os.urandom(5_000_000))
    (root / "latest").symlink_to("lib/data")
    return take(root)


@pytest.fixture
def sent(monkeypatch):
    """How many files the submitter has read for hosts, each time it sent some."""
    times = []
    pieces = Upload.pieces

    def counted(self, missing, zipped=True):
        times.append(len(missing))
        return pieces(self, missing, zipped)

    monkeypatch.setattr(Upload, "pieces", counted)
    return times


def deliver(found, tmp_path, hosts=HOSTS):
    """Send it to all; gives the folder of each host."""
    trees = {
        host: Tree(str(found.root), f"{tmp_path}/{host}/projects/p", found.digest, "")
        for host in hosts
    }
    told = []
    with (
        Relay(dict.fromkeys(hosts, "127.0.0.1")) as passing,
        ThreadPoolExecutor(len(hosts)) as pool,
    ):
        jobs = [
            pool.submit(
                Upload(found, tree, passing).send, host, sys.executable, LocalTransport(),
                lambda *about: told.append(about),
            )
            for host, tree in trees.items()
        ]  # fmt: skip
        for job in jobs:
            job.result()
    for host in hosts:
        done, whole = [about for about in told if about[0] == host][-1][1:]
        assert done == whole > 0
    return [Path(tree.path) for tree in trees.values()]


def test_submitter_sends_project_once_for_all_hosts(found, tmp_path, sent):
    for tree in deliver(found, tmp_path):
        assert contents(tree) == expected(found)
    assert sent == [3]


def test_small_change_is_sent_to_every_host_by_submitter(found, tmp_path, sent):
    deliver(found, tmp_path)
    sent.clear()
    (found.root / "train.py").write_text("print('changed')\n")
    changed = take(found.root)
    for host in HOSTS:
        (tmp_path / host / "projects" / "p").rename(tmp_path / host / "projects" / "q")
        (tmp_path / host / "projects" / "p.json").rename(tmp_path / host / "projects" / "q.json")
    for tree in deliver(changed, tmp_path):
        assert contents(tree) == expected(changed)
    assert sent == [1] * len(HOSTS)


def serve_at(monkeypatch, port):
    """Have others look for every host's server there."""
    add = Relay.add
    monkeypatch.setattr(Relay, "add", lambda self, host, _, kept: add(self, host, port, kept))


def test_submitter_sends_to_all_hosts_that_cannot_reach_each_other(
    found, tmp_path, sent, monkeypatch
):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        serve_at(monkeypatch, nobody.getsockname()[1])
        for tree in deliver(found, tmp_path):
            assert contents(tree) == expected(found)
    assert sent == [3] * len(HOSTS)


@pytest.mark.parametrize("said", [b"", b"\0" * 13, b"\0" * 12 + b"\5wrong"])
def test_host_relaying_wrong_data_is_replaced_by_submitter(
    found, tmp_path, sent, monkeypatch, said
):
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:

        def answer():
            while True:
                connection = listening.accept()[0]
                with connection, connection.makefile("rb") as asked:
                    if not asked.readline():
                        return
                    connection.sendall(said)

        answering = pool.submit(answer)
        port = listening.getsockname()[1]
        serve_at(monkeypatch, port)
        for tree in deliver(found, tmp_path, HOSTS[:3]):
            assert contents(tree) == expected(found)
        socket.create_connection(("127.0.0.1", port)).close()  # ends `answer`
        answering.result()
    assert sent == [3] * 3


def test_relay_without_valid_token_sends_nothing(found, tmp_path):
    tree = Tree(str(found.root), f"{tmp_path}/h0/projects/p", found.digest, "")
    with Relay({"h0": "127.0.0.1"}) as passing:
        Upload(found, tree, passing).send("h0", sys.executable, LocalTransport())
        (sender,) = passing._hosts
        for token in ("", "x" * 32, None):
            with socket.create_connection(sender) as connection:
                wanted = {"token": token, "missing": [0]}
                connection.sendall(json.dumps(wanted).encode() + b"\n")
                assert connection.makefile("rb").read() == b""


def test_host_that_cannot_receive_does_not_block_other_hosts(found, tmp_path, sent):
    (tmp_path / "h0").write_text("no folder")
    with pytest.raises(SubmitFailed, match="cannot copy"):
        deliver(found, tmp_path)
    assert contents(tmp_path / "h6" / "projects" / "p") == expected(found)
    assert sent[-1] == 3


def test_host_that_cannot_relay_still_receives_project(found, tmp_path):
    large = [entry.path for entry in found.entries].index("lib/data")
    said = [{"missing": [large]}, {"done": 1}, {"error": "Operation not permitted"}]
    lines = " ".join(f"'{json.dumps(line)}'" for line in said)
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\nprintf '%s\\n' {lines}\ncat >/dev/null\n")
    fake.chmod(0o755)
    tree = Tree(str(found.root), f"{tmp_path}/h0/projects/p", found.digest, "")
    with Relay({"h0": "127.0.0.1"}) as passing:
        assert Upload(found, tree, passing).send("h0", str(fake), LocalTransport()) == 1
        with passing.sender(found.size) as sender:
            assert sender is None
