"""Writes the batch script whose allocation has a node for each of the job's. Pure."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from clusterkit.agent import PEER_TOKEN
from clusterkit.agent.archive import ARCHIVE
from clusterkit.assemble import Assembly, Coordinator, NodePaths, Placement, require_packages
from clusterkit.backends.placing import (
    device_of,
    interface_env,
    project_copies,
    split_gpus,
    threads_of,
)
from clusterkit.backends.ports import default_ports
from clusterkit.backends.slurm.probe import minutes
from clusterkit.backends.slurm.queue import HERE, LOGIN_PYTHON, NODE_0_LOST, STATES, WARNED
from clusterkit.cluster import Facts, SlurmCluster, SlurmFacts
from clusterkit.errors import BadInput, pluralize
from clusterkit.plan import Note, PlanFile, Step
from clusterkit.rendezvous import NODE_ADDRESS, NODE_RANK, Endpoint, Topology
from clusterkit.shell import Var, join, quote
from clusterkit.spec import JobSpec

HEAD = Var("CLUSTERKIT_HEAD")
"""Address of the allocation's first node, set by the batch script, which runs there."""
SLACK_MINUTES = 5
"""Slurm's time limit beyond the job's own, so that the agents end the job and not Slurm."""
_VARIABLES = {"time": "timelimit", "mem": "mem_per_node"}
"""Options of sbatch whose environment variable has another name."""
_UNSET = ("error", "requeue", "no-requeue", "export", "array-inx", "wait")
"""Further options whose variables would change what the script does."""
_OF_STEPS = ("cpus-per-task", "gres", "no-kill")
"""Options of the job that a step does not inherit since Slurm 22.05."""
_SUBMIT = """\
#!/bin/sh
# Variables of the submitter's would win over the options in slurm.sh.
unset {unset}
job=$(sbatch --parsable {script}) || exit
echo "${{job%%;*}}" >{run}/job-"${{CLUSTERKIT_ATTEMPT:-1}}"
"""
_SCRIPT = """\
#!/bin/bash
{options}{setup}set -u
run={run}
# Two jobs of one plan must never run at once: their ranks would write the same files.
while ! (set -C && echo "$SLURM_JOB_ID" >"$run/slurm-job") 2>/dev/null; do
    if [ ! -w "$run" ]; then exit 73; fi
    other=$(cat "$run/slurm-job") || continue # it has ended meanwhile
    if [ "$other" = "$SLURM_JOB_ID" ]; then break; fi
    case $(squeue --noheader --states=all --job="$other" --format=%T 2>&1) in
    RUNNING | SUSPENDED | STOPPED | SIGNALING | RESIZING)
        echo "clusterkit: job $other runs this plan already: scancel $other, or plan it anew" >&2
        exit 75 ;;
    "" | *"Invalid job id"* | {over})
        if [ "$(cat "$run/slurm-job")" = "$other" ]; then rm -f "$run/slurm-job"; fi ;;
    *) sleep 5 ;; # Slurm still ends it, or does not answer
    esac
done
# Slurm may start this again: then it goes on as another attempt.
CLUSTERKIT_ATTEMPT="${{CLUSTERKIT_ATTEMPT:-1}}"
while [ -e "$run/attempts/$CLUSTERKIT_ATTEMPT" ]; do
    echo $((CLUSTERKIT_ATTEMPT + 1)) >"$run/attempts/$CLUSTERKIT_ATTEMPT/next"
    CLUSTERKIT_ATTEMPT=$((CLUSTERKIT_ATTEMPT + 1))
done
{token}="${{{token}:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')}}"
{head}=$({address})
export CLUSTERKIT_ATTEMPT {token} {head}
# Slurm's own signals reach ranks and agents alike. This one comes first, to this script alone, and
# is passed on to the agents: they end their ranks in order.
again=
notice() {{
    why="{warned} (time limit, or preemption)"
    if [ -e "$run/stop-$SLURM_JOB_ID" ]; then
        why=$(cat "$run/stop-$SLURM_JOB_ID")
    else
        again={again}
    fi
    nodes=$(squeue --noheader --job="$SLURM_JOB_ID" --format=%D)
    srun --overlap --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpu-bind=none \\
        --gres=none {stop} --reason "$why" &
}}
trap notice USR1
trap : TERM
srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --cpu-bind=none {srun} \\
    {start} &
step=$!
code=0
while kill -0 "$step" 2>/dev/null; do
    wait "$step"
    code=$?
done
if [ ! -e "$run/run.json" ]; then # nobody follows the logs: this was submitted by hand
    tail -v -n 40 "$run"/attempts/*/node-*/log
fi
if [ "$again" ] && [ "$code" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
_OVER = " | ".join(state for state, means in STATES.items() if means.final or state == "PENDING")
"""A job in one of these states has no process."""
_OF_NODE = (
    'scontrol --oneliner show node "$SLURMD_NODENAME" | sed "s/.* NodeAddr=\\([^ ]*\\) .*/\\1/"'
)
_OF_INTERFACE = (
    'ip -4 -oneline address show dev {} | sed -n "s/.* inet \\([0-9.]*\\).*/\\1/p" | head -n 1'
)
_OUTLIVE_NODE_0 = f"""\
trap : TERM
"$@"
code=$?
# The batch script was there, and can neither have the job started again nor end it. What an agent
# says that ended before this one began (its file pid) is of an earlier start of the job.
cd "$0" && ended=$(ls -t attempts/*/node-"$NODE_RANK"/exit.json | head -n 1)
if [ "$ended" -nt "attempts/$CLUSTERKIT_ATTEMPT/node-$NODE_RANK/pid" ] &&
    grep -q "{NODE_0_LOST}" "$ended"; then {{then}}; fi
exit "$code\""""
_AGAIN = 'scontrol requeue "$SLURM_JOB_ID"'
_END = 'echo node 0 was lost >"stop-$SLURM_JOB_ID"; scancel "$SLURM_JOB_ID"'


@dataclass(frozen=True, kw_only=True)
class SlurmPlacement(Placement):
    """Nodes that one ``sbatch`` starts."""

    cluster: SlurmCluster
    options: Mapping[str, str]
    """Options of the batch script besides the entry's own; an empty value: the option has none."""

    def files(self, assembly: Assembly) -> tuple[PlanFile, ...]:
        script = PlanFile(self.places.file("slurm.sh"), self._script(assembly), mode=0o755)
        names = [_VARIABLES.get(name, name) for name in (*self.options, "output", *_UNSET)]
        unset = [f"SBATCH_{name.replace('-', '_').upper()}" for name in dict.fromkeys(names)]
        submit = _SUBMIT.format(
            unset=" ".join(unset),
            script=quote(script.path),
            run=quote(self.places.run_dir),
        )
        return (*assembly.files, script, PlanFile(self.places.file("submit.sh"), submit))

    def steps(self, assembly: Assembly) -> tuple[Step, ...]:
        # Over SSH in a login shell, whose environment the job inherits.
        shell = ("/bin/sh",) if self.hosts[0] == HERE else ("/bin/bash", "-l")
        argv = (*shell, self.places.file("submit.sh"))
        return (Step(kind="run", host=self.hosts[0], argv=argv, secrets=assembly.secrets),)

    def _script(self, assembly: Assembly) -> str:
        entry, run_dir = self.cluster, self.places.run_dir
        output = posixpath.join(run_dir, "slurm-").replace("%", "%%") + "%j.out"
        options = [_option(name, value) for name, value in self.options.items()]
        options += [*entry.options, f"--output={output}", f"--chdir={run_dir}"]
        places = self.places
        folders = (places.run_dir, places.workdir, *(tree.path for tree in self.trees))
        for_srun, before = image(entry, folders, self.device)
        stop = (
            *for_srun, *before, self.places.python, "-I", self.places.file(ARCHIVE), "stop",
            run_dir, "--grace", f"{entry.stop_grace:g}",
        )  # fmt: skip
        srun = [_option(name, self.options[name]) for name in _OF_STEPS if name in self.options]
        # The agents end each other: srun must not kill those of other nodes before they have.
        srun += ["--kill-on-bad-exit=0", "--wait=0", *for_srun]
        begin = f'{NODE_RANK.name}="$SLURM_NODEID"; export {NODE_RANK.name}; '
        if self.torch_elastic:
            begin += f'{NODE_ADDRESS.name}="$({_OF_NODE})"; export {NODE_ADDRESS.name}; '
        lost = _OUTLIVE_NODE_0.format(then=_AGAIN if entry.requeue else _END)
        begin += lost if "no-kill" in self.options else 'exec "$@"'
        interface = entry.interface and _OF_INTERFACE.format(quote(entry.interface))
        return _SCRIPT.format(
            options="".join(f"#SBATCH {_quoted(option)}\n" for option in options),
            setup="".join(f"{line}\n" for line in _setup(entry, self.places.workdir, run_dir)),
            run=quote(run_dir),
            over=_OVER,
            token=PEER_TOKEN,
            head=HEAD.name,
            address=interface or _OF_NODE,
            warned=WARNED,
            again="yes" if entry.requeue else "",
            stop=join(stop),
            nodes=self.launchers,
            srun=join(srun),
            start=join(("/bin/sh", "-c", begin, run_dir, *before, *assembly.command)),
        )


def image(
    entry: SlurmCluster, folders: Iterable[str], device: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what runs a command in the entry's image: options of ``srun``, and a prefix.

    Args:
        folders: the run's, which the image gets.
    """
    if entry.container is None:
        return (), ()
    own = dict.fromkeys(f"{folder}:{folder}" for folder in folders)
    mounts = ",".join((*own, *entry.container_mounts))
    if entry.container_with == "pyxis":
        return (f"--container-image={entry.container}", f"--container-mounts={mounts}"), ()
    gpus = ("--nv",) if device == "cuda" else ()
    return (), ("apptainer", "exec", *gpus, "--bind", mounts, entry.container)


def place(job: JobSpec, cluster: SlurmCluster, facts: Facts, run_id: str) -> SlurmPlacement:
    """Implement `clusterkit.backends.base.Backend.place`."""
    found, host = facts.slurm, facts.hosts[0]
    if found is None:
        raise BadInput("--facts is not from a Slurm cluster", hint="use those of a slurm run")
    least, most = job.node_range
    nodes = most + job.spares
    device, device_origin = device_of(job, [host])
    nproc, nproc_origin = split_gpus(
        job, host, 1, device, place=f"a node of partition {found.partition}", flag="--gpus {0}"
    )
    _check_room(job, found)
    limit, limit_origin = _time(job, cluster, found)
    cpus = cluster.cpus if cluster.cpus != "auto" else host.cpus
    if cluster.cpus == "auto" and device == "cuda":
        cpus = max(1, host.cpus * nproc // len(host.gpus))
    threads, threads_origin = threads_of(job, cpus, nproc)
    if cluster.container is None:  # the packages of an image are not known here
        require_packages(job, host, where="the login node")
    run_dir = posixpath.join(facts.home, "runs", run_id)
    gpus = f"gpu:{nproc}" if device == "cuda" else None
    address = f"of {cluster.interface}" if cluster.interface else "as Slurm knows it"
    watch_port = facts.watch_port or default_ports(facts.port)[1]
    copied, workdir, trees, shipped = project_copies(job, facts, run_dir)
    own = shipped and not {"PYTHONPATH"} & {*job.env, *cluster.env}
    return SlurmPlacement(
        job=copied,
        topology=Topology(least, most, nproc),
        endpoint=Endpoint(HEAD, facts.port, run_id),
        places=NodePaths(run_dir, workdir, host.python, python_origin=host.python_origin),
        device=device,
        threads=threads,
        where=f"in partition {found.partition} of Slurm {found.version}".rstrip(),
        hosts=(host.host,) * nodes,
        names=tuple(f"node-{node}" for node in range(nodes)),
        cluster=cluster,
        network_env=interface_env(cluster.interface) | ({"PYTHONPATH": shipped} if own else {}),
        coordinator=Coordinator(HEAD, watch_port),
        trees=trees,
        notes=(
            Note("device", device, device_origin),
            Note("nproc_per_node", str(nproc), nproc_origin),
            Note("partition", found.partition, _origin(cluster.partition, "partition")),
            Note("cpus_per_node", str(cpus), _origin(cluster.cpus, "cpus")),
            Note("time", limit or "none", limit_origin),
            Note("master_addr", f"${HEAD.name}", f"the allocation's first node, {address}"),
            Note("master_port", str(facts.port), facts.port_origin),
            Note("threads_per_rank", str(threads), threads_origin),
        ),
        options=_options(job, cluster, run_id, cpus=cpus, gpus=gpus, limit=limit),
        tree_python=LOGIN_PYTHON if cluster.container is not None else None,
    )


def _options(
    job: JobSpec,
    cluster: SlurmCluster,
    run_id: str,
    *,
    cpus: int,
    gpus: str | None,
    limit: str | None,
) -> dict[str, str]:
    """Return the options of the batch script; empty: an option without a value."""
    nodes = job.node_range[1]
    outlives_nodes = job.elastic or job.spares > 0
    if cluster.container is not None and cluster.container_with == "pyxis" and outlives_nodes:
        raise BadInput(
            "nodes: a run that survives the loss of a node calls Slurm, which a pyxis image cannot",
            hint=f"--nodes {nodes} without spares, or container_with: apptainer",
            job="spares" if job.spares else "nodes",
        )
    options = {
        "job-name": run_id,
        "nodes": str(nodes + job.spares),
        "ntasks-per-node": "1",
        "cpus-per-task": str(cpus),
        "gres": cluster.gres or gpus,
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "reservation": cluster.reservation,
        "time": limit,
        "exclusive": "" if cluster.exclusive else None,
        "mem": cluster.memory,
        "requeue" if cluster.requeue else "no-requeue": "",
        "open-mode": "append",
        "signal": f"B:USR1@{math.ceil(cluster.notice)}" if cluster.notice else None,
        "no-kill": "" if outlives_nodes else None,
    }
    return {name: value for name, value in options.items() if value is not None}


def _check_room(job: JobSpec, found: SlurmFacts) -> None:
    """Refuse a job that would wait in Slurm's queue for ever, as its partition is too small."""
    most = job.node_range[1]
    room = min(found.nodes, found.most_nodes or found.nodes)
    if most + job.spares > room:
        spares = f" and {pluralize(job.spares, 'spare')}" if job.spares else ""
        raise BadInput(
            f"nodes: {most}{spares} needed, "
            f"partition {found.partition} allows {pluralize(room, 'node')}",
            hint=f"--nodes {room - job.spares}, or another partition"
            if room > job.spares
            else "fewer spares, or another partition",
            job="nodes",
        )


def _time(job: JobSpec, cluster: SlurmCluster, found: SlurmFacts) -> tuple[str | None, str]:
    """Return the time limit for `sbatch`, and where it comes from; None: the partition's."""
    if cluster.time is not None:
        limit, origin = cluster.time, "cluster: time"
    elif job.limit_seconds is not None:
        more = math.ceil(job.limit_seconds / 60) + SLACK_MINUTES
        allowed = more if found.minutes is None else min(more, found.minutes)
        return str(allowed), f"job: time_limit, and {SLACK_MINUTES} minutes more"
    else:
        return None, "the partition's"
    asked = minutes(limit)
    if asked is None:
        raise BadInput(
            f"time: {limit} is not a Slurm time limit",
            hint="minutes, hours:minutes:seconds, days-hours:minutes:seconds",
            cluster="time",
        )
    if found.minutes is not None and asked > found.minutes:
        raise BadInput(
            f"time: {limit} is more than partition {found.partition} allows "
            f"({found.minutes} minutes)",
            hint=f"time: {found.minutes}, or another partition",
            cluster="time",
        )
    return limit, origin


def _setup(cluster: SlurmCluster, workdir: str, run_dir: str) -> tuple[str, ...]:
    """Return the lines of shell that prepare the ranks' environment, in the ranks' folder."""
    loads = [join(("module", "load", name)) for name in cluster.modules]
    if loads:
        loads.insert(0, "command -v module >/dev/null || . /etc/profile")
    if not cluster.setup:
        return tuple(loads)
    back = ("set +eux +o pipefail", join(("cd", run_dir)))
    return (*loads, f"{join(('cd', workdir))} || exit 73", *cluster.setup, *back)


def _origin(value: object, key: str) -> str:
    return f"cluster: {key}" if value not in (None, "auto") else "Slurm's"


def _option(name: str, value: str) -> str:
    return f"--{name}={value}" if value else f"--{name}"


def _quoted(option: str) -> str:
    """Quote an option for ``#SBATCH``, which reads words as a shell does, but for backslashes.

    Raises:
        BadInput: the option has a line break or a backslash.
    """
    if "\n" in option or "\\" in option:
        raise BadInput(f"{option!r}: sbatch cannot be given a line break or a backslash")
    return quote(option)
