"""Writes a plan as one shell script, to submit from a machine without clusterkit. Pure."""

from __future__ import annotations

from clusterkit import shell
from clusterkit.agent import PEER_TOKEN
from clusterkit.cluster import Host, SshCluster
from clusterkit.plan import Plan, unpacking
from clusterkit.yaml_text import comment

_HEAD = """set -eu
# Values travel through standard input: no argument list holds them.
give() {
    given=$(printf '%s.' "$2" | sed "s/'/'\\\\\\\\''/g")  # $() would drop newlines at the end
    printf "export %s='%s'\\n" "$1" "${given%.}"
}
"""


def script(plan: Plan, cluster: SshCluster, head: list[str]) -> str:
    """Return a POSIX shell script that copies the project to the hosts and starts the nodes."""
    hosts = {host.name: host for host in cluster.hosts}
    secrets = dict.fromkeys(name for step in plan.steps for name in step.secrets)
    head = [*head, *(f"First: export {name}=..." for name in secrets if name != PEER_TOKEN)]
    head.append(f"Each node keeps its log in {plan.run_dir}/attempts/1/node-N of its host.")
    parts = ["#!/bin/sh\n", comment("\n".join(head)), _HEAD]
    if PEER_TOKEN in secrets:
        parts.append(f"{PEER_TOKEN}=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')\n")
    for name in dict.fromkeys(plan.hosts):
        ssh = shell.join(_ssh(hosts[name]))
        for tree in plan.trees:
            folder = shell.quote(tree.path)
            unpack = shell.quote(f"mkdir -p {folder} && tar -C {folder} -xf -")
            parts.append(f"tar -C {shell.quote(tree.source)} -cf - . | {ssh} {unpack}\n")
        lines = unpacking(plan.files)
        for step in plan.steps:
            if step.host == name and step.kind == "run":
                lines += f"{shell.assignments(step.env, step.argv)}\n"
            elif step.host == name:
                env = [f"{key}={value}" for key, value in step.env.items()]
                started = shell.join(["env", *env, "nohup", "setsid", *step.argv])
                lines += f"{started} </dev/null >/dev/null 2>&1 &\n"
        gives = "".join(f'give {key} "${key}"; ' for key in secrets)
        parts.append(
            f"{{ {gives}cat <<'END-OF-{name}'\n{lines}END-OF-{name}\n}} | {ssh} /bin/sh -s\n"
        )
    return "".join(parts)


def _ssh(host: Host) -> list[str]:
    """Return the ``ssh`` command for a host, with the options of its entry."""
    argv = ["ssh", "-o", "BatchMode=yes"]
    for option, value in (
        ("-F", host.ssh_config), ("-p", host.port), ("-i", host.identity), ("-J", host.jump),
    ):  # fmt: skip
        argv += [option, str(value)] if value else []
    if host.known_hosts:
        argv += ["-o", f"UserKnownHostsFile={host.known_hosts}"]
    address = host.address or host.name
    return [*argv, f"{host.user}@{address}" if host.user else address]
