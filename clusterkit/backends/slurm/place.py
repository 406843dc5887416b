"""How a job's nodes become one allocation of Slurm: its batch script. Pure."""

from __future__ import annotations

import math
import posixpath
from dataclasses import dataclass

from clusterkit.agent import PEER_TOKEN
from clusterkit.agent.archive import ARCHIVE
from clusterkit.assemble import Assembly, Placement, Places, Watching, require_packages
from clusterkit.backends.placing import (
    copies,
    device_of,
    divided_gpus,
    interface_env,
    own_ports,
    threads_of,
)
from clusterkit.backends.slurm.probe import minutes
from clusterkit.backends.slurm.queue import HERE, LOGIN_PYTHON, WARNED
from clusterkit.cluster import Facts, SlurmCluster, SlurmFacts
from clusterkit.errors import BadInput, counted
from clusterkit.plan import Note, PlanFile, Step
from clusterkit.rendezvous import NODE_ADDRESS, NODE_RANK, Endpoint, Topology
from clusterkit.shell import Var, join, quote
from clusterkit.spec import JobSpec

HEAD = Var("CLUSTERKIT_HEAD")
"""Address of the allocation's first node; the batch script, which runs there, finds it out."""
SLACK_MINUTES = 5
"""More than the job's own time limit, so that Slurm is not the one to end it."""
_VARIABLES = {"time": "timelimit", "mem": "mem_per_node"}
"""Options whose variables sbatch calls otherwise."""
_OURS = (
    "job_name", "gres", "output", "error", "signal", "requeue", "no_requeue", "export",
    "array_inx", "wait",
)  # fmt: skip
_SUBMIT = """\
#!/bin/sh
# Variables of the submitter's would win over the options in slurm.sh.
{unset}job=$(sbatch --parsable {script}) || exit
echo "${{job%%;*}}" >{run}/job-"${{CLUSTERKIT_ATTEMPT:-1}}"
"""
_SCRIPT = """\
#!/bin/bash
{options}{setup}set -u
run={run}
# Slurm may start this again: then it goes on as another attempt.
CLUSTERKIT_ATTEMPT="${{CLUSTERKIT_ATTEMPT:-1}}"
while [ -e "$run/attempts/$CLUSTERKIT_ATTEMPT" ]; do
    echo $((CLUSTERKIT_ATTEMPT + 1)) >"$run/attempts/$CLUSTERKIT_ATTEMPT/next"
    CLUSTERKIT_ATTEMPT=$((CLUSTERKIT_ATTEMPT + 1))
done
{token}="${{{token}:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')}}"
{address}export CLUSTERKIT_ATTEMPT {token} {head}
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
    srun --overlap {shape} --gres=none \\
        {stop} --reason "$why" &
}}
trap notice USR1
trap : TERM
srun {shape} {srun} \\
    {start} &
step=$!
code=0
while kill -0 "$step" 2>/dev/null; do
    wait "$step"
    code=$?
done
if [ "$again" ] && [ "$code" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


@dataclass(frozen=True, kw_only=True)
class SlurmPlacement(Placement):
    """Nodes that one ``sbatch`` starts."""

    options: tuple[str, ...]
    """Of the batch script."""
    step_options: tuple[str, ...]
    """Of the step that starts the agents: since 22.05 it has not all of the job's by itself."""
    unset: tuple[str, ...]
    setup: tuple[str, ...]
    image: tuple[tuple[str, ...], tuple[str, ...]]
    """What starts a command in the entry's image: options of ``srun``, and words before it."""
    interface: str
    requeue: bool

    def files(self, assembly: Assembly) -> tuple[PlanFile, ...]:
        script = PlanFile(self.places.file("slurm.sh"), self._script(assembly), mode=0o755)
        submit = _SUBMIT.format(
            unset=f"unset {' '.join(self.unset)}\n" if self.unset else "",
            script=quote(script.path),
            run=quote(self.places.run_dir),
        )
        return (*assembly.files, script, PlanFile(self.places.file("submit.sh"), submit))

    def steps(self, assembly: Assembly) -> tuple[Step, ...]:
        # Over SSH as in a login shell: its environment is what the job inherits.
        shell = ("/bin/sh",) if self.hosts[0] == HERE else ("/bin/bash", "-l")
        argv = (*shell, self.places.file("submit.sh"))
        return (Step(kind="run", host=self.hosts[0], argv=argv, secrets=assembly.secrets),)

    def _script(self, assembly: Assembly) -> str:
        nodes = str(self.launchers)
        shape = (f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpu-bind=none")
        own = 'scontrol --oneliner show node "$1" | sed "s/.* NodeAddr=\\([^ ]*\\) .*/\\1/"'
        start = f'{NODE_RANK.name}="$SLURM_NODEID"; export {NODE_RANK.name}; exec "$@"'
        if self.topology.elastic:
            start = f'set -- "$SLURMD_NODENAME" "$@"; {NODE_ADDRESS.name}="$({own})"; '
            start += f"export {NODE_ADDRESS.name}; shift; "
            start += f'{NODE_RANK.name}="$SLURM_NODEID"; export {NODE_RANK.name}; exec "$@"'
        # The agents end each other; srun is not to end those of other nodes before they have.
        contained, before = self.image
        srun = (*self.step_options, "--kill-on-bad-exit=0", "--wait=0", *contained)
        stop = (
            *contained, *before, self.places.python, "-I", self.places.file(ARCHIVE), "stop",
            self.places.run_dir, "--grace", f"{self.stop_grace:g}",
        )  # fmt: skip
        head = f'{HEAD.name}=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        head += f'set -- "${HEAD.name}"\n{HEAD.name}=$({own})\n'
        if self.interface:
            shown = f"ip -4 -oneline address show dev {quote(self.interface)}"
            head = (
                f'{HEAD.name}=$({shown} | sed -n "s/.* inet \\([0-9.]*\\).*/\\1/p" | head -n 1)\n'
            )
        return _SCRIPT.format(
            options="".join(f"#SBATCH {option}\n" for option in self.options),
            run=quote(self.places.run_dir),
            setup="".join(f"{line}\n" for line in self.setup),
            token=PEER_TOKEN,
            address=head,
            head=HEAD.name,
            warned=WARNED,
            again="yes" if self.requeue else "",
            stop=join(stop),
            shape=join(shape),
            srun=join(srun),
            start=join((*before, "/bin/sh", "-c", start, "sh", *assembly.command)),
        )


def place(job: JobSpec, cluster: SlurmCluster, facts: Facts, run_id: str) -> SlurmPlacement:
    """As `clusterkit.backends.base.Backend.place`."""
    found, host = facts.slurm, facts.hosts[0]
    if found is None:
        raise BadInput("facts: no partition is named", hint="use those of a slurm run")
    least, most = job.node_range
    device, device_origin = device_of(job, [host])
    nproc, nproc_origin = divided_gpus(
        job, host, 1, device, place=f"a node of partition {found.partition}", flag="--gpus {0}"
    )
    _check_room(most, found)
    limit, limit_origin = _time(job, cluster, found)
    cpus = cluster.cpus if cluster.cpus != "auto" else host.cpus
    if cluster.cpus == "auto" and device == "cuda":
        cpus = max(1, host.cpus * nproc // len(host.gpus))
    threads, threads_origin = threads_of(job, cpus, nproc)
    if cluster.container is None:  # what is in an image only a node could say
        require_packages(job, host, where="the login node")
    run_dir = posixpath.join(facts.home, "runs", run_id)
    topology = Topology(least, most, nproc)
    if cluster.container is not None and topology.elastic:
        raise BadInput(
            "nodes: an elastic run asks Slurm for each node's address, which an image cannot",
            hint=f"--nodes {most}, or an entry without `container`",
            job="nodes",
        )
    gres = cluster.gres or (f"gpu:{nproc}" if device == "cuda" else None)
    step = [f"--cpus-per-task={cpus}", *([f"--gres={gres}"] if gres else [])]
    asked = {
        "partition": cluster.partition, "account": cluster.account, "qos": cluster.qos,
        "constraint": cluster.constraint, "reservation": cluster.reservation, "time": limit,
        "exclusive": "" if cluster.exclusive else None, "mem": cluster.memory,
    }  # fmt: skip
    given = {name: value for name, value in asked.items() if value is not None}
    options = [f"--job-name={run_id}", f"--nodes={most}", "--ntasks-per-node=1", *step]
    options += [f"--{name}={value}" if value else f"--{name}" for name, value in given.items()]
    options += ["--requeue" if cluster.requeue else "--no-requeue", "--open-mode=append"]
    options += [f"--signal=B:USR1@{math.ceil(cluster.notice)}"] if cluster.notice else []
    options += ["--no-kill"] if topology.elastic else []
    options = [_option(option) for option in (*options, *cluster.options)]
    output = posixpath.join(run_dir, "slurm-").replace("%", "%%") + "%j.out"
    options += [_option(f"--output={output}"), _option(f"--chdir={run_dir}")]
    address = f"of {facts.interface}" if facts.interface else "as Slurm knows it"
    watch_port = facts.watch_port or own_ports(facts.port)[1]
    copied, workdir, trees, shipped = copies(job, facts, run_dir)
    own = shipped and not {"PYTHONPATH"} & {*job.env, *cluster.env}
    return SlurmPlacement(
        job=copied,
        topology=topology,
        endpoint=Endpoint(HEAD, facts.port, run_id),
        places=Places(run_dir, workdir, host.python, python_origin=host.python_origin),
        device=device,
        threads=threads,
        where=f"in partition {found.partition} of Slurm {found.version}".rstrip(),
        hosts=(host.host,) * most,
        names=tuple(f"node-{node}" for node in range(most)),
        cluster_env=cluster.env,
        network_env=interface_env(cluster.interface) | ({"PYTHONPATH": shipped} if own else {}),
        stop_grace=cluster.stop_grace,
        lost_after=cluster.lost_after,
        watching=Watching(HEAD, watch_port, cluster.lost_after),
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
        options=tuple(options),
        step_options=tuple(step),
        unset=tuple(f"SBATCH_{_VARIABLES.get(name, name).upper()}" for name in (*given, *_OURS)),
        setup=_setup(cluster),
        image=_container(cluster, device, (run_dir, workdir, *[tree.path for tree in trees])),
        tree_python=LOGIN_PYTHON if cluster.container is not None else None,
        interface=facts.interface,
        requeue=cluster.requeue,
    )


def _check_room(nodes: int, found: SlurmFacts) -> None:
    """Refuse what Slurm would let wait for ever."""
    room = min(found.nodes, found.most_nodes or found.nodes)
    if nodes > room:
        raise BadInput(
            f"nodes: {nodes} are wanted, partition {found.partition} gives {counted(room, 'node')}",
            hint=f"--nodes {room}, or another partition",
            job="nodes",
        )


def _time(job: JobSpec, cluster: SlurmCluster, found: SlurmFacts) -> tuple[str | None, str]:
    """The job's time limit as `sbatch` takes it, and where it comes from."""
    if cluster.time is not None:
        limit, origin = cluster.time, "cluster: time"
    elif job.limit_seconds is not None:
        more = math.ceil(job.limit_seconds / 60) + SLACK_MINUTES
        fits = more if found.minutes is None else min(more, found.minutes)
        return str(fits), f"job: time_limit, and {SLACK_MINUTES} minutes more"
    else:
        return None, "the partition's"
    asked = minutes(limit)
    if asked is None:
        raise BadInput(
            f"time: {limit} is not a time of Slurm's",
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


def _setup(cluster: SlurmCluster) -> tuple[str, ...]:
    """What prepares the environment that the ranks inherit."""
    loads = [join(("module", "load", name)) for name in cluster.modules]
    if loads:
        loads.insert(0, "command -v module >/dev/null || . /etc/profile")
    return (*loads, *cluster.setup)


def _container(
    cluster: SlurmCluster, device: str, folders: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """As `SlurmPlacement.image`."""
    if cluster.container is None:
        return (), ()
    own = dict.fromkeys(f"{folder}:{folder}" for folder in folders)
    mounts = ",".join((*own, *cluster.container_mounts))
    if cluster.container_with == "pyxis":
        return (f"--container-image={cluster.container}", f"--container-mounts={mounts}"), ()
    gpus = ("--nv",) if device == "cuda" else ()
    return (), ("apptainer", "exec", *gpus, "--bind", mounts, cluster.container)


def _origin(value: object, key: str) -> str:
    return f"cluster: {key}" if value not in (None, "auto") else "Slurm's"


def _option(text: str) -> str:
    """An option as ``#SBATCH`` reads it: as a shell would, but for backslashes.

    Raises:
        BadInput: a line cannot hold it.
    """
    if "\n" in text or "\\" in text:
        raise BadInput(f"{text!r}: sbatch cannot be given a line break or a backslash")
    return quote(text)
