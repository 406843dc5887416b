"""What the job's own DeepSpeed says of its config, and whether the job's program completes it."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from clusterkit.batch import DEEPSPEED_KEYS
from clusterkit.cluster import Facts
from clusterkit.errors import BadInput, ClusterkitError, Place, RunFolderError
from clusterkit.files import read_file, write_atomic
from clusterkit.jobfile import catalogue, deepspeed_config
from clusterkit.plan import Note, Plan
from clusterkit.run import folder as run_folder
from clusterkit.spec import JobSpec
from clusterkit.transport import Transport

_COMPLETES = re.compile(
    r"\b(Trainer|TrainingArguments|HfArgumentParser|Accelerator|accelerate|lightning|clusterkit|mpu"
    r"|PipelineModule)\b|[\"']auto[\"']|train_(micro_)?batch_size|gradient_accumulation_steps"
)
"""In the text of a program that fills in, or checks, batch sizes and ``auto`` by itself."""
_MOST_FILES = 200
_SECONDS = 60

# Prints one line of JSON: null, or what DeepSpeed says, with the path of keys that it is about.
_PROGRAM = """
import json, sys
given = json.loads(sys.stdin.buffer.read())
out, sys.stdout = sys.stdout, sys.stderr
from deepspeed import comm
from deepspeed.runtime.config import DeepSpeedConfig
comm.get_rank = lambda *_: 0
comm.get_world_size = lambda *_: given["ranks"]
said = None
try:
    DeepSpeedConfig(given["config"])
except Exception as error:
    said = {"message": str(error).strip() or type(error).__name__, "place": []}
    if hasattr(error, "errors"):
        first, name = error.errors()[0], error.title.removeprefix("DeepSpeed")
        section = {"ZeroConfig": "zero_optimization", "FP16Config": "fp16", "BF16Config": "bf16"}
        place = [section[name]] if name in section else []
        said = {"message": first["msg"], "place": [*place, *first["loc"]]}
        if not isinstance(first["input"], (dict, list, type(None))) and first["loc"]:
            said["value"] = repr(first["input"])[:60]
print(json.dumps(said), file=out)
"""


def examine(
    job: JobSpec,
    plan: Plan,
    facts: Facts,
    transport: Transport | None,
    env: Mapping[str, str] | None = None,
) -> list[Note]:
    """Refuse a ``deepspeed`` section that DeepSpeed would refuse when the ranks have started.

    Args:
        transport: where the hosts that were probed can be asked; None: they cannot.
        env: of their Python.

    Returns:
        Notes on what may be meant otherwise.

    Raises:
        BadInput: about the key.
    """
    config = next(
        json.loads(file.text or "") for file in plan.files if file.path.endswith("/deepspeed.json")
    )
    host = facts.hosts[0]
    version = host.versions.get("deepspeed", deepspeed_config.VERSION).partition("+")[0]
    remarks = deepspeed_config.check_keys(config) if version == deepspeed_config.VERSION else []
    completed = completes(job)
    autos = deepspeed_config.autos(config)
    if completed is False:
        deepspeed_config.check_sizes(config, plan.world_size)
    if completed is not True and autos:
        names = ", ".join(".".join(map(str, place)) for place in autos)
        remarks.append(f"deepspeed: nothing is known to fill in auto: {names}")
    if transport is not None and "deepspeed" in host.versions:
        asked = _without_autos(config)
        ranks = plan.world_size
        if completed is not False:
            ranks = 1
            for key in DEEPSPEED_KEYS.values():
                asked.pop(key, None)
            asked["train_micro_batch_size_per_gpu"] = 1
        said = _asked({"config": asked, "ranks": ranks}, version, plan, transport, env)
        if said is not None:
            raise _refusal(said, config, version)
    return [Note("", remark, "") for remark in remarks]


def completes(job: JobSpec) -> bool | None:
    """Whether the job's program completes the config that it is given; None: it cannot be read."""
    folder = Path(job.workdir or ".")
    if job.program is not None:
        program = folder / job.program
    elif job.module is not None:
        program = folder.joinpath(*job.module.split("."))
        program = program / "__main__.py" if program.is_dir() else program.with_suffix(".py")
    else:
        return None
    if not program.is_file():
        return None
    for path, _ in islice(catalogue.followed(program), _MOST_FILES):
        with contextlib.suppress(OSError):
            if _COMPLETES.search(read_file(path).decode(errors="replace")):
                return True
    return False


def _without_autos(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = copy.deepcopy(dict(config))
    for *sections, key in deepspeed_config.autos(config):
        section: Any = kept
        for name in sections:
            section = section[name]
        del section[key]
    return kept


def _asked(
    question: Mapping[str, Any],
    version: str,
    plan: Plan,
    transport: Transport,
    env: Mapping[str, str] | None,
) -> dict[str, Any] | None:
    """What DeepSpeed says, None if nothing; asked once for each question, version and Python."""
    text = json.dumps([question, version, plan.python, _PROGRAM], sort_keys=True)
    name = f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    saved = run_folder.home() / "cache" / "deepspeed" / name
    with contextlib.suppress(OSError, ValueError):
        known: dict[str, Any] | None = json.loads(read_file(saved))
        return known
    try:
        done = transport.run(
            plan.hosts[0], [plan.python, "-c", _PROGRAM], env=env, timeout=_SECONDS,
            stdin=json.dumps(question).encode(),
        )  # fmt: skip
        said: dict[str, Any] | None = json.loads(done.stdout.strip().rpartition("\n")[2])
    except (ClusterkitError, ValueError):
        return None  # a DeepSpeed that cannot be imported is another matter
    with contextlib.suppress(RunFolderError):
        write_atomic(saved, json.dumps(said).encode())
    return said


def _refusal(said: Mapping[str, Any], config: Mapping[str, Any], version: str) -> BadInput:
    place = _place(said, config)
    where = "".join(f".{key}" for key in place)
    value = f": {said['value']}" if "value" in said else ""
    return BadInput(
        f"deepspeed{where}{value}: DeepSpeed {version} says: {said['message']}",
        job=("deepspeed", *place),
    )


def _place(said: Mapping[str, Any], config: Mapping[str, Any]) -> Place:
    """The path of keys that a complaint is about: pydantic knows its end, others name the key."""
    end = tuple(str(key) for key in said["place"])
    for place, _ in deepspeed_config.walk(config):
        if end and place[-len(end) :] == end:
            return place
        if not end and re.search(rf"\b{re.escape(str(place[-1]))}\b", said["message"]):
            return place
    return ()
