"""A batch script of Slurm: its ``#SBATCH`` lines, what it sets up, and its ``srun`` line. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from clusterkit import shell
from clusterkit.convert import lines
from clusterkit.convert.options import assigned, by_meaning, job_name
from clusterkit.convert.script import Script, left
from clusterkit.convert.sheet import Sheet, shown, unknown_in, variable
from clusterkit.convert.shell_text import Command
from clusterkit.jobfile.command import Used, options
from clusterkit.jobfile.command import read as read_line
from clusterkit.jobfile.launcher_options import AGAIN, PASSED, SBATCH, SPECIAL, SRUN, Tool

_DIRECTIVE = re.compile(r"#SBATCH\s+(.*)")
_GPUS = re.compile(r"\bgpu(?::[^:,]+)??(?::(\d+))?(?:,|$)")
_BY_ITSELF = ("container-mounts", "export", "chdir", "job-name", "signal", "exclusive")
Asked = dict[str, tuple[str, str, str]]
"""Options about nodes, tasks and GPUs: value, as written, place."""


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
        """The ``#SBATCH`` lines; Slurm reads none behind the first command."""
        sheet, begun = self.sheet, False
        for number, line in enumerate(text.splitlines(), 1):
            if match := _DIRECTIVE.match(line):
                sheet.at = f"{sheet.name}:{number}"
                if begun:
                    sheet.drop(line.strip(), "Slurm reads no #SBATCH line behind a command")
                    continue
                comment = re.split(r"\s#", match[1])[0].strip()
                for word in self.options(SBATCH, sheet.words("#SBATCH", comment), self.asked):
                    sheet.refuse(word, "not an option of sbatch")
            begun = begun or not re.match(r"\s*(#|$)", line)

    def options(self, tool: Tool, words: list[str], asked: Asked) -> list[str]:
        """Options of sbatch, or of srun; gives the words behind them."""
        found, rest = options(tool, words, "srun" if tool is SRUN else "sbatch")
        for used in found:
            name = used.name.removeprefix("--")
            if used.meaning != SPECIAL or name in _BY_ITSELF:
                _option(self.sheet, name, used)
                continue
            again, here = asked.get(name), self.sheet.at
            asked[name] = (used.value, used.written, here)
            if again is not None:
                self.sheet.at = again[2]
                self.sheet.drop(again[1], AGAIN[1:])
                self.sheet.at = here
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
            rest = self.options(SRUN, rest[1:], step)
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


def _option(sheet: Sheet, name: str, used: Used) -> None:
    """One that means something by itself."""
    value, written = used.value, used.written
    if used.meaning not in (SPECIAL, PASSED):
        by_meaning(sheet, used)
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
    elif name == "job-name":
        sheet.key(written, "name", job_name(value))
    elif name == "signal":
        _signal(sheet, value, written)
    elif name == "exclusive" and value == "":
        sheet.entry(written, name, True)
    elif name[:1].isalpha():
        sheet.more(written, "options", f"--{name}={value}" if value else f"--{name}")
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
