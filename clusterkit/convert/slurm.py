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
Asked = dict[str, tuple[str, str, str]]
"""Options about nodes, tasks and GPUs: value, as written, place."""
_TASKS = ("nodes", "ntasks", "ntasks-per-node", "gpus", "gpus-per-node", "gpus-per-task", "gres")


def script(sheet: Sheet, text: str, words: Sequence[str]) -> None:
    """A script, with or without ``#SBATCH`` lines."""
    slurm = re.search(r"^#SBATCH\b", text, re.MULTILINE) is not None
    asked: Asked = {}
    if slurm:
        sheet.cluster["backend"] = "slurm"
        sheet.cluster_name = "slurm"
        for number, line in enumerate(text.splitlines(), 1):
            if match := _DIRECTIVE.match(line):
                sheet.at = f"{sheet.name}:{number}"
                comment = re.split(r"\s#", match[1])[0].strip()
                for word in _options(sheet, asked, sheet.words("#SBATCH", comment), job=True):
                    sheet.refuse(word, "not an option of sbatch")
            elif line.strip() and not line.startswith("#"):
                break
    _shape(sheet, asked)
    reader = Script(
        sheet,
        _variables(sheet, asked) if slurm else {},
        lambda sheet, words: _launch(sheet, reader, asked, words, slurm),
        _set_up if slurm else left("run it yourself before you submit"),
    )
    reader.read(text)
    if not reader.launched and not sheet.refused:
        sheet.at = ""
        sheet.refuse(sheet.name, "no line starts ranks: srun, torchrun, deepspeed, python, ...")
    if slurm and sheet.job.get("launcher") == "mpirun":
        sheet.refuse("mpirun", "on Slurm clusterkit starts the ranks itself: leave mpirun out")


def _options(sheet: Sheet, asked: Asked, words: list[str], *, job: bool) -> list[str]:
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
        _option(sheet, asked, name.replace("_", "-"), value, written, job)
    return rest


def _option(
    sheet: Sheet, asked: Asked, name: str, value: str, written: str,
    job: bool,
) -> None:  # fmt: skip
    if name in _TASKS:
        asked[name] = (value, written, sheet.at)
    elif name in _LOGS:
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
    elif name == "cpus-per-task":
        asked[name] = (value, written, sheet.at)
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


def _shape(sheet: Sheet, asked: Asked) -> None:
    """Nodes and GPUs."""
    if "nodes" in asked:
        value, written, sheet.at = asked["nodes"]
        low, dash, high = value.partition("-")
        if not dash or low == high:
            sheet.number(written, "nodes", low)
        else:
            sheet.refuse(written, f'an elastic number is `nodes: "{low}:{high}"` in the job file')
    for name in ("gres", "gpus-per-node"):
        if name in asked:
            value, written, sheet.at = asked[name]
            sheet.entry(written, "gres", value if name == "gres" else f"gpu:{value}")
    nodes = sheet.job.get("nodes", 1)
    for name, tasks in (("gpus", 1), ("gpus-per-task", nodes * _tasks(sheet, asked))):
        if name in asked and "gres" not in sheet.cluster:
            value, written, sheet.at = asked[name]
            kind, _, text = value.rpartition(":")
            if (count := sheet.whole(written, text)) is None:
                continue
            if count * tasks % nodes:
                sheet.refuse(written, f"{value} GPUs cannot be divided among {nodes} nodes")
                continue
            each = f"{count * tasks // nodes}"
            sheet.entry(written, "gres", ":".join(filter(None, ["gpu", kind, each])))
    if "cpus-per-task" in asked:
        value, written, sheet.at = asked["cpus-per-task"]
        if (cpus := sheet.whole(written, value)) is not None:
            tasks = _tasks(sheet, asked)
            said = "" if tasks == 1 else f"cluster entry, cpus: {cpus * tasks}, of {tasks} tasks"
            sheet.entry(written, "cpus", cpus * tasks, said)
    sheet.at = ""


def _tasks(sheet: Sheet, asked: Asked) -> int:
    """Tasks of a node."""
    if "ntasks-per-node" in asked and asked["ntasks-per-node"][0].isdecimal():
        return int(asked["ntasks-per-node"][0])
    if "ntasks" in asked and asked["ntasks"][0].isdecimal():
        return max(1, int(asked["ntasks"][0]) // int(sheet.job.get("nodes", 1)))
    return 1


def _gpus(sheet: Sheet) -> int | None:
    match = re.search(r"\bgpu(?::[^:,]+)??(?::(\d+))?(?:,|$)", str(sheet.cluster.get("gres", "")))
    return None if match is None else int(match[1] or 1)


def _variables(sheet: Sheet, asked: Asked) -> dict[str, str]:
    """What Slurm sets, as far as the options say it."""
    nodes, tasks = int(sheet.job.get("nodes", 1)), _tasks(sheet, asked)
    found = {
        "SLURM_JOB_NUM_NODES": nodes, "SLURM_NNODES": nodes, "SLURM_NTASKS": nodes * tasks,
        "SLURM_NPROCS": nodes * tasks, "SLURM_NTASKS_PER_NODE": tasks,
    }  # fmt: skip
    if "cpus-per-task" in asked:
        found["SLURM_CPUS_PER_TASK"] = int(sheet.cluster.get("cpus", tasks)) // tasks
    if (gpus := _gpus(sheet)) is not None:
        found |= {
            "SLURM_GPUS_ON_NODE": gpus,
            "SLURM_GPUS_PER_NODE": gpus,
            "SLURM_GPUS": gpus * nodes,
        }
    known = {name: str(value) for name, value in found.items()}
    if "name" in sheet.job:
        known["SLURM_JOB_NAME"] = sheet.job["name"]
    return known


def _launch(
    sheet: Sheet, reader: Script, asked: Asked, words: Sequence[str],
    slurm: bool,
) -> None:  # fmt: skip
    """The line that starts the ranks: ``srun ...``, or a launcher by itself."""
    rest = list(words)
    by_srun = False
    while rest and (match := re.match(rf"({shell.NAME})=(.*)\Z", rest[0], re.DOTALL)):
        assigned(sheet, rest.pop(0), match[1], match[2])
    if rest and rest[0].rpartition("/")[2] == "srun":
        by_srun = True
        step: Asked = {}
        rest = _options(sheet, step, rest[1:], job=False)
        for name, (value, written, at) in step.items():
            _same(sheet, asked, name, value, written, at)
    inner = lines.script_of(rest)
    if inner is not None:
        name, number = sheet.name, int(re.search(r":(\d+)$", sheet.at)[1]) if sheet.at else 1  # type: ignore[index]
        within = Script(
            sheet,
            {key: text for key, text in reader.variables.items() if not unknown_in(text)},
            lambda sheet, words: _ranks(sheet, asked, words, by_srun, slurm),
            reader.other,
        )
        within.own = set(reader.own)
        within.read(inner, number)
        sheet.name = name
        if not within.launched:
            sheet.refuse(shell.join(["bash", "-c", shown(inner)[:40]]), "it starts no ranks")
        return
    _ranks(sheet, asked, rest, by_srun, slurm)


def _same(
    sheet: Sheet, asked: Asked, name: str, value: str, written: str,
    at: str,
) -> None:  # fmt: skip
    """An option of srun that sbatch has as well."""
    before = asked.get(name)
    total = {"nodes": sheet.job.get("nodes", 1)}
    total["ntasks"] = total["nodes"] * _tasks(sheet, asked)
    total["ntasks-per-node"] = _tasks(sheet, asked)
    if unknown_in(value):
        sheet.drop(written, "as many as the job has")
    elif (before is not None and before[0] == value) or str(total.get(name)) == value:
        sheet.drop(written, "the job's #SBATCH lines say the same")
    elif before is None and name != "nodes":
        asked[name] = (value, written, at)
        if name in ("gres", "gpus-per-node", "gpus", "gpus-per-task", "cpus-per-task"):
            _shape(sheet, {name: asked[name], **{key: asked[key] for key in asked
                                                 if key.startswith("ntasks")}})  # fmt: skip
        else:
            sheet.note(written, "read together with the launcher", "job")
    else:
        sheet.refuse(written, f"the job's #SBATCH lines say {before[1] if before else '1 node'}")


def _ranks(
    sheet: Sheet, asked: Asked, words: Sequence[str], by_srun: bool,
    slurm: bool,
) -> None:  # fmt: skip
    """What the tasks run."""
    run_id = "${clusterkit.run_id}"
    rest = list(words)
    for name in ("SLURM_JOB_ID", "SLURM_JOBID"):
        rest = [word.replace(variable(name), run_id) for word in rest]
    tasks = _tasks(sheet, asked)
    if not slurm or not by_srun:
        lines.convert(sheet, rest, ranks=1)
    else:
        launcher = bool(rest) and read_line(rest).tool is not None
        if launcher and tasks > 1:
            sheet.refuse(
                " ".join(map(shown, rest[:1])), f"srun starts it {tasks} times on each node"
            )
        lines.convert(
            sheet, rest, ranks=None if launcher else tasks, inside="container" in sheet.cluster
        )
        if not launcher and rest:
            sheet.yours("srun", "ranks read RANK, LOCAL_RANK and WORLD_SIZE, not SLURM_PROCID")
    for name in ("ntasks", "ntasks-per-node"):
        if name in asked:
            _, written, at = asked[name]
            sheet.at = at
            ranks = sheet.job.get("gpus_per_node")
            sheet.note(written, f"gpus_per_node: {ranks}" if not slurm or ranks == tasks
                       else "one agent on each node starts its ranks", "job")  # fmt: skip


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
