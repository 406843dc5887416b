"""Check a job's DeepSpeed config with the DeepSpeed of its hosts, and with its program's source."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from clusterkit.batch import DEEPSPEED_KEYS
from clusterkit.cluster import Facts
from clusterkit.errors import BadInput, ClusterkitError, KeyPath, RunFolderError
from clusterkit.files import read_file, write_atomic
from clusterkit.hosts.python_text import OWN_MODULES_FIRST
from clusterkit.jobfile import deepspeed_config, sources
from clusterkit.plan import Note, Plan
from clusterkit.run import folder as run_folder
from clusterkit.spec import JobSpec
from clusterkit.transport import Transport

_COMPLETES = re.compile(
    r"\b(Trainer|TrainingArguments|HfArgumentParser|Accelerator|accelerate|lightning|clusterkit|mpu"
    r"|PipelineModule)\b|[\"']auto[\"']|train_(micro_)?batch_size|gradient_accumulation_steps"
)
"""Matches the source of a program that itself sets, or checks, batch sizes and ``auto``."""
_SECONDS = 60

# Prints one line of JSON: null, or what DeepSpeed says, with the path of keys that it is about.
_PROGRAM = (
    OWN_MODULES_FIRST
    + """
import json, sys
given = json.loads(sys.stdin.buffer.read())
out, sys.stdout = sys.stdout, sys.stderr
from deepspeed import comm
from deepspeed.runtime.config import DeepSpeedConfig
comm.get_rank = lambda *_: 0
comm.get_world_size = lambda *_: given["ranks"]
found = None
try:
    DeepSpeedConfig(given["config"])
except Exception as error:
    found = {"message": str(error).strip() or type(error).__name__, "place": []}
    if hasattr(error, "errors"):
        first, name = error.errors()[0], error.title.removeprefix("DeepSpeed")
        section = {"ZeroConfig": "zero_optimization", "FP16Config": "fp16", "BF16Config": "bf16"}
        place = [section[name]] if name in section else []
        found = {"message": first["msg"], "place": [*place, *first["loc"]]}
        if not isinstance(first["input"], (dict, list, type(None))) and first["loc"]:
            found["value"] = repr(first["input"])[:60]
print(json.dumps(found), file=out)
"""
)


def examine(
    job: JobSpec,
    plan: Plan,
    facts: Facts,
    transport: Transport | None,
    env: Mapping[str, str] | None = None,
) -> list[Note]:
    """Check a ``deepspeed`` section now, instead of when the ranks start.

    Args:
        transport: connection to the probed hosts, to ask the DeepSpeed there; None: there is none.
        env: environment of the hosts' Python.

    Returns:
        Remarks for the plan, such as on unknown keys.

    Raises:
        BadInput: a key or value that DeepSpeed would refuse.
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
        found = _ask_deepspeed({"config": asked, "ranks": ranks}, version, plan, transport, env)
        if found is not None:
            raise _refusal(found, config, version)
    return [Note("", remark, "") for remark in remarks]


def completes(job: JobSpec) -> bool | None:
    """Return whether the job's program completes the config; None: its source is not available."""
    texts = [text for _, text in sources.imported(*sources.starts_of(job))]
    return any(map(_COMPLETES.search, texts)) if texts else None


def _without_autos(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = copy.deepcopy(dict(config))
    for *sections, key in deepspeed_config.autos(config):
        section: Any = kept
        for name in sections:
            section = section[name]
        del section[key]
    return kept


def _ask_deepspeed(
    question: Mapping[str, Any],
    version: str,
    plan: Plan,
    transport: Transport,
    env: Mapping[str, str] | None,
) -> dict[str, Any] | None:
    """Return DeepSpeed's error or None; the answer is cached by question, version and Python."""
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
        found: dict[str, Any] | None = json.loads(done.stdout.strip().rpartition("\n")[2])
    except (ClusterkitError, ValueError):
        return None  # a DeepSpeed that cannot be imported is another matter
    with contextlib.suppress(RunFolderError):
        write_atomic(saved, json.dumps(found).encode())
    return found


def _refusal(found: Mapping[str, Any], config: Mapping[str, Any], version: str) -> BadInput:
    place = _place(found, config)
    where = "".join(f".{key}" for key in place)
    value = f": {found['value']}" if "value" in found else ""
    return BadInput(
        f"deepspeed{where}{value}: DeepSpeed {version} says: {found['message']}",
        job=("deepspeed", *place),
    )


def _place(found: Mapping[str, Any], config: Mapping[str, Any]) -> KeyPath:
    """Return the path of an error's key: pydantic gives its end, other errors mention the key."""
    end = tuple(str(key) for key in found["place"])
    for place, _ in deepspeed_config.walk(config):
        if end and place[-len(end) :] == end:
            return place
        if not end and re.search(rf"\b{re.escape(str(place[-1]))}\b", found["message"]):
            return place
    return ()
