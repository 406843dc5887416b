"""What an import creates for its process is a rank's own, whatever the fork server has imported.

A module that Python imports as it starts (`sitecustomize`) imports packages, in the fork server as
in a plain Python. The program then looks through all modules, and draws. What two plain processes
have alike, ranks and starts must have alike; in what those differ, these must.
"""

import importlib.util
import itertools
import json
from pathlib import Path

import pytest

from tests.forked import Case, servers

DATA = Path(__file__).parents[1] / "data"
PACKAGES = {
    "Python's own": [
        "asyncio", "concurrent.futures.thread", "concurrent.futures.process", "hashlib", "logging",
        "multiprocessing.shared_memory", "multiprocessing.util", "random", "secrets", "sqlite3",
        "ssl", "tempfile", "uuid",
    ],
    "torch": ["logging", "numpy", "tempfile", "torch", "torch._dynamo", "uuid"],
    "deepspeed": ["deepspeed"],
    "transformers": ["transformers", "transformers.trainer", "accelerate", "filelock"],
}  # fmt: skip
DRAWS_OF_TORCH = """
import torch
from torch.utils.data import DataLoader, RandomSampler

found["torch.initial_seed"] = torch.initial_seed()
found["torch.rand"] = torch.rand(2).tolist()
found["dropout"] = torch.nn.functional.dropout(torch.ones(99)).tolist()
found["weights"] = torch.nn.Linear(3, 1).weight.tolist()
found["sampler"] = list(RandomSampler(range(50)))
found["shuffle"] = [int(each) for each in DataLoader(range(50), shuffle=True)]
found["torch.Generator"] = torch.Generator().initial_seed()
torch.manual_seed(7)
found["torch, seeded"] = torch.rand(2).tolist()
found["shuffle, seeded"] = [int(each) for each in DataLoader(range(50), shuffle=True)]
"""
SLOW = {"torch", "deepspeed", "transformers"}
NOT_SHOWN = {
    # The order of a set of functions, which is that of their addresses.
    "torch._dynamo.variables.torch_function.banned_attrs",
    # Used once, at the import, for numbers that are unique in a process.
    "sympy.core.symbol.Dummy._base_dummy_index",
    "sympy.core.symbol.Dummy._prng",
    # Keys of attributes, unique in a process.
    "torch.distributed._composable.contract.REGISTRY_KEY",
    "torch.distributed._composable.contract.STATE_KEY",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.thorough if name in SLOW else ()) for name in PACKAGES],
)
def test_forked_ranks_share_and_differ_in_state_like_separate_processes(
    name, tmp_path, tmp_path_factory, monkeypatch
):
    packages = PACKAGES[name]
    if any(importlib.util.find_spec(package.partition(".")[0]) is None for package in packages):
        pytest.skip(f"without {name}")
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib\n" + "".join(f"importlib.import_module({each!r})\n" for each in packages)
    )
    # The fork server imports torch for a program that says its name.
    more = DRAWS_OF_TORCH if name != "Python's own" else ""
    case = Case(
        (DATA / "process_state.py").read_text().replace("#: more", more),
        env={"PYTHONPATH": str(tmp_path), "PYTHONHASHSEED": "0", "DS_ACCELERATOR": "cpu"},
    )
    case.lay_out(tmp_path / "folder")
    monkeypatch.chdir(tmp_path / "folder")
    with servers(tmp_path_factory, nproc=2) as forked:
        for variable, value in case.env.items():
            monkeypatch.setenv(variable, value)
        plain = [state(*forked.run_alone(case)) for _ in range(2)]
        ranks = [state(*each) for _ in range(2) for each in forked.run(case)]
    names = plain[0].keys() & plain[1].keys() - NOT_SHOWN
    own = {name for name in names if plain[0][name] != plain[1][name]}
    assert {"random.random", "uuid.uuid4", "tempfile", "authkey"} <= own
    shared = {
        name: each[name]
        for name in own
        for each, other in itertools.combinations(ranks, 2)
        if each[name] == other[name]
    }
    assert shared == {}
    wrong = {
        name: (plain[0][name], each[name])
        for name in names - own
        for each in ranks
        if each[name] != plain[0][name]
    }
    assert wrong == {}


def state(output, code):
    assert code == 0, output.decode()
    return json.loads(output)
