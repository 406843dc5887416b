"""The job key `estimate`, and the flags that it stands for: those of the programs themselves."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from clusterkit import backends
from clusterkit import estimate as estimates
from clusterkit.cluster import LocalCluster
from clusterkit.errors import BadInput
from clusterkit.estimate import flags, jobs, models
from clusterkit.estimate.mesh import Mesh
from clusterkit.estimate.setup import Setup
from clusterkit.jobfile import loader
from clusterkit.spec import BatchSpec, Estimable, JobSpec

ROOT = Path(__file__).resolve().parents[3]
SENTIMENT = "jobs/sentiment/sentiment.py"
PROGRAMS = [*((name, program.path) for name, program in flags.PROGRAMS.items()),
            ("sentiment", SENTIMENT)]  # fmt: skip
ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {},
    {
        "CLUSTERKIT_GLOBAL_BATCH": "48", "CLUSTERKIT_MICRO_BATCH": "6",
        "CLUSTERKIT_ACCUMULATION": "1", "CLUSTERKIT_DEEPSPEED_CONFIG": "/run/deepspeed.json",
    },
)  # fmt: skip


def described(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """What a parser takes: every flag, by all of its names, with what it makes of some values."""
    found: dict[str, Any] = {"abbreviates": parser.allow_abbrev, "flags": {}}
    for action in parser._actions:
        if action.dest == "help":
            continue
        convert = action.type or str
        made = {}
        for text in ("0", "1", "-1", "2.5", "x"):
            try:
                made[text] = convert(text)
            except (ValueError, argparse.ArgumentTypeError):
                made[text] = "refused"
        default = action.default
        found["flags"]["/".join(action.option_strings)] = {
            "takes a value": action.nargs != 0,
            "choices": action.choices and list(action.choices),
            "default": convert(default) if isinstance(default, str) else default,
            "values": made if action.nargs != 0 else None,
        }
    return found


CATCH = """
import argparse, json, os, runpy, sys
from typing import Any

DESCRIBED
class Caught(BaseException): pass

def parse_args(parser, *_):
    results[-1].append(described(parser))
    raise Caught

argparse.ArgumentParser.parse_args = parse_args
results = []
for path in sys.argv[2:]:
    sys.path.insert(0, os.path.dirname(path))
    results.append([])
    for environment in json.loads(sys.argv[1]):
        os.environ.update(environment)
        try:
            runpy.run_path(path, run_name="__main__")
        except Caught:
            pass
        for name in environment:
            del os.environ[name]
print(json.dumps(results))
"""
"""Run each program until it has made its parser; one process, as torch takes seconds to import."""


@pytest.fixture(scope="module")
def parsers() -> dict[str, list[dict[str, Any]]]:
    """What each program's own parser takes, in each of `ENVIRONMENTS`."""
    paths = [path for _, path in PROGRAMS]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("CLUSTERKIT_")}
    done = subprocess.run(
        [sys.executable, "-c", CATCH.replace("DESCRIBED", inspect.getsource(described)),
         json.dumps(ENVIRONMENTS), *(str(ROOT / path) for path in paths)],
        capture_output=True, text=True, timeout=240, env=clean,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip(paths, json.loads(done.stdout), strict=True))


@pytest.mark.needs("torch")
@pytest.mark.parametrize(("name", "path"), PROGRAMS)
def test_known_flags_and_defaults_are_those_of_program(
    parsers: dict[str, list[dict[str, Any]]], name: str, path: str
) -> None:
    place = f"clusterkit/estimate/flags.py: PROGRAMS[{name!r}]"
    for own, environment in zip(parsers[path], ENVIRONMENTS, strict=True):
        known = json.loads(json.dumps(described(flags.make_parser(name, environment))))
        assert known["abbreviates"] == own["abbreviates"], f"{place}: abbreviates"
        lacking = sorted(own["flags"].keys() - known["flags"].keys())
        assert not lacking, f"{place} lacks {', '.join(lacking)} of {path}"
        if path != SENTIMENT:  # the key stands for sentiment_trainer.py's flags as well
            gone = sorted(known["flags"].keys() - own["flags"].keys())
            assert not gone, f"{place} has {', '.join(gone)}, which {path} does not take"
        for flag, of_program in own["flags"].items():
            other = known["flags"][flag]
            keys = of_program if flag.split("/")[0] in flags.PROGRAMS[name].flags else other.keys()
            for key in keys if keys is of_program else ["takes a value"]:
                assert other[key] == of_program[key], f"{place}: {flag}: {key}, unlike {path}"


def test_job_key_takes_names_of_known_programs() -> None:
    assert get_args(Estimable) == tuple(flags.PROGRAMS)


# ---------------------------------------------------------------- the job key


def test_other_value_of_key_is_refused_with_line_and_valid_values(
    refused: Callable[..., str], write_job: Callable[..., str]
) -> None:
    said = refused("plan", write_job("estimate: bert\n"))
    assert "job.yaml:3: estimate: 'bert' is not a valid value" in said
    assert "allowed: gpt, qwen, sentiment" in said


def test_key_beside_command_is_refused_with_line(refused: Callable[..., str], cwd: Path) -> None:
    (cwd / "job.yaml").write_text("command: [./train.sh]\nestimate: gpt\n")
    said = refused("plan", "job.yaml")
    assert "job.yaml:2: estimate: gpt is about the arguments of a program, not of a comm" in said


def test_plan_is_the_same_with_and_without_key(make_facts: Callable[..., Any]) -> None:
    job = loader.load_job(ROOT / "jobs" / "ddp.yaml")
    assert job.estimate == "gpt"
    cluster, facts = LocalCluster(), make_facts(gpus=2)
    plans = [
        backends.backend("local").plan(spec, cluster, facts, "run")
        for spec in (job, msgspec.structs.replace(job, estimate=None))
    ]
    with_key, without = plans
    assert with_key.job.estimate == "gpt"
    assert msgspec.structs.replace(with_key, job=without.job) == without


@pytest.mark.parametrize("path", sorted(ROOT.glob("jobs/**/*.yaml")), ids=lambda path: path.stem)
def test_jobs_of_known_programs_have_the_key_and_known_arguments(path: Path) -> None:
    job = loader.load_job(path)
    expected = {path: name for name, path in PROGRAMS}.get(job.program or "")
    assert job.estimate == expected
    nodes, gpus = job.node_range[1], job.gpus_per_node
    jobs.read_program(job, nodes=nodes, local_ranks=2 if gpus == "auto" else gpus)


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (["--gloabl-batch", "3"], "--gloabl-batch: jobs/train/gpt/train.py takes no such argument",
         "did you mean --global-batch?"),
        (["--global", "3"], "--global: jobs/train/gpt/train.py takes no", "mean --global-batch?"),
        (["wat"], "wat: jobs/train/gpt/train.py takes no such argument", "train.py --help"),
        (["--global-batch", "0"], "--global-batch: '0' is not a whole number above 0", "--help"),
        (["--schedule", "zb"], "--schedule: invalid choice: 'zb'", "--help"),
        (["--mesh"], "--mesh: expected one argument", "--help"),
        (["--compile=yes"], "--compile: ignored explicit argument 'yes'", "--help"),
    ],
)  # fmt: skip
def test_argument_that_program_does_not_take_is_refused(
    refused: Callable[..., str], write_job: Callable[..., str],
    words: list[str], said: str, hint: str,
) -> None:  # fmt: skip
    lines = "".join(f"  - {json.dumps(word)}\n" for word in ["--steps", "5", *words])
    told = refused("estimate", write_job(f"estimate: gpt\nargs:\n{lines}"), "--gpus", "1",
                   "--gpu-memory", "80GB")  # fmt: skip
    assert f"job.yaml:7: args[2]: {said}" in told
    assert hint in told


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--foo"], "--foo: jobs/train/gpt/train.py takes no such argument"),
     (["--steps"], "--steps: expected one argument")],
)  # fmt: skip
def test_refusal_of_argument_on_command_line_names_no_line_of_file(
    refused: Callable[..., str], write_job: Callable[..., str], words: list[str], said: str
) -> None:
    job = write_job("estimate: gpt\nargs: [--steps, '5']\n")
    told = refused("estimate", job, "--gpus", "1", "--gpu-memory", "80GB", "--", *words)
    assert told.startswith(f"error: after --: {said}")


def test_argument_of_unknown_program_is_not_refused(
    cli: Callable[..., Any], write_job: Callable[..., str]
) -> None:
    done = cli("estimate", write_job("args: [--gloabl-batch, '3', x]\n"), "--model", "gpt2",
               "--gpus", "1", "--gpu-memory", "80GB")  # fmt: skip
    assert done.code == 0
    key = "the job key estimate: gpt|qwen|sentiment says whose flags `args` has"
    assert f"note: the first line assumes ddp: {key}" in done.err


def test_unknown_model_names_key_to_add(
    refused: Callable[..., str], write_job: Callable[..., str]
) -> None:
    said = refused("estimate", write_job(), "--gpus", "1", "--gpu-memory", "80GB")
    assert "the job key estimate: gpt|qwen|sentiment says whose flags `args` has" in said


def test_abbreviated_flag_is_understood_where_program_does() -> None:
    assert flags.parse("sentiment", ["--max-len", "7"], {})["max_length"] == 7
    with pytest.raises(BadInput, match=r"args: ambiguous option: --se could match --sep"):
        flags.parse("sentiment", ["--se", "7"], {})


# ---------------------------------------------------------------- what a job then trains with


def setup_of(kind: str, *words: str, ranks: int = 8, **job: Any) -> Setup:
    job = {"program": "train.py", "workdir": str(ROOT), **job}
    spec = JobSpec(name="x", estimate=kind, args=words, **job)  # type: ignore[arg-type]
    nodes = spec.node_range[1]
    program = jobs.read_program(spec, nodes=nodes, local_ranks=ranks // nodes)
    model = models.gpt("355m") if kind == "gpt" else models.hugging_face("qwen2-0.5b", 128)
    return jobs.setup_of(
        spec, program, ranks=ranks, local_ranks=ranks // nodes, device="cuda", model=model
    )


def batch_of(*words: str, **job: Any) -> tuple[int, int]:
    """Micro batch and accumulation of train.py on 8 GPUs."""
    setup = setup_of("gpt", *words, **job)
    return setup.micro, setup.accumulation


STAGES = ("--strategy", "pp", "--mesh", "pp=4,dp=2")
ZERO1 = {"zero_optimization": {"stage": 1}}


@pytest.mark.parametrize(
    ("words", "job", "expected"),
    [
        ((), {}, (4, 1)),
        (("--global-batch", "64"), {}, (8, 1)),
        (("--micro-batch", "2"), {}, (2, 1)),
        # The job's batch is shared between all ranks, whatever the mesh.
        (STAGES, {"batch": BatchSpec(global_size=48)}, (6, 4)),
        (STAGES, {"batch": BatchSpec(micro=2)}, (2, 4)),
        ((*STAGES, "--micro-batch", "3"), {"batch": BatchSpec(global_size=48)}, (3, 8)),
        (("--micro-batch", "2"), {"batch": BatchSpec(global_size=48)}, (2, 3)),
        # Without a size, 1F1B has as many micro batches as stages, GPipe one.
        (STAGES, {}, (4, 4)),
        ((*STAGES, "--schedule", "gpipe"), {}, (16, 1)),
        # Of an elastic job each rank knows only what the job says.
        ((), {"nodes": "1:4", "batch": BatchSpec(global_size=48)}, (6, 1)),
        (("--micro-batch", "${clusterkit.accumulation}"),
         {"batch": BatchSpec(global_size=48, accumulation=2)}, (2, 3)),
        (("--strategy", "deepspeed"), {"deepspeed": ZERO1}, (4, 1)),
        (("--strategy", "deepspeed"),
         {"deepspeed": {**ZERO1, "train_micro_batch_size_per_gpu": 3}}, (3, 1)),
        (("--strategy", "ddp"),
         {"deepspeed": {**ZERO1, "train_micro_batch_size_per_gpu": 3}}, (4, 1)),
    ],
)  # fmt: skip
def test_batch_is_worked_out_as_train_py_does(
    words: tuple[str, ...], job: dict[str, Any], expected: tuple[int, int]
) -> None:
    assert batch_of(*words, **job) == expected


@pytest.mark.parametrize(
    ("kind", "words", "job", "expected"),
    [
        ("gpt", (), {}, ("ddp", "bf16")),
        # train.py reads the section with --strategy deepspeed alone.
        ("gpt", (), {"deepspeed": ZERO1}, ("ddp", "bf16")),
        ("gpt", ("--strategy", "ddp"), {"deepspeed": ZERO1}, ("ddp", "bf16")),
        ("gpt", ("--strategy", "deepspeed"), {"deepspeed": ZERO1}, ("zero1", "fp32")),
        (
            "gpt",
            ("--strategy", "deepspeed", "--dtype", "bf16"),
            {"deepspeed": ZERO1},
            ("zero1", "bf16"),
        ),
        ("qwen", (), {"deepspeed": ZERO1 | {"bf16": {"enabled": True}}}, ("zero1", "bf16")),
        ("qwen", ("--strategy", "fsdp"), {"deepspeed": ZERO1}, ("fsdp", "bf16")),
        # The sentiment programs cast nothing, and use a section whenever there is one.
        ("sentiment", (), {}, ("ddp", "fp32")),
        ("sentiment", (), {"deepspeed": ZERO1}, ("zero1", "fp32")),
    ],
)
def test_strategy_and_precision_are_those_of_program(
    kind: str, words: tuple[str, ...], job: dict[str, Any], expected: tuple[str, str]
) -> None:
    setup = setup_of(kind, *words, **job)
    assert (setup.strategy, setup.precision) == expected


@pytest.mark.parametrize(
    ("words", "job", "expected"),
    [
        ((), {}, (16, 1)),
        (("--batch", "4", "--accumulation", "2"), {}, (4, 2)),
        ((), {"batch": BatchSpec(global_size=32, micro=2)}, (2, 2)),
        (("--batch", "8"), {"batch": BatchSpec(global_size=32)}, (8, 1)),
    ],
)
def test_batch_of_sentiment_programs_is_that_of_one_rank(
    words: tuple[str, ...], job: dict[str, Any], expected: tuple[int, int]
) -> None:
    setup = setup_of("sentiment", *words, **job)
    assert (setup.micro, setup.accumulation) == expected


def test_flag_for_config_comes_before_deepspeed_section(cwd: Path) -> None:
    (cwd / "mine.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    words = ("--strategy", "deepspeed", "--deepspeed-config", str(cwd / "mine.json"))
    assert setup_of("gpt", *words, deepspeed=ZERO1).strategy == "zero3"
    named = ("--strategy", "deepspeed", "--deepspeed-config", "${clusterkit.deepspeed_config}")
    assert setup_of("gpt", *named, deepspeed=ZERO1).strategy == "zero1"
    for path in ("gone.json", str(cwd)):
        with pytest.raises(BadInput, match="no JSON object that can be read"):
            setup_of("sentiment", "--deepspeed-config", path)
    with pytest.raises(BadInput, match="--strategy deepspeed without a config"):
        setup_of("qwen")


def test_mesh_that_does_not_fit_is_refused_with_line(
    refused: Callable[..., str], write_job: Callable[..., str]
) -> None:
    job = write_job("estimate: gpt\nargs: [--strategy, tp, --mesh, tp=3]\n")
    said = refused("estimate", job, "--gpus", "4", "--gpu-memory", "80GB")
    assert "job.yaml:4: --mesh tp=3: tp 3 is 3 ranks, not 4" in said


def test_deepspeed_divides_by_mesh_as_well() -> None:
    words = ("--strategy", "deepspeed", "--mesh", "tp=2", "--micro-batch", "2")
    setup = setup_of("gpt", *words, deepspeed=ZERO1)
    assert (setup.strategy, setup.mesh) == ("zero1", Mesh(tp=2, shard=4))
    assert setup.vocabulary_slices == 1
    assert setup_of("gpt", "--strategy", "tp", "--mesh", "tp=2").vocabulary_slices == 2


def test_model_option_keeps_what_job_says_of_samples(cli: Callable[..., Any]) -> None:
    words = ["--gpus", "2", "--gpu-memory", "80GB", "--json"]
    job = str(ROOT / "jobs" / "qwen.yaml")
    if not Path(job).exists():
        job = str(next(ROOT.glob("jobs/**/qwen.yaml")))
    named = cli("estimate", job, "--model", "qwen2-0.5b", *words).json
    assert named["model"]["context"] == 128
    again = cli("estimate", job, *words, "--", "--model", "qwen2-0.5b", "--context", "64").json
    assert again["model"]["context"] == 64
    assert "qwen2" in again["model"]["origin"]


def test_warning_is_silent_about_job_without_key(make_facts: Callable[..., Any]) -> None:
    words = ("--model", "1.5b", "--global-batch", "64")
    job = JobSpec(name="x", program="jobs/train/gpt/train.py", args=words, workdir=str(ROOT))
    assert estimates.warning(job, make_facts(gpus=1)) is None
    known = msgspec.structs.replace(job, estimate="gpt")
    assert "1.5b with ddp on 1 GPU" in (estimates.warning(known, make_facts(gpus=1)) or "")
