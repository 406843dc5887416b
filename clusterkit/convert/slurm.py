"""A batch script of Slurm: its ``#SBATCH`` lines, what it sets up, and its ``srun`` line. Pure.

Sources: sbatch(1) and srun(1) of Slurm 24.11; pyxis for ``--container-*``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from clusterkit import shell
from clusterkit.command import read as read_line
from clusterkit.convert import lines
from clusterkit.convert.options import assigned, job_name
from clusterkit.convert.script import Script, left
from clusterkit.convert.sheet import LOGS, Sheet, shown, unknown_in, variable
from clusterkit.convert.shell_text import Command

_DIRECTIVE = re.compile(r"#SBATCH\s+(.*)")
_SHORT = {
    "A": "account", "p": "partition", "q": "qos", "C": "constraint", "t": "time", "J": "job-name",
    "N": "nodes", "n": "ntasks", "c": "cpus-per-task", "o": "output", "e": "error", "D": "chdir",
    "G": "gpus", "w": "nodelist", "x": "exclude", "d": "dependency", "a": "array", "L": "licenses",
    "M": "clusters", "s": "oversubscribe", "k": "no-kill", "H": "hold", "i": "input", "W": "wait",
    "Q": "quiet", "v": "verbose", "O": "overcommit", "m": "distribution", "S": "core-spec",
    "B": "extra-node-info", "b": "begin", "F": "nodefile", "l": "label", "u": "unbuffered",
    "K": "kill-on-bad-exit", "r": "relative", "Z": "no-allocate", "T": "threads",
}  # fmt: skip
_FLAGS = frozenset(
    {"exclusive", "requeue", "no-requeue", "oversubscribe", "no-kill", "hold", "wait", "quiet",
     "verbose", "overcommit", "contiguous", "spread-job", "use-min-nodes", "reboot", "parsable",
     "label", "unbuffered", "kill-on-bad-exit", "overlap", "exact", "pty", "multi-prog",
     "container-mount-home", "no-container-mount-home", "container-writable",
     "container-remap-root", "no-container-remap-root", "container-readonly",
     "container-entrypoint", "no-container-entrypoint", "get-user-env", "ignore-pbs",
     "gres-flags", "propagate", "export"}
)  # fmt: skip
"""Options that may stand without a value, or have it behind ``=`` alone."""
_ENTRY = ("account", "partition", "qos", "constraint", "reservation", "time")
_LOGS = frozenset(
    {"output", "error", "open-mode", "input", "label", "unbuffered", "quiet", "verbose"}
)
_OURS = frozenset(
    {"no-kill", "kill-on-bad-exit", "wait", "parsable", "overlap", "exact", "jobid", "job-id",
     "cpu-bind", "mpi", "get-user-env", "spread-job", "gpu-bind", "mem-bind", "accel-bind",
     "ntasks-per-gpu", "ntasks-per-core", "ntasks-per-socket", "relative", "overcommit"}
)  # fmt: skip
_REFUSED = {
    "array": "submit the job once for each value: --set args=...",
    "wrap": "convert the command itself",
    "multi-prog": "all ranks of a job run the same",
    "pty": "a run has no terminal",
    "cpus-per-gpu": "`cpus` of the cluster's entry counts for a node",
    "mem-per-cpu": "`memory` of the cluster's entry counts for a node: --mem",
    "mem-per-gpu": "`memory` of the cluster's entry counts for a node: --mem",
    "clusters": "a run stays on one cluster",
}
_GPUS = re.compile(r"\bgpu(?::[^:,]+)??(?::(\d+))?(?:,|$)")
Asked = dict[str, tuple[str, str, str]]
"""Options about nodes, tasks and GPUs: value, as written, place."""
_ASKED = frozenset(
    {"nodes", "ntasks", "ntasks-per-node", "gpus", "gpus-per-node", "gpus-per-task", "gres",
     "cpus-per-task"}
)  # fmt: skip


def script(sheet: Sheet, text: str, words: Sequence[str]) -> None:
    """A script, with or without ``#SBATCH`` lines."""
    slurm = re.search(r"^#SBATCH\b", text, re.MULTILINE) is not None
    batch = _Batch(sheet, slurm)
    if slurm:
        sheet.cluster["backend"] = sheet.cluster_name = "slurm"
        batch.directives(text)
    batch.shape(batch.asked)
    reader = Script(
        sheet,
        batch.variables() if slurm else {},
        lambda sheet, words: batch.launch(reader, words),
        _set_up if slurm else left("run it yourself before you submit"),
    )
    reader.read(text)
    if not reader.launched and not sheet.refused:
        sheet.at = ""
        sheet.refuse(sheet.name, "no line starts ranks: srun, torchrun, deepspeed, python, ...")
    if slurm and sheet.job.get("launcher") == "mpirun":
        sheet.refuse("mpirun", "on Slurm clusterkit starts the ranks itself: leave mpirun out")


class _Batch:
    """A script's options, and what they mean together."""

    def __init__(self, sheet: Sheet, slurm: bool) -> None:
        self.sheet = sheet
        self.slurm = slurm
        self.asked: Asked = {}

    def directives(self, text: str) -> None:
        """The ``#SBATCH`` lines, which end with the first command."""
        sheet = self.sheet
        for number, line in enumerate(text.splitlines(), 1):
            if match := _DIRECTIVE.match(line):
                sheet.at = f"{sheet.name}:{number}"
                comment = re.split(r"\s#", match[1])[0].strip()
                for word in self.options(sheet.words("#SBATCH", comment), self.asked, job=True):
                    sheet.refuse(word, "not an option of sbatch")
            elif line.strip() and not line.startswith("#"):
                break

    def options(self, words: list[str], asked: Asked, *, job: bool) -> list[str]:
        """Options of sbatch, or of srun; gives the words behind them."""
        rest = list(words)
        while rest and rest[0].startswith("-") and rest[0] != "-":
            word = rest.pop(0)
            if word == "--":
                break
            written = word
            if word.startswith("--"):
                name, equals, value = word[2:].partition("=")
                takes = not equals and name not in _FLAGS
            else:
                name, value = _SHORT.get(word[1], word[1]), word[2:].removeprefix("=")
                takes = not value and name not in _FLAGS
            if takes and rest:
                value = rest.pop(0)
                written = f"{word} {value}"
            name = name.replace("_", "-")
            if name in _ASKED:
                asked[name] = (value, written, self.sheet.at)
            else:
                _option(self.sheet, name, value, written, job)
        return rest

    @property
    def nodes(self) -> int:
        return int(self.sheet.job.get("nodes", 1))

    @property
    def tasks(self) -> int:
        """Of a node."""
        for name, nodes in (("ntasks-per-node", 1), ("ntasks", self.nodes)):
            if name in self.asked and (value := self.asked[name][0]).isdecimal():
                return max(1, int(value) // nodes)
        return 1

    def shape(self, asked: Asked) -> None:
        """Nodes, GPUs and cores."""
        sheet = self.sheet
        if "nodes" in asked:
            value, written, sheet.at = asked["nodes"]
            low, dash, high = value.partition("-")
            if not dash or low == high:
                sheet.number(written, "nodes", low)
            else:
                why = f'an elastic number is `nodes: "{low}:{high}"` in the job file'
                sheet.refuse(written, why)
        for name in ("gres", "gpus-per-node"):
            if name in asked:
                value, written, sheet.at = asked[name]
                sheet.entry(written, "gres", value if name == "gres" else f"gpu:{value}")
        nodes, tasks = self.nodes, self.tasks
        for name, times in (("gpus", 1), ("gpus-per-task", nodes * tasks)):
            if name in asked and "gres" not in sheet.cluster:
                value, written, sheet.at = asked[name]
                kind, _, text = value.rpartition(":")
                if (count := sheet.whole(written, text)) is None:
                    continue
                if count * times % nodes:
                    sheet.refuse(written, f"{value} GPUs cannot be divided among {nodes} nodes")
                    continue
                each = f"{count * times // nodes}"
                sheet.entry(written, "gres", ":".join(filter(None, ["gpu", kind, each])))
        if "cpus-per-task" in asked:
            value, written, sheet.at = asked["cpus-per-task"]
            if (cpus := sheet.whole(written, value)) is not None:
                all_of = f"cluster entry, cpus: {cpus * tasks}, of {tasks} tasks"
                sheet.entry(written, "cpus", cpus * tasks, "" if tasks == 1 else all_of)
        sheet.at = ""

    def variables(self) -> dict[str, str]:
        """What Slurm sets, as far as the options say it."""
        nodes, tasks, entry = self.nodes, self.tasks, self.sheet.cluster
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
        if "name" in self.sheet.job:
            known["SLURM_JOB_NAME"] = self.sheet.job["name"]
        return known

    def launch(self, reader: Script, words: Sequence[str]) -> None:
        """The line that starts the ranks: ``srun ...``, or a launcher by itself."""
        rest = list(words)
        while rest and (match := re.match(rf"({shell.NAME})=(.*)\Z", rest[0], re.DOTALL)):
            assigned(self.sheet, rest.pop(0), match[1], match[2])
        by_srun = bool(rest) and rest[0].rpartition("/")[2] == "srun"
        if by_srun and not self.slurm:  # to be run within `salloc`, say
            why = "how many nodes and tasks its job has is not said: begin the script with #SBATCH"
            self.sheet.refuse(shown(rest[0]), f"{why} lines")
            return
        if by_srun:
            step: Asked = {}
            rest = self.options(rest[1:], step, job=False)
            for name in step:
                self._same(name, step)
        reader.start(rest, lambda sheet, words: self._ranks(words, by_srun))

    def _same(self, name: str, step: Asked) -> None:
        """An option of srun that sbatch has as well."""
        sheet, before, (value, written, _) = self.sheet, self.asked.get(name), step[name]
        total = {"nodes": self.nodes, "ntasks": self.nodes * self.tasks,
                 "ntasks-per-node": self.tasks}  # fmt: skip
        if unknown_in(value):
            sheet.drop(written, "as many as the job has")
        elif (before is not None and before[0] == value) or str(total.get(name)) == value:
            sheet.drop(written, "the job's #SBATCH lines say the same")
        elif before is not None or name == "nodes":
            said = before[1] if before else "1 node"
            sheet.refuse(written, f"the job's #SBATCH lines say {said}")
        else:
            self.asked[name] = step[name]
            if name.startswith("ntasks"):
                sheet.note(written, "read together with the launcher", "job")
            else:
                self.shape({name: step[name]})

    def _ranks(self, words: Sequence[str], by_srun: bool) -> None:
        """What the tasks run."""
        # As the batch script says it, not the launcher, whose `--nnodes` may be a range.
        sheet, rest, tasks = self.sheet, list(words), self.tasks
        for name in ("SLURM_JOB_ID", "SLURM_JOBID"):
            rest = [word.replace(variable(name), "${clusterkit.run_id}") for word in rest]
        if not self.slurm or not by_srun:
            lines.convert(sheet, rest, ranks=1)
        else:
            launcher = bool(rest) and read_line(rest).tool is not None
            if launcher and tasks > 1:
                sheet.refuse(shown(rest[0]), f"srun starts it {tasks} times on each node")
            ranks = None if launcher else tasks
            lines.convert(sheet, rest, ranks=ranks, inside="container" in sheet.cluster)
            if not launcher and rest:
                sheet.yours("srun", "ranks read RANK, LOCAL_RANK and WORLD_SIZE, not SLURM_PROCID")
        for name in ("ntasks", "ntasks-per-node"):
            if name in self.asked:
                _, written, sheet.at = self.asked[name]
                ranks = sheet.job.get("gpus_per_node")
                sheet.note(written, f"gpus_per_node: {ranks}" if not self.slurm
                           or ranks == tasks else "one agent on each node starts its ranks",
                           "job")  # fmt: skip


def _option(sheet: Sheet, name: str, value: str, written: str, job: bool) -> None:
    """One that means something by itself."""
    if name in _LOGS:
        sheet.drop(written, LOGS)
    elif name in _REFUSED:
        sheet.refuse(written, _REFUSED[name])
    elif name in _OURS:
        sheet.drop(written, "clusterkit starts one agent on each node, and ends them together")
    elif name in ("container-image", "container"):
        sheet.entry(written, "container", value)
    elif name == "container-mounts":
        for mount in value.split(","):
            sheet.more(written, "container_mounts", mount)
    elif name == "export":
        _exported(sheet, value, written)
    elif name == "chdir":
        if value in (".", "./"):
            sheet.drop(written, "ranks start where the program is found")
        else:
            sheet.key(written, "workdir", value)
    elif not job:
        sheet.refuse(written, "clusterkit's own srun has no such option: give it to sbatch")
    elif name == "job-name":
        sheet.key(written, "name", job_name(value))
    elif name in _ENTRY:
        sheet.entry(written, name, value)
    elif name == "mem":
        sheet.entry(written, "memory", value)
    elif name == "exclusive" and value == "":
        sheet.entry(written, "exclusive", True)
    elif name in ("requeue", "no-requeue"):
        sheet.entry(written, "requeue", name == "requeue")
    elif name == "signal":
        _signal(sheet, value, written)
    elif len(name) > 1:
        option = f"--{name}={value}" if value else f"--{name}"
        sheet.more(written, "options", option)
    else:
        sheet.refuse(written, "sbatch has no such option")


def _signal(sheet: Sheet, value: str, written: str) -> None:
    match = re.fullmatch(r"(?:[BR]+:)?(?:SIG)?(\w+)(?:@(\d+))?", value)
    if match is None:
        sheet.refuse(written, f"{value} is no signal")
        return
    sheet.entry(written, "notice", int(match[2] or 60))
    if match[1] not in ("TERM", "15"):
        sheet.yours(written, f"the ranks get SIGTERM then, not {match[1]}")


def _exported(sheet: Sheet, value: str, written: str) -> None:
    for part in value.split(","):
        name, equals, text = part.partition("=")
        if equals:
            assigned(sheet, written, name, text)
        elif part in ("ALL", ""):
            sheet.drop(written, "the ranks have the environment of the first node's script")
        elif part in ("NONE", "NIL"):
            sheet.refuse(written, "the ranks have the environment in which you submit")
        else:
            sheet.secret(written, part)


def _set_up(sheet: Sheet, command: Command) -> None:
    """A command of the batch script: its first node runs it, in front of the nodes."""
    raw = shown(command.raw)
    if command.name == "module" and command.words[1:2] in (["load"], ["add"]):
        for name in command.words[2:]:
            sheet.more(f"module load {name}", "modules", name)
        return
    sheet.cluster.setdefault("setup", []).append(raw)
    sheet.note(raw.partition("\n")[0], "cluster entry, setup", "cluster")
    if re.search(r"\b(activate|conda)\b", raw):
        sheet.yours(raw, "submit with that environment active, or set `python:` of the entry: it "
                    "runs the ranks")  # fmt: skip
