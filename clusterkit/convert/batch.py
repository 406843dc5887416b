"""Slurm batch scripts: ``#SBATCH`` lines, lines that set up the environment, one launcher line.

The lines that set up go into `setup` of the cluster entry, in their order and unchanged. No other
command is converted, and of variables only those that follow from the ``#SBATCH`` lines have a
value here. Pure.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence

from clusterkit import shell
from clusterkit.convert import lines
from clusterkit.convert.draft import LOGS, Draft, all_unknown, shown, unknown_in, variable
from clusterkit.convert.options import RENDEZVOUS, apply_option, assigned, job_name
from clusterkit.convert.shell_text import Command, Unfinished, commands
from clusterkit.errors import BadInput, pluralize
from clusterkit.jobfile.command import Used, options
from clusterkit.jobfile.command import read as read_line
from clusterkit.jobfile.launcher_options import AGAIN, PASSED, SBATCH, SPECIAL, SRUN
from clusterkit.jobfile.sources import imported, starts

_DIRECTIVE = re.compile(r"#SBATCH\s+(.*)")
_SHEBANG = re.compile(r"#!\s*(/usr/bin/env\s+)?(\S*/)?(bash|sh)\s*(-l|--login)?\s*\Z")
_LOGIN = (
    ". /etc/profile; for file in ~/.bash_profile ~/.bash_login ~/.profile; do "
    'if [ -r "$file" ]; then . "$file"; break; fi; done'
)
"""What a login shell reads, as bash(1) has it."""
_GPUS = re.compile(r"\bgpu(?::[^:,]+)??(?::(\d+))?(?:,|$)")
_BY_ITSELF = ("container-mounts", "export", "chdir", "job-name", "signal", "exclusive")
_ASSIGNMENT = re.compile(rf"({shell.NAME})=(.*)\Z", re.DOTALL)
_ADDRESS = re.compile(
    rf"(?:export\s+)?({shell.NAME})="
    r"(?:\"?\$\(\s*scontrol\s+show\s+hostnames?\b[^;&<>]*\)\"?"
    r"|\"?\$\(\s*srun\s[^;&|<>]*\bhostname\b[^;&|<>]*\)\"?"
    r"|\(\s*\$\(\s*scontrol\s+show\s+hostnames?\b[^;&<>]*\)\s*\)"
    rf"|\(\s*\$\{{?{shell.NAME}\}}?\s*\)"
    rf"|\"?\$\{{{shell.NAME}\[0\]\}}\"?)\s*\Z"
)
"""How scripts find the first node; as in PyTorch's examples (sbatch_run.sh)."""
_SAME = frozenset(
    {"SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_NNODES",
     "SLURM_JOB_NUM_NODES", "SLURM_JOB_PARTITION", "SLURM_JOB_ACCOUNT", "SLURM_CLUSTER_NAME",
     "SLURM_JOB_USER"}
)  # fmt: skip
"""Variables of Slurm with the same value in the job of a run."""
_OURS = re.compile(r"(CLUSTERKIT|SLURM|SRUN|SBATCH|SALLOC|PET)_|IFS\Z|BASH")
_SETS_UP = re.compile(
    r"(module|ml|source|\.|(conda|mamba|micromamba)\s+activate)(\s|\Z)"
    r"|set(\s+[-+](o\s+(pipefail|errexit|nounset|xtrace)|[eux]+(o\s+pipefail)?))+\s*\Z"
)
_OF_TASKS = re.compile(r"\bSLURM_(PROCID|LOCALID|NTASKS|NPROCS|TASKS_PER_NODE|NODEID)\b")
_OF_RANKS = re.compile(r"\bRANK\b")
Asked = dict[str, tuple[str, str, str]]
"""Options about nodes, tasks and GPUs by name: value, as written, place."""


def script(draft: Draft, text: str, words: Sequence[str]) -> None:
    """Convert a batch script."""
    if re.search(r"^#SBATCH\b", text, re.MULTILINE) is None:
        draft.refuse(
            draft.name,
            "it has no #SBATCH lines, and other scripts are not converted: convert the line that "
            "starts the ranks, `clusterkit convert -- torchrun ...`",
        )
        return
    draft.cluster["backend"] = draft.cluster_name = "slurm"
    _Batch(draft).read(text)


class _Batch:
    """A script that is being read."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.asked: Asked = {}
        self.variables: dict[str, str] = {}
        self.unknown = set(RENDEZVOUS)
        """Variables of the script that clusterkit replaces; nothing else may need them."""
        self.launched = ""

    def read(self, text: str) -> None:
        draft = self.draft
        first = text.partition("\n")[0]
        draft.at = f"{draft.name}:1"
        if (shebang := _SHEBANG.match(first.rstrip())) is None:
            draft.refuse(first[:60], "only scripts of bash and sh can be converted")
            return
        if shebang[4]:
            self._set_up(first, _LOGIN)
        self._directives(text)
        self._shape(self.asked)
        self.variables = self._known()
        try:
            for command in commands(text, self.variables):
                draft.at = f"{draft.name}:{command.line}"
                self._command(command)
        except Unfinished as error:
            draft.at = f"{draft.name}:{error.line}"
            draft.refuse("script", "a quote or bracket does not end")
        draft.at = ""
        if not self.launched and not draft.refused:
            draft.refuse(draft.name, "no line starts ranks: srun, torchrun, deepspeed, ...")
        self._defaults()
        if draft.job.get("launcher") == "mpirun":
            draft.refuse("mpirun", "on Slurm clusterkit starts the ranks itself: leave mpirun out")

    # ------------------------------------------------------------ #SBATCH

    def _directives(self, text: str) -> None:
        """Convert the ``#SBATCH`` lines in front of the first command."""
        draft, begun, given = self.draft, False, list[tuple[str, Used]]()
        for number, line in enumerate(text.splitlines(), 1):
            if match := _DIRECTIVE.match(line):
                draft.at = f"{draft.name}:{number}"
                if begun:
                    draft.drop(line.strip(), "Slurm ignores #SBATCH lines after the first command")
                    continue
                directive, hash_, comment = _without_comment(match[1])
                if hash_ and directive and not directive[-1].isspace():
                    why = "Slurm takes the rest for a comment: quote the value"
                    draft.refuse(f"#{comment}", why)
                found, rest = options(SBATCH, draft.words("#SBATCH", directive), "sbatch")
                given += [(draft.at, used) for used in found]
                for word in rest:
                    draft.refuse(word, "not an option of sbatch")
            begun = begun or not re.match(r"\s*(#|$)", line)
        self._options(given, self.asked)
        draft.at = ""

    def _options(self, given: Sequence[tuple[str, Used]], asked: Asked) -> None:
        """Convert options of sbatch or srun, each with its place; the last one of a name counts."""
        last = {used.name: number for number, (_, used) in enumerate(given)}
        for number, (at, used) in enumerate(given):
            self.draft.at, name = at, used.name.removeprefix("--")
            if last[used.name] != number:
                self.draft.drop(used.written, AGAIN[1:])
            elif used.meaning != SPECIAL or name in _BY_ITSELF:
                _option(self.draft, name, used)
            else:
                asked[name] = (used.value, used.written, at)

    def _defaults(self) -> None:
        """Say no where the entry's default is yes, and name the defaults that stay."""
        draft, entry = self.draft, self.draft.cluster
        if "requeue" not in entry:
            draft.entry("no --requeue", "requeue", False)
        if not {"gres", "gpus", "exclusive"} & entry.keys():
            draft.entry("no GPUs", "gpus", 0)
        if not {"python", "container"} & entry.keys() and "python" not in draft.job:
            draft.todo("the script's PATH", "submit with its environment active, or set `python:` "
                       "of the entry: that Python runs the ranks")  # fmt: skip
        if "cpus" not in entry:
            draft.todo("no --cpus-per-task", "the run asks for the cores that go with its GPUs, or "
                       "for all; `cpus` of the entry sets another number")  # fmt: skip
        if "notice" not in entry:
            draft.todo("no --signal", "ranks get SIGTERM 120 s before the time limit; `notice` of "
                       "the entry sets another time")  # fmt: skip

    @property
    def nodes(self) -> int:
        """Nodes of the job, which the launcher may call a range."""
        given = self.asked["nodes"][0].partition("-")[0] if "nodes" in self.asked else ""
        return max(1, int(given)) if given.isdecimal() else 1

    @property
    def tasks(self) -> int:
        """Tasks per node, as Slurm counts them: `--ntasks` wins, and fills the nodes alike."""
        found = {name: self.asked[name][0] for name in ("ntasks", "ntasks-per-node")
                 if name in self.asked}  # fmt: skip
        if (total := found.get("ntasks", "")).isdecimal():
            return max(1, int(total) // self.nodes)
        return int(each) if (each := found.get("ntasks-per-node", "")).isdecimal() else 1

    def _shape(self, asked: Asked) -> None:
        """Convert nodes, tasks, GPUs and cores."""
        draft = self.draft
        if "nodes" in asked:
            value, written, draft.at = asked["nodes"]
            low, dash, high = value.partition("-")
            if not dash or low == high:
                draft.number(written, "nodes", low)
            else:
                why = f'an elastic number is `nodes: "{low}:{high}"` in the job file'
                draft.refuse(written, why)
        self._check_tasks(asked)
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
                if name == "gpus-per-task" and tasks > 1:
                    why = "each task sees its own GPUs alone; a rank sees all GPUs of its node"
                    draft.refuse(written, why)
                    continue
                each = f"{count * times // nodes}"
                draft.entry(written, "gres", ":".join(filter(None, ["gpu", kind, each])))
        if "cpus-per-task" in asked:
            value, written, draft.at = asked["cpus-per-task"]
            if (cpus := draft.integer(written, value)) is not None:
                all_of = f"cluster entry, cpus: {cpus * tasks}, of {tasks} tasks"
                draft.entry(written, "cpus", cpus * tasks, "" if tasks == 1 else all_of)
        draft.at = ""

    def _check_tasks(self, asked: Asked) -> None:
        draft, nodes = self.draft, self.nodes
        for name in ("ntasks", "ntasks-per-node"):
            if name in asked:
                value, written, draft.at = asked[name]
                draft.integer(written, value)
        if "ntasks" not in asked or not asked["ntasks"][0].isdecimal():
            return
        value, written, draft.at = asked["ntasks"]
        total = int(value)
        most = self.asked.get("ntasks-per-node", ("",))[0]
        if total > 1 and "nodes" not in self.asked:
            draft.refuse(written, "Slurm chooses how many nodes: write --nodes")
        elif total % nodes:
            draft.refuse(written, f"{total} tasks cannot be divided among {nodes} nodes")
        elif most.isdecimal() and total // nodes != int(most):
            why = f"--ntasks-per-node={most} beside it is only a limit, and Slurm starts "
            draft.refuse(written, f"{why}{pluralize(total, 'task')} in all: write one of them")

    def _known(self) -> dict[str, str]:
        """Return the SLURM_* variables that follow from the options, as sbatch(1) has them."""
        nodes, tasks, draft = self.nodes, self.tasks, self.draft
        found: dict[str, object] = {"SLURM_JOB_NUM_NODES": nodes, "SLURM_NNODES": nodes}
        if self.asked.keys() & {"ntasks", "ntasks-per-node"}:
            found |= {"SLURM_NTASKS": nodes * tasks, "SLURM_NPROCS": nodes * tasks}
        for name in ("ntasks-per-node", "cpus-per-task", "gpus-per-node"):
            if name in self.asked:
                value = self.asked[name][0].rpartition(":")[2]
                found[f"SLURM_{name.upper().replace('-', '_')}"] = value
        if "gpus" in self.asked and self.asked["gpus"][0].isdecimal():
            found["SLURM_GPUS"] = self.asked["gpus"][0]
        if match := _GPUS.search(str(draft.cluster.get("gres", ""))):
            found["SLURM_GPUS_ON_NODE"] = match[1] or 1
        return {name: str(value) for name, value in found.items()}

    # ------------------------------------------------------------ commands

    def _command(self, command: Command) -> None:
        draft, words, name = self.draft, command.words, command.name
        raw = shown(command.raw).partition("\n")[0]
        if self.launched and command.before in ("|", "|&") and name == "tee":
            draft.drop(f"| {raw}", LOGS)
        elif command.before not in ("", "\n", ";") or command.after not in ("", "\n", ";", "|"):
            operator = command.after if command.before in ("", "\n", ";") else command.before
            draft.refuse(raw, f"a command beside {operator} is not converted")
        elif self.launched and not lines.only_prints(command):
            why = "a job has one program" if lines.starts_ranks(words) else "a job runs no command"
            draft.refuse(raw, f"{why}, and {self.launched} started the ranks")
        elif lines.starts_ranks(words):
            self.launched = f"line {command.line}"
            self._launch(command)
        elif command.after == "|" or command.redirects:
            draft.refuse(raw, _OTHER)
        elif lines.only_prints(command):
            draft.drop(raw, "it only prints")
        elif address := _ADDRESS.match(command.raw):
            self.unknown.add(address[1])
            draft.drop(raw)
        elif name == "export" and not any(word.startswith("-") for word in words):
            self._export(command)
        elif words and all(_ASSIGNMENT.match(word) for word in words):
            self._assign(command)
        elif words == ["cd", variable("SLURM_SUBMIT_DIR")]:
            draft.drop(raw, "ranks and `setup` begin in the folder where you submit")
        elif _SETS_UP.match(command.raw):
            self._line_of_set_up(command)
        else:
            draft.refuse(raw, _OTHER)

    def _export(self, command: Command) -> None:
        """Convert ``export NAME=VALUE ...``, all of it or each by itself."""
        draft, rest = self.draft, []
        for word in command.words[1:]:
            name, _, value = word.partition("=")
            if name in self.unknown:
                draft.drop(shown(f"export {word}"))
            elif name == "SRUN_CPUS_PER_TASK":
                draft.drop(shown(f"export {word}"), "clusterkit's srun asks for the cores")
            elif name == "OMP_NUM_THREADS":
                assigned(draft, shown(f"export {word}"), name, value)
            else:
                rest.append(name)
        if len(rest) == len(command.words) - 1:
            self._line_of_set_up(command)
        elif rest:
            draft.refuse(shown(command.raw), "write an `export` of its own for each variable")

    def _assign(self, command: Command) -> None:
        """Convert ``NAME=VALUE`` without export: a later line of `setup` may use it."""
        names = {word.partition("=")[0] for word in command.words}
        if names <= self.unknown:
            self.draft.drop(shown(command.raw))
        else:
            self._line_of_set_up(command)

    def _line_of_set_up(self, command: Command) -> None:
        draft, raw = self.draft, command.raw
        if bad := self._not_the_same(command):
            draft.refuse(shown(raw), f"${bad} has no value, or another one, in a run")
            return
        for word in command.words:
            if (match := _ASSIGNMENT.match(word)) and _OURS.match(match[1]):
                draft.refuse(shown(raw), f"{match[1]} belongs to Slurm, torchrun or clusterkit")
                return
        self._set_up(raw, raw)
        activates = re.match(r"(?:source|\.)\s+(/[\w./-]+)/bin/activate\s*\Z", raw)
        if activates:
            draft.entry(raw, "python", f"{activates[1]}/bin/python")

    def _not_the_same(self, command: Command) -> str | None:
        """Return a variable of a line that a run does not have as the script has it, if any."""
        for name in (each for word in command.words for each in all_unknown(word)):
            if re.fullmatch(shell.NAME, name) is None or name in self.unknown:
                return name
        # As it is written: a run has another shape than the job of the script.
        of_slurm = re.findall(r"\$\{?(SLURM_\w+)", command.raw)
        return next((name for name in of_slurm if name not in _SAME), None)

    def _set_up(self, origin: str, line: str) -> None:
        self.draft.cluster.setdefault("setup", []).append(line)
        self.draft.note(origin.partition("\n")[0], "cluster entry, setup", "cluster")

    # ------------------------------------------------------------ the launcher line

    def _launch(self, command: Command) -> None:
        """Convert the line that starts the ranks: ``srun ...``, or a launcher alone."""
        draft, rest = self.draft, list(command.words)
        for redirect in command.redirects:
            if "<" in redirect and not redirect.endswith("/dev/null"):
                draft.refuse(redirect, "ranks have no standard input")
            else:
                draft.drop(redirect, LOGS)
        for word in command.expanded:
            draft.refuse(word, "a shell may expand it: quote it, or write the value")
        while rest and (match := _ASSIGNMENT.match(rest[0])):
            assigned(draft, shown(rest.pop(0)), match[1], match[2])
        while rest and rest[0] in lines.PLAIN_WRAPPERS:
            draft.drop(rest.pop(0), "a run outlives the terminal")
        by_srun = bool(rest) and rest[0].rpartition("/")[2] == "srun"
        if by_srun:
            step, at = dict[str, tuple[str, str, str]](), draft.at
            found, rest = options(SRUN, rest[1:], "srun")
            self._options([(at, used) for used in found], step)
            draft.at = at
            for name in step:
                self._same(name, step)
            # srun gives a variable that is not in the environment by `--export` alone.
            self.variables |= self._known()
        if (inner := lines.script_of(rest)) is not None:
            rest = lines.inside_shell(draft, inner, self.variables)
        if rest:
            self._ranks(rest, by_srun=by_srun)

    def _same(self, name: str, step: Asked) -> None:
        """Convert an option of srun that sbatch also has."""
        draft, before, (value, written, _) = self.draft, self.asked.get(name), step[name]
        total = {"nodes": self.nodes, "ntasks": self.nodes * self.tasks,
                 "ntasks-per-node": self.tasks}  # fmt: skip
        if unknown_in(value):
            draft.refuse(written, "its value is not known here")
        elif (before is not None and before[0] == value) or str(total.get(name)) == value:
            draft.drop(written, "same as the #SBATCH lines")
        elif before is not None or name == "nodes":
            became = before[1] if before else "1 node"
            draft.refuse(written, f"the job's #SBATCH lines say {became}")
        else:
            self.asked[name] = step[name]
            self._shape({name: step[name]})
            draft.at = step[name][2]
            if name.startswith("ntasks"):
                draft.note(written, "read together with the launcher", "job")

    def _ranks(self, words: Sequence[str], *, by_srun: bool) -> None:
        """Convert the command that the tasks run."""
        draft, rest, tasks = self.draft, list(words), self.tasks
        launcher = False
        with contextlib.suppress(BadInput):  # `lines` says what is wrong
            launcher = read_line(rest).tool is not None
        inside = "container" in draft.cluster
        if not by_srun:
            if self.nodes > 1:
                draft.refuse(shown(rest[0]), "without srun it starts on the first node alone")
            lines.convert(draft, rest, ranks=1)
        else:
            if launcher and tasks > 1:
                draft.refuse(shown(rest[0]), f"srun starts it {tasks} times on each node")
            lines.convert(draft, rest, ranks=None if launcher else tasks, inside=inside)
            if not launcher:
                draft.key("tasks of srun", "gpus_per_node", tasks)
                self._check_program(inside=inside)
        if launcher and str(draft.job.get("nodes", 1)) != str(self.nodes):
            draft.refuse(shown(rest[0]), f"the job has {pluralize(self.nodes, 'node')}")
        for name in ("ntasks", "ntasks-per-node"):
            if name in self.asked:
                _, written, draft.at = self.asked[name]
                ranks = draft.job.get("gpus_per_node")
                became = f"gpus_per_node: {ranks}" if ranks == tasks else (
                    "one agent on each node starts its ranks")  # fmt: skip
                draft.note(written, became, "job")

    def _check_program(self, *, inside: bool) -> None:
        """Refuse a program that reads Slurm's numbers of its task: those of a rank are others."""
        draft = self.draft
        files, roots = starts(draft.job.get("program"), draft.job.get("module"))
        for path, text in () if inside else imported(files, roots, draft.read):
            if (found := _OF_TASKS.search(text)) and not _OF_RANKS.search(text):
                why = f"{path} reads it: ranks have RANK, LOCAL_RANK and WORLD_SIZE instead"
                draft.refuse(found[0], why)
                return
        why = (
            "ranks have RANK, LOCAL_RANK and WORLD_SIZE; the program must read these first, and not"
        )
        draft.todo("srun", f"{why} SLURM_PROCID, SLURM_LOCALID or SLURM_NTASKS")


_OTHER = (
    "of the lines in front of the ranks, module, source, conda activate, set and export are "
    "converted; write any other into `setup` of the cluster entry"
)


def _without_comment(text: str) -> tuple[str, str, str]:
    """Split a directive at the first # that is not quoted."""
    for match in re.finditer(r"\\.|'[^']*'|\"(?:\\.|[^\"])*\"|#", text):
        if match[0] == "#":
            return text[: match.start()], "#", text[match.end() :]
    return text, "", ""


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
    match = re.fullmatch(r"([BR]+:)?(?:SIG)?(\w+)(?:@(\d+))?", value)
    if match is None:
        draft.refuse(written, f"{value} is not a signal")
    elif match[2] not in ("TERM", "15"):
        draft.refuse(written, f"the ranks get SIGTERM before the end, not {match[2]}")
    elif match[1]:
        draft.refuse(written, "it is for the script itself, which is not run")
    else:
        draft.entry(written, "notice", int(match[3] or 60))


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
            draft.refuse(written, "ranks inherit the whole environment in which you submit")
