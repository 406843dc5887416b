"""The check of a ``deepspeed`` section, held against what DeepSpeed itself says."""

import json
import subprocess
import sys

import pytest

from clusterkit import api
from clusterkit.errors import BadInput
from clusterkit.jobfile import deepspeed_config, loader
from clusterkit.jobfile.deepspeed_config import VERSION
from clusterkit.lifecycle import deepspeed_probe
from clusterkit.run import folder as run_folder
from clusterkit.transport import Completed
from tests import deepspeed_table

B = {"train_batch_size": 4}
Z = "zero_optimization"


def zero(**keys):
    return {Z: keys, **B}


GOOD = {
    "batch alone": B,
    "micro alone": {"train_micro_batch_size_per_gpu": 3},
    "micro and accumulation": {
        "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5,
    },
    "all three": {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
    },
    "batch and accumulation": {"train_batch_size": 8, "gradient_accumulation_steps": 2},
    "stages": zero(stage=3),
    "a stage as a float": zero(stage=2.0),
    "buckets as floats": zero(stage=2, reduce_bucket_size=5e8, allgather_bucket_size=2e8),
    "a bucket as text": zero(stage=2, reduce_bucket_size="500000000"),
    "a bucket left to DeepSpeed": zero(stage=2, reduce_bucket_size="auto"),
    "offload": zero(stage=3, offload_optimizer={"device": "cpu", "pin_memory": True}),
    "no offload": zero(stage=3, offload_optimizer=None, offload_param=None),
    "nvme": zero(stage=3, offload_param={"device": "nvme", "nvme_path": "/nvme"}),
    "the old offload": zero(stage=2, cpu_offload=True),
    "stage 3's aliases": zero(stage=3, stage3_max_live_parameters=1e9,
                              stage3_gather_16bit_weights_on_model_save=True),
    "overlap": zero(stage=1, overlap_comm=None, contiguous_gradients=1),
    "zero as true": {Z: True, **B},
    "leaf modules": zero(stage=3, leaf_module={"names": ["a"]}),
    "fp16": {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}, **B},
    "bf16": {"bf16": {"enabled": True}, "fp16": {"enabled": False}, **B},
    "bf16 by its old name": {"bfloat16": {"enabled": True}, **B},
    "optimizer": {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 1]}}, **B},
    "scheduler": {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}, **B},
    "clipping": {"gradient_clipping": 1, "prescale_gradients": False, **B},
    "logging": {"steps_per_print": 2000, "wall_clock_breakdown": False, "dump_state": True, **B},
    "tensorboard": {"tensorboard": {"enabled": False, "output_path": "x"}, **B},
    "comms": {"comms_logger": {"enabled": True, "verbose": False}, **B},
    "flops": {"flops_profiler": {"enabled": True, "profile_step": 1, "output_file": None}, **B},
    "activations": {"activation_checkpointing": {"partition_activations": True}, **B},
    "communication in fp32": {"communication_data_type": "FP32", **B},
    "sum": {"gradient_allreduce_op": "sum", **B},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, **B},
    "tensor parallel": {"tensor_parallel": {"autotp_size": 2}, **B},
    "pipeline": {"pipeline": {"stages": "auto", "partition": "best"}, **B},
    "sequence parallel": {"sequence_parallel_size": 2, "train_batch_size": 3},
    "timers": {"timers": {"throughput": {"enabled": False}}, **B},
    "a key of the program's own": {"my_own_settings": {"a": 1}, **B},
}  # fmt: skip

BAD = {
    "stage 9": (zero(stage=9), f"{Z}.stage"),
    "a stage as text": (zero(stage="two"), f"{Z}.stage"),
    "an unknown key": (zero(stage=2, offload_optimiser={}), f"{Z}.offload_optimiser"),
    "an unknown device": (zero(offload_param={"device": "gpu"}), f"{Z}.offload_param.device"),
    "offload as a word": (zero(offload_optimizer="cpu"), f"{Z}.offload_optimizer"),
    "offload's typo": (zero(offload_param={"devise": "cpu"}), f"{Z}.offload_param.devise"),
    "a bucket of nothing": (zero(reduce_bucket_size=0), f"{Z}.reduce_bucket_size"),
    "half a bucket": (zero(reduce_bucket_size=0.5), f"{Z}.reduce_bucket_size"),
    "a bucket in words": (zero(reduce_bucket_size="big"), f"{Z}.reduce_bucket_size"),
    "a bucket as a list": (zero(reduce_bucket_size=[1]), f"{Z}.reduce_bucket_size"),
    "a ratio above 1": (zero(stage=3, offload_optimizer={"ratio": 2}),
                        f"{Z}.offload_optimizer.ratio"),
    "a boolean in words": (zero(overlap_comm="perhaps"), f"{Z}.overlap_comm"),
    "a boolean that is 2": (zero(overlap_comm=2), f"{Z}.overlap_comm"),
    "nothing for a boolean": (zero(reduce_scatter=None), f"{Z}.reduce_scatter"),
    "MiCS": (zero(mics_shard_size=2), f"{Z}.mics_shard_size"),
    "zero as a number": ({Z: 2, **B}, Z),
    "zero as nothing": ({Z: None, **B}, Z),
    "amp": ({"amp": {"enabled": True}, **B}, "amp"),
    "elasticity": ({"elasticity": {"enabled": True}, **B}, "elasticity"),
    "curriculum": ({"curriculum_learning": {}, **B}, "curriculum_learning"),
    "sparse attention": ({"sparse_attention": {}, **B}, "sparse_attention"),
    "compression": ({"compression_training": {}, **B}, "compression_training"),
    "both halves": ({"fp16": {"enabled": True}, "bf16": {"enabled": True}, **B}, "bf16.enabled"),
    "fp16 as a boolean": ({"fp16": True, **B}, "fp16"),
    "fp16's typo": ({"fp16": {"enable": True}, **B}, "fp16.enable"),
    "a scale in words": ({"fp16": {"loss_scale": "dynamic"}, **B}, "fp16.loss_scale"),
    "no mean": ({"gradient_allreduce_op": "max", **B}, "gradient_allreduce_op"),
    "communication in int8": ({"communication_data_type": "int8", **B}, "communication_data_type"),
    "no batch": ({}, ""),
    "accumulation alone": ({"gradient_accumulation_steps": 2}, ""),
    "a batch of no multiple": ({"train_batch_size": 5}, "train_batch_size"),
    "a product that does not hold": (
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
         "gradient_accumulation_steps": 3}, "train_batch_size",
    ),
    "less than one batch": (
        {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 4}, "train_batch_size",
    ),
    "a batch of 0": ({"train_batch_size": 0}, "train_batch_size"),
    "a batch below 0": ({"train_micro_batch_size_per_gpu": -1}, "train_micro_batch_size_per_gpu"),
    "a batch as text": ({"train_batch_size": "4"}, "train_batch_size"),
    "a batch that is auto": ({"train_batch_size": "auto"}, "train_batch_size"),
    "a micro batch that is auto": (
        {"train_batch_size": 4, "train_micro_batch_size_per_gpu": "auto"},
        "train_micro_batch_size_per_gpu",
    ),
    "a list for the optimizer": ({"optimizer": ["AdamW"], **B}, "optimizer"),
}  # fmt: skip

STRICTER = {
    "a typo that is passed over": ({"train_batch_sise": 2, **B}, "train_batch_sise"),
    "a scheduler's typo": ({"scheduler": {"type": "WarmupLR", "parms": {}}, **B},
                           "scheduler.parms"),
    "clipping in words": ({"gradient_clipping": "some", **B}, "gradient_clipping"),
    "clipping that is auto": ({"gradient_clipping": "auto", **B}, "gradient_clipping"),
    "a rate that is auto": (
        {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, **B}, "optimizer.params.lr",
    ),
}  # fmt: skip
"""DeepSpeedConfig lets these pass; they fail, or do nothing, when the engine starts."""

RANKS = 2
HARNESS = """
import io, json, sys
program, cases = json.loads(sys.stdin.buffer.read())
verdicts, out = [], sys.stdout
for case in cases:
    sys.stdin = io.TextIOWrapper(io.BytesIO(json.dumps(case).encode()))
    sys.stdout = said = io.StringIO()
    exec(program, {})
    verdicts.append(json.loads(said.getvalue()))
print(json.dumps(verdicts), file=out)
"""


def own_check(config):
    """The key that our own check refuses, None if none."""
    try:
        deepspeed_config.check_keys(config)
        deepspeed_config.check_sizes(config, RANKS)
    except BadInput as error:
        return ".".join(map(str, error.key[1:]))
    return None


@pytest.fixture(scope="module")
def verdicts():
    """What DeepSpeed says of every config here, asked in one process."""
    pytest.importorskip("deepspeed")
    every = GOOD | {name: case[0] for name, case in (BAD | STRICTER).items()}
    cases = [{"config": config, "ranks": RANKS} for config in every.values()]
    done = subprocess.run(
        [sys.executable, "-c", HARNESS],
        input=json.dumps([deepspeed_probe._PROGRAM, cases]).encode(),
        capture_output=True,
        check=True,
    )
    return dict(zip(every, json.loads(done.stdout.splitlines()[-1]), strict=True))


def test_config_tables_hold_more_than_70_cases():
    assert len(GOOD) + len(BAD) + len(STRICTER) > 70


@pytest.mark.parametrize("name", GOOD)
def test_config_accepted_by_deepspeed_is_accepted(name, verdicts):
    assert verdicts[name] is None
    assert own_check(GOOD[name]) is None


@pytest.mark.parametrize("name", BAD)
def test_config_refused_by_deepspeed_is_refused_with_key(name, verdicts):
    assert verdicts[name] is not None
    assert own_check(BAD[name][0]) == BAD[name][1]


@pytest.mark.parametrize("name", STRICTER)
def test_config_error_that_deepspeed_ignores_is_refused(name, verdicts):
    assert verdicts[name] is None
    assert own_check(STRICTER[name][0]) == STRICTER[name][1]


def test_config_table_matches_installed_deepspeed():
    pytest.importorskip("deepspeed")
    assert deepspeed_table.TABLE.read_text() == deepspeed_table.text(), (
        "python -m tests.deepspeed_table"
    )


# ---------------------------------------------------------------- in a plan


class Asking:
    """A transport whose hosts' DeepSpeed says what is given, and counts how often it is asked."""

    def __init__(self, said, exit_code=0):
        self.said, self.exit_code, self.asked = said, exit_code, []

    def run(self, host, argv, *, env=None, timeout=None, stdin=b""):
        self.asked.append(json.loads(stdin))
        return Completed(tuple(argv), self.exit_code, f"noise\n{json.dumps(self.said)}\n", "")


@pytest.fixture
def examine(write_job, cwd, make_facts):
    """Examine a job file's section as `api.prepare` does; gives the notes."""

    def call(text, *, program="import deepspeed\n", transport=None, version=VERSION, gpus=2):
        name = write_job(text)
        (cwd / "train.py").write_text(program)
        facts = make_facts(versions={"torch": "2.13.0", "deepspeed": version})
        ready = api.prepare(name, facts=facts, gpus=gpus)
        notes = deepspeed_probe.examine(ready.job, ready.plan, facts, transport)
        return [note.name or note.value for note in notes]

    return call


BAD_SECTIONS = {
    "stage": (
        "deepspeed:\n  train_batch_size: 4\n  zero_optimization:\n    stage: 9\n",
        "job.yaml:6: deepspeed.zero_optimization.stage: 9 is not one of 0, 1, 2, 3",
    ),
    "spelling": (
        "deepspeed: {zero_optimisation: {stage: 2}}\nbatch: {micro: 1}\n",
        "job.yaml:3: deepspeed.zero_optimisation: unknown key (did you mean zero_optimization?)",
    ),
    "removed": (
        "batch: {micro: 1}\ndeepspeed:\n  amp: {enabled: true}\n",
        f"job.yaml:5: deepspeed.amp: DeepSpeed {VERSION} no longer has `amp`",
    ),
    "arithmetic": (
        "deepspeed:\n  train_batch_size: 5\n",
        "job.yaml:4: deepspeed.train_batch_size: global 5 is not a multiple of 2 ranks",
    ),
    "no batch": ("deepspeed:\n  fp16: {enabled: false}\n", "job.yaml:3: deepspeed: no batch size"),
    "auto": (
        "deepspeed:\n  train_micro_batch_size_per_gpu: auto\n",
        "job.yaml:4: deepspeed.train_micro_batch_size_per_gpu: auto, but nothing",
    ),
}


@pytest.mark.needs("deepspeed")
@pytest.mark.parametrize("name", BAD_SECTIONS)
def test_plan_refuses_bad_section_with_line_and_key(name, refused, write_job):
    text, message = BAD_SECTIONS[name]
    assert refused("plan", write_job(text), "--gpus", "2").startswith(f"error: {message}")


AUTO = "deepspeed: {train_batch_size: auto, zero_optimization: {reduce_bucket_size: auto}}\n"


@pytest.mark.parametrize(
    "program",
    [
        "from transformers import Trainer\n",
        "parser = HfArgumentParser((TrainingArguments,))\n",
        "from accelerate import Accelerator\n",
        "config['train_batch_size'] = args.batch\n",
        "import helpers\n",
    ],
)
def test_auto_is_accepted_for_program_that_fills_it_in(program, examine, cwd):
    (cwd / "helpers.py").write_text("if value == 'auto': value = 1\n")
    assert examine(AUTO, program=program) == []


def test_plan_notes_auto_when_program_cannot_be_read(facts, cwd):
    (cwd / "train.sh").touch(0o755)
    (cwd / "job.yaml").write_text(f"command: [./train.sh]\n{AUTO}")
    plan = api.plan("job.yaml", facts=facts)
    names = "train_batch_size, zero_optimization.reduce_bucket_size"
    assert f"deepspeed: nothing is known to fill in auto: {names}" in [
        note.value or note.name for note in plan.notes
    ]


def test_examine_notes_key_that_is_not_of_deepspeed(examine):
    (note,) = examine("batch: {micro: 1}\ndeepspeed: {my_settings: {a: 1}}\n")
    assert note.startswith("deepspeed.my_settings is not a key of DeepSpeed")


SECTION = "batch: {micro: 2}\ndeepspeed:\n  zero_optimization:\n    stage: 2\n"


def test_deepspeed_of_hosts_is_asked_once_and_can_refuse(examine, clusterkit_home):
    wrong = {"message": "Input should be 7", "place": ["zero_optimization", "stage"], "value": "2"}
    transport = Asking(wrong)
    for _ in range(2):
        with pytest.raises(BadInput) as error:
            examine(SECTION, transport=transport)
        assert error.value.message == (
            f"deepspeed.zero_optimization.stage: 2: DeepSpeed {VERSION} says: Input should be 7"
        )
        assert error.value.key == ("deepspeed", "zero_optimization", "stage")
    (asked,) = transport.asked
    assert asked["ranks"] == 2
    assert asked["config"]["train_batch_size"] == 4
    assert len(list((clusterkit_home / "cache" / "deepspeed").iterdir())) == 1
    with pytest.raises(BadInput):
        examine(SECTION, transport=transport, gpus=4)
    assert [each["ranks"] for each in transport.asked] == [2, 4]


def test_deepspeed_message_without_place_is_traced_to_named_key(examine):
    said = {"message": "zero_optimization: stage is not supported", "place": []}
    with pytest.raises(BadInput) as error:
        examine(SECTION, transport=Asking(said))
    assert error.value.key == ("deepspeed", "zero_optimization")


def test_failing_deepspeed_probe_refuses_nothing(examine):
    transport = Asking("not an answer", exit_code=1)
    transport.run = lambda *args, **options: Completed((), 1, "", "ImportError")
    assert examine(SECTION, transport=transport) == []
    assert not (run_folder.home() / "cache" / "deepspeed").exists()


def test_deepspeed_is_asked_without_values_that_program_fills_in(examine):
    transport = Asking(None)
    assert examine(AUTO, program="from transformers import Trainer\n", transport=transport) == []
    assert transport.asked == [
        {
            "ranks": 1,
            "config": {
                "zero_optimization": {},
                "gradient_clipping": 0.0,
                "train_micro_batch_size_per_gpu": 1,
            },
        }
    ]


def test_keys_of_other_deepspeed_version_are_left_to_hosts(examine):
    section = "batch: {micro: 2}\ndeepspeed: {zero_optimization: {stage: 2, of_the_future: 1}}\n"
    with pytest.raises(BadInput, match="of_the_future"):
        examine(section)
    transport = Asking(None)
    assert examine(section, version="0.99.0", transport=transport) == []
    assert len(transport.asked) == 1


JSON = """{
\t"train_batch_size": 4,
\t"zero_optimization": {
\t\t"stage": %s,\t"env": {"FLAG": 10}
\t}
}
"""


@pytest.fixture
def beside(write_job, cwd, monkeypatch):
    """A job file in a folder of its own whose section is a file beside it; gives the job's path."""

    def write(text, name="ds_config.json", section=None):
        write_job(f"deepspeed: {section or name}\n")
        folder = cwd / "jobs"
        folder.mkdir(exist_ok=True)
        (cwd / "job.yaml").rename(folder / "job.yaml")
        (folder / name).write_text(text)
        return "jobs/job.yaml"

    return write


def test_section_may_name_file_beside_job(beside, facts):
    text = '{"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 1E-4}}}'
    job = loader.load_job(beside(text))
    assert job.deepspeed == json.loads(text)
    assert api.plan(beside(text), facts=facts, gpus=2).files
    job = loader.load_job(beside(text), ["deepspeed.train_batch_size=8"])
    assert job.deepspeed["train_batch_size"] == 8
    plain = beside(text, name="ds.yaml")
    assert loader.load_job(plain, ["deepspeed=ds_config.json"]).deepspeed == json.loads(text)


def test_json_config_file_may_use_tabs(beside):
    assert loader.load_job(beside(JSON % "2")).deepspeed == json.loads(JSON % "2")


@pytest.mark.needs("deepspeed")
def test_error_in_config_file_names_its_own_line(beside, refused):
    text = '{\n"train_batch_size": 4,\n"zero_optimization":\n{"stage": 9}}'
    said = refused("plan", beside(text), "--gpus", "2")
    assert said.startswith("error: jobs/ds_config.json:4: deepspeed.zero_optimization.stage: 9 is")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1', "not YAML"),
        ('{"a": 1,\n"a": 2}', "ds_config.json:2: deepspeed.a: is already set in line 1"),
        ("[1]", "is a list, not a mapping"),
        ("", "the file is empty"),
        ('{\n// why\n"a": 1}', "ds_config.json:2: a JavaScript comment (// or /*)"),
        ('{"a": 1, // why\n"b": 2}', "ds_config.json:1: a JavaScript comment (// or /*)"),
        ('{\n"a": 1 // why\n}', "ds_config.json:2: a JavaScript comment (// or /*)"),
        ('{"a": 1, /* why */\n"b": 2}', "ds_config.json:1: a JavaScript comment (// or /*)"),
    ],
)
def test_invalid_config_file_is_refused(text, said, beside, refused):
    assert said in refused("plan", beside(text)).splitlines()[0]


def test_missing_config_file_is_refused_with_job_line(beside, refused):
    said = refused("plan", beside("{}", section="ds_confg.json"))
    assert said.startswith(
        "error: jobs/job.yaml:3: deepspeed: jobs/ds_confg.json: no such file or directory"
    )
    assert "did you mean jobs/ds_config.json?" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            'deepspeed: {\n  // why\n  "bf16": {"enabled": true}\n  }\n',
            "job.yaml:4: a JavaScript comment",
        ),
        ('deepspeed: {\n\t"bf16": {"enabled": true}\n  }\n', "job.yaml:4: a tab where YAML needs"),
    ],
)
def test_comment_or_tab_in_pasted_json_is_refused_with_line(text, said, refused, write_job):
    assert refused("plan", write_job(text)).startswith(f"error: {said}")


def test_value_with_slashes_is_not_taken_as_comment(write_job):
    text = 'deepspeed: {tensorboard: {output_path: "a // b", job_name: http://x/y}}\n'
    job = loader.load_job(write_job(f"description: a // b\n{text}"))
    assert job.deepspeed == {"tensorboard": {"output_path": "a // b", "job_name": "http://x/y"}}


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_plan_asks_local_deepspeed_about_section(stage, cwd, write_job, refused):
    pytest.importorskip("deepspeed")
    write_job(
        "batch: {micro: 2}\ndeepspeed:\n  zero_optimization:\n"
        f"    stage: {stage}\n    offload_optimizer: {{device: cpu, ratio: 0.5}}\n"
    )
    if stage == 3:
        assert api.plan("job.yaml").world_size == 1
        return
    said = refused("plan", "job.yaml")
    assert said.startswith(
        f"error: job.yaml:5: deepspeed.zero_optimization: DeepSpeed {VERSION} says: "
    )
    assert "Partial offloading" in said
