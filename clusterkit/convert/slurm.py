"""Slurm batch scripts: ``#SBATCH`` lines, set-up commands, the ``srun`` line. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from clusterkit import shell
from clusterkit.convert import lines
from clusterkit.convert.draft import Draft, shown, unknown_in, variable
from clusterkit.convert.options import apply_option, assigned, job_name
from clusterkit.convert.script import Script, left
from clusterkit.convert.shell_text import Command
from clusterkit.jobfile.command import Used, options
from clusterkit.jobfile.command import read as read_line
from clusterkit.jobfile.launcher_options import AGAIN, PASSED, SBATCH, SPECIAL, SRUN, Tool

_DIRECTIVE = re.compile(r"#SBATCH\s+(.*)")
_GPUS = re.compile(r"\bgpu(?::[^:,]+)??(?::(\d+))?(?:,|$)")
_BY_ITSELF = ("container-mounts", "export", "chdir", "job-name", "signal", "exclusive")
Asked = dict[str, tuple[str, str, str]]
"""Options about nodes, tasks and GPUs by name: value, as written, place."""


def script(draft: Draft, text: str, words: Sequence[str]) -> None:
    """Convert a script, with or without ``#SBATCH`` lines."""
    slurm = re.search(r"^#SBATCH\b", text, re.MULTILINE) is not None
    batch = _Batch(draft, slurm)
    if slurm:
        draft.cluster["backend"] = draft.cluster_name = "slurm"
        batch.directives(text)
    batch.shape(batch.asked)
    reader = Script(
        draft,
        batch.variables() if slurm else {},
        lambda draft, words: batch.launch(reader, words),
        _set_up if slurm else left("run it yourself before you submit"),
    )
    reader.read(text)
    if not reader.launched and not draft.refused:
        draft.at = ""
        draft.refuse(draft.name, "no line starts ranks: srun, torchrun, deepspeed, python, ...")
    if slurm and draft.job.get("launcher") == "mpirun":
        draft.refuse("mpirun", "on Slurm clusterkit starts the ranks itself: leave mpirun out")


class _Batch:
    """The ``#SBATCH`` and ``srun`` options of a script, interpreted together."""

    def __init__(self, draft: Draft, slurm: bool) -> None:
        self.draft = draft
        self.slurm = slurm
        self.asked: Asked = {}

    def directives(self, text: str) -> None:
        """Convert the ``#SBATCH`` lines in front of the first command."""
        draft, begun = self.draft, False
        for number, line in enumerate(text.splitlines(), 1):
            if match := _DIRECTIVE.match(line):
                draft.at = f"{draft.name}:{number}"
                if begun:
                    draft.drop(line.strip(), "Slurm ignores #SBATCH lines after the first command")
                    continue
                comment = re.split(r"\s#", match[1])[0].strip()
                for word in self.options(SBATCH, draft.words("#SBATCH", comment), self.asked):
                    draft.refuse(word, "not an option of sbatch")
            begun = begun or not re.match(r"\s*(#|$)", line)

    def options(self, tool: Tool, words: list[str], asked: Asked) -> list[str]:
        """Convert options of sbatch or srun. Return the words after them."""
        found, rest = options(tool, words, "srun" if tool is SRUN else "sbatch")
        for used in found:
            name = used.name.removeprefix("--")
            if used.meaning != SPECIAL or name in _BY_ITSELF:
                _option(self.draft, name, used)
                continue
            previous, here = asked.get(name), self.draft.at
            asked[name] = (used.value, used.written, here)
            if previous is not None:
                self.draft.at = previous[2]
                self.draft.drop(previous[1], AGAIN[1:])
                self.draft.at = here
        return rest

    @property
    def nodes(self) -> int:
        return int(self.draft.job.get("nodes", 1))

    @property
    def tasks(self) -> int:
        """Tasks per node."""
        for name, nodes in (("ntasks-per-node", 1), ("ntasks", self.nodes)):
            if name in self.asked and (value := self.asked[name][0]).isdecimal():
                return max(1, int(value) // nodes)
        return 1

    def shape(self, asked: Asked) -> None:
        """Convert nodes, GPUs and cores."""
        draft = self.draft
        if "nodes" in asked:
            value, written, draft.at = asked["nodes"]
            low, dash, high = value.partition("-")
            if not dash or low == high:
                draft.number(written, "nodes", low)
            else:
                why = f'an elastic number is `nodes: "{low}:{high}"` in the job file'
                draft.refuse(written, why)
        for name in ("gres", "gpus-per-node"):
            if name in asked:
                value, written, draft.at = asked[name]
                draft.entry(written, "gres", value if name == "gres" else f"gpu:{value}")
        nodes, tasks = self.nodes, self.tasks
        for name, times in (("gpus", 1), ("gpus-per-task", nodes * tasks)):
            if name in asked and "gres" not in draft.cluster:
                value, written, draft.at = asked[name]
                kind, _, text = value.rpartition(":")
                if (count := draft.integer(written, text)) is None:
                    continue
                if count * times % nodes:
                    draft.refuse(written, f"{value} GPUs cannot be divided among {nodes} nodes")
                    continue
                each = f"{count * times // nodes}"
                draft.entry(written, "gres", ":".join(filter(None, ["gpu", kind, each])))
        if "cpus-per-task" in asked:
            value, written, draft.at = asked["cpus-per-task"]
            if (cpus := draft.integer(written, value)) is not None:
                all_of = f"cluster entry, cpus: {cpus * tasks}, of {tasks} tasks"
                draft.entry(written, "cpus", cpus * tasks, "" if tasks == 1 else all_of)
        draft.at = ""

    def variables(self) -> dict[str, str]:
        """Return the SLURM_* variables that follow from the options."""
        nodes, tasks, entry = self.nodes, self.tasks, self.draft.cluster
        found = {
            "SLURM_JOB_NUM_NODES": nodes, "SLURM_NNODES": nodes, "SLURM_NTASKS": nodes * tasks,
            "SLURM_NPROCS": nodes * tasks, "SLURM_NTASKS_PER_NODE": tasks,
        }  # fmt: skip
        if "cpus-per-task" in self.asked:
            found["SLURM_CPUS_PER_TASK"] = int(entry.get("cpus", tasks)) // tasks
        if match := _GPUS.search(str(entry.get("gres", ""))):
            gpus = int(match[1] or 1)
            found |= dict.fromkeys(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), gpus)
            found["SLURM_GPUS"] = gpus * nodes
        known = {name: str(value) for name, value in found.items()}
        if "name" in self.draft.job:
            known["SLURM_JOB_NAME"] = self.draft.job["name"]
        return known

    def launch(self, reader: Script, words: Sequence[str]) -> None:
        """Convert the line that starts the ranks: ``srun ...``, or a launcher alone."""
        rest = list(words)
        while rest and (match := re.match(rf"({shell.NAME})=(.*)\Z", rest[0], re.DOTALL)):
            assigned(self.draft, rest.pop(0), match[1], match[2])
        by_srun = bool(rest) and rest[0].rpartition("/")[2] == "srun"
        if by_srun and not self.slurm:  # to be run within `salloc`, say
            why = "how many nodes and tasks its job has is not said: begin the script with #SBATCH"
            self.draft.refuse(shown(rest[0]), f"{why} lines")
            return
        if by_srun:
            step: Asked = {}
            rest = self.options(SRUN, rest[1:], step)
            for name in step:
                self._same(name, step)
        reader.start(rest, lambda draft, words: self._ranks(words, by_srun))

    def _same(self, name: str, step: Asked) -> None:
        """Convert an option of srun that sbatch also has."""
        draft, before, (value, written, _) = self.draft, self.asked.get(name), step[name]
        total = {"nodes": self.nodes, "ntasks": self.nodes * self.tasks,
                 "ntasks-per-node": self.tasks}  # fmt: skip
        if unknown_in(value):
            draft.drop(written, "all nodes of the job")
        elif (before is not None and before[0] == value) or str(total.get(name)) == value:
            draft.drop(written, "same as the #SBATCH lines")
        elif before is not None or name == "nodes":
            became = before[1] if before else "1 node"
            draft.refuse(written, f"the job's #SBATCH lines say {became}")
        else:
            self.asked[name] = step[name]
            if name.startswith("ntasks"):
                draft.note(written, "read together with the launcher", "job")
            else:
                self.shape({name: step[name]})

    def _ranks(self, words: Sequence[str], by_srun: bool) -> None:
        """Convert the command that the tasks run."""
        # As the batch script says it, not the launcher, whose `--nnodes` may be a range.
        draft, rest, tasks = self.draft, list(words), self.tasks
        for name in ("SLURM_JOB_ID", "SLURM_JOBID"):
            rest = [word.replace(variable(name), "${clusterkit.run_id}") for word in rest]
        if not self.slurm or not by_srun:
            lines.convert(draft, rest, ranks=1)
        else:
            launcher = bool(rest) and read_line(rest).tool is not None
            if launcher and tasks > 1:
                draft.refuse(shown(rest[0]), f"srun starts it {tasks} times on each node")
            ranks = None if launcher else tasks
            lines.convert(draft, rest, ranks=ranks, inside="container" in draft.cluster)
            if not launcher and rest:
                draft.todo("srun", "ranks read RANK, LOCAL_RANK and WORLD_SIZE, not SLURM_PROCID")
        for name in ("ntasks", "ntasks-per-node"):
            if name in self.asked:
                _, written, draft.at = self.asked[name]
                ranks = draft.job.get("gpus_per_node")
                draft.note(written, f"gpus_per_node: {ranks}" if not self.slurm
                           or ranks == tasks else "one agent on each node starts its ranks",
                           "job")  # fmt: skip


def _option(draft: Draft, name: str, used: Used) -> None:
    """Convert an option that is independent of the others."""
    value, written = used.value, used.written
    if used.meaning not in (SPECIAL, PASSED):
        apply_option(draft, used)
    elif name == "container-mounts":
        for mount in value.split(","):
            draft.append(written, "container_mounts", mount)
    elif name == "export":
        _exported(draft, value, written)
    elif name == "chdir":
        if value in (".", "./"):
            draft.drop(written, "ranks start where the program is found")
        else:
            draft.key(written, "workdir", value)
    elif name == "job-name":
        draft.key(written, "name", job_name(value))
    elif name == "signal":
        _signal(draft, value, written)
    elif name == "exclusive" and value == "":
        draft.entry(written, name, True)
    elif name[:1].isalpha():
        draft.append(written, "options", f"--{name}={value}" if value else f"--{name}")
    else:
        draft.refuse(written, "sbatch has no such option")


def _signal(draft: Draft, value: str, written: str) -> None:
    match = re.fullmatch(r"(?:[BR]+:)?(?:SIG)?(\w+)(?:@(\d+))?", value)
    if match is None:
        draft.refuse(written, f"{value} is no signal")
        return
    draft.entry(written, "notice", int(match[2] or 60))
    if match[1] not in ("TERM", "15"):
        draft.todo(written, f"the ranks get SIGTERM then, not {match[1]}")


def _exported(draft: Draft, value: str, written: str) -> None:
    for part in value.split(","):
        name, equals, text = part.partition("=")
        if equals:
            assigned(draft, written, name, text)
        elif part in ("ALL", ""):
            draft.drop(written, "ranks inherit the batch script's environment")
        elif part in ("NONE", "NIL"):
            draft.refuse(written, "ranks inherit the environment in which you submit")
        else:
            draft.secret(written, part)


def _set_up(draft: Draft, command: Command) -> None:
    """Convert a set-up command; the first node runs it before the agents start."""
    raw = shown(command.raw)
    if command.name == "module" and command.words[1:2] in (["load"], ["add"]):
        for name in command.words[2:]:
            draft.append(f"module load {name}", "modules", name)
        return
    draft.cluster.setdefault("setup", []).append(raw)
    draft.note(raw.partition("\n")[0], "cluster entry, setup", "cluster")
    if re.search(r"\b(activate|conda)\b", raw):
        draft.todo(raw, "submit with that environment active, or set `python:` of the entry: it "
                    "runs the ranks")  # fmt: skip
