"""Made-up hosts, jobs for them and what they say."""

import json

from clusterkit.backends.ssh.backend import SshBackend
from clusterkit.cluster import Facts, Host, HostFacts, Project, SshCluster
from clusterkit.spec import JobSpec
from clusterkit.transport import LocalTransport

SSH = SshBackend()
PROJECT = Project(root="/home/me/my project", digest="d" * 32, files=3, bytes=4_200_000, how="all")


def job(**fields):
    given = {"name": "demo", "program": "train.py", "workdir": "/home/me/my project"}
    return JobSpec(**(given | fields))


def host_facts(number, **fields):
    given = {
        "host": f"h{number}", "address": f"10.0.0.{number}", "cpus": 8, "memory_mib": 1 << 16,
        "python": "/opt/venv/bin/python",
        "versions": {"torch": "2.13.0", "deepspeed": "0.19.8", "clusterkit": "0"},
        "tools": {"mpirun": "/usr/bin/mpirun"}, "interface": "eth0",
    }  # fmt: skip
    return HostFacts(**(given | fields))


def facts(*hosts, **fields):
    given = {
        "home": "/home/u/cluster kit", "port": 29501, "port_origin": "free", "interface": "eth0",
        "project": PROJECT,
    }  # fmt: skip
    return Facts(hosts=hosts or (host_facts(0), host_facts(1)), **(given | fields))


def cluster(number=2, **fields):
    return SshCluster(hosts=tuple(Host(name=f"h{n}") for n in range(number)), **fields)


def plan(found, entry=None, **fields):
    return SSH.plan(job(**fields), entry or cluster(len(found.hosts)), found, "demo-1")


class Hosts(LocalTransport):
    """Every host is this machine, in a container and reached at an address of its own."""

    def __init__(self, **told):
        self.told = told
        """Host to what its probe says otherwise."""
        self.asked = []

    def run(self, host, argv, *, env=None, timeout=None, stdin=b""):
        self.asked.append((host, tuple(argv), dict(env or {})))
        changes = self.told.get(host, {})
        if isinstance(changes, Exception):
            raise changes
        reached = {"SSH_CONNECTION": f"10.9.9.9 5 10.0.0.{host[1:]} 22"}
        done = super().run(host, argv, env={**(env or {}), **reached}, timeout=timeout, stdin=stdin)
        if done.stdout.startswith("{"):
            document = json.loads(done.stdout) | {"machine": host} | changes
            done = type(done)(done.argv, done.exit_code, json.dumps(document), done.stderr)
        return done
