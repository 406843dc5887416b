"""A program computes in every run what it computes under ``python``, whatever is preloaded."""

import os
import subprocess
import sys
import sysconfig
import time
import types

import pytest

from clusterkit.agent import preload
from tests.unit import test_forkserver

packages, agent = test_forkserver.packages, test_forkserver.agent
TORCH = """
import json, logging, os
import other
seen = [os.environ.get("TORCH_LOGS"), json.dumps(1), other.found, logging.getLoggerClass().__name__]
"""
STAND_INS = {
    "nothing": "",
    "a variable": "import os\nos.environ['TORCH_LOGS'] = '+all'",
    "a variable of a default": "import os\nos.environ.setdefault('TORCH_LOGS', '+all')",
    "a variable, by a file": "import os\nfor line in ['TORCH_LOGS=+all']:\n"
    "    os.environ[line.split('=')[0]] = line.split('=')[1]",
    "a class": "import logging\nclass Own(logging.Logger): pass\nlogging.setLoggerClass(Own)",
    "a function": "import json\njson.dumps = lambda _: 'patched'",
    "a folder": "import sys\nsys.path.insert(0, 'lib')",
    "a module": "import sys, types\nsys.modules['other'] = types.SimpleNamespace(found='stand-in')",
    "a file beside the program": "",
}


def outputs(agent, program, *arguments, **env):
    """Of ranks 0 of two runs, and of ``python``."""
    said = []
    for run in ("first", "second"):
        begun = agent(program, *arguments, run=run, **env)
        assert begun.end() == 0, begun.lines()
        said.append(begun.says(0))
    done = subprocess.run(
        [sys.executable, "program.py", *arguments], cwd=agent.folder, capture_output=True,
        text=True, check=True, env={**os.environ, "RANK": "0", **env},
    )  # fmt: skip
    return [*said, done.stdout.splitlines()]


@pytest.mark.parametrize("name", STAND_INS)
def test_statements_before_torch_import_take_effect_as_under_python(name, agent, packages):
    packages("torch", TORCH)
    packages("other", "found = 'installed'\n")
    (agent.folder / "lib").mkdir()
    place = agent.folder if name == "a file beside the program" else agent.folder / "lib"
    (place / "other.py").write_text("found = 'own'\n")
    text = STAND_INS[name]
    first, second, plain = outputs(agent, f"{text}\nimport torch\nprint(torch.seen)")
    assert first == second == plain


def test_preload_does_not_run_sysconfig_data_of_program(agent, packages):
    packages("torch", "")
    packages(vars(sysconfig)["_get_sysconfigdata_name"](), "raise RuntimeError")
    first, second, plain = outputs(agent, "import torch\nprint('done')")
    assert first == second == plain == ["done"]


@pytest.mark.parametrize("folder", [".", "lib"])
def test_torch_imports_shadowed_stdlib_module_as_under_python(folder, agent, packages):
    packages("torch", "import random\nseen = hasattr(random, 'mine')\n")
    (agent.folder / "lib").mkdir()
    (agent.folder / folder / "random.py").write_text("mine = True\n")
    shared = os.environ.get("PYTHONPATH", "")
    variables = {"PYTHONPATH": f"{agent.folder / 'lib'}:{shared}"}
    first, second, plain = outputs(agent, "import torch\nprint(torch.seen)", **variables)
    assert first == second == plain == ["True"]


def test_package_reading_rank_at_import_sees_rank_of_each_process(agent, packages):
    """As Lightning and torchmetrics do."""
    packages("torch", "")
    packages("zero", "import os\nrank = os.environ['RANK']\n")
    for run in ("first", "second", "third"):
        begun = agent("import torch, zero\nprint(zero.rank)", nproc=2, run=run)
        assert begun.end() == 0
        assert [begun.says(0), begun.says(1)] == [["0"], ["1"]]


REAL = """
import os
os.environ.update(OMP_NUM_THREADS="3", PYTORCH_JIT="0", TORCH_LOGS="+bytecode")
import torch, torch._logging
print(torch.get_num_threads(), torch.jit._state._enabled.enabled,
      torch._logging._internal.log_state.artifact_names)
"""
HUB = """
import os
os.environ["HF_HUB_OFFLINE"], os.environ["TRANSFORMERS_VERBOSITY"] = "1", "error"
os.environ["HF_HOME"] = os.path.abspath("hub")
import torch, transformers
from huggingface_hub import constants
print(constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE, transformers.logging.get_verbosity())
"""
PLOT = """
import os
os.environ["MPLBACKEND"], os.environ["MPLCONFIGDIR"] = "svg", os.path.abspath("mpl")
import torch, matplotlib.pyplot
print(matplotlib.get_backend(), matplotlib.get_configdir())
"""
DYNAMO = """
import os, sys, torch
print("torch._dynamo" in sys.modules)
os.environ["TORCHDYNAMO_SUPPRESS_ERRORS"] = os.environ["TORCHINDUCTOR_MAX_AUTOTUNE"] = "1"
torch.optim.AdamW(torch.nn.Linear(1, 1).parameters())
print("torch._dynamo" in sys.modules, torch._dynamo.is_compiling(), type(torch._dynamo).__name__)
print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)))
torch.set_num_interop_threads(2)
import torch._inductor.config, torch.fx.experimental.symbolic_shapes
print(torch._dynamo.config.suppress_errors, torch._inductor.config.max_autotune,
      torch.fx.experimental.symbolic_shapes.__name__)
"""


@pytest.mark.parametrize(
    "program",
    [REAL, DYNAMO, *(pytest.param(x, marks=pytest.mark.thorough) for x in (HUB, PLOT))],
)
def test_real_packages_print_same_results_as_under_python(program, agent):
    first, second, plain = outputs(agent, program)
    assert first == second == plain


def test_preload_removes_inductor_cache_folder_only_if_new_and_empty(tmp_path, monkeypatch):
    made, kept = tmp_path / "made", tmp_path / "kept"
    began = time.time()
    made.mkdir()
    kept.mkdir()
    for folder, since in ((made, began), (kept, began + 60), (tmp_path / "none", began)):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        preload._remove_empty_cache(since)
    assert list(tmp_path.iterdir()) == [kept]
    (kept / "code.py").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(kept))
    preload._remove_empty_cache(began)
    assert kept.exists()


class Library:
    """NVML's: it counts who has opened it."""

    def __init__(self, opened: int) -> None:
        self.opened = opened

    def nvmlShutdown(self) -> int:
        if self.opened == 0:
            return 1  # NVML_ERROR_UNINITIALIZED
        self.opened -= 1
        return 0


@pytest.mark.parametrize(("by_pynvml", "left"), [(0, 0), (1, 3)])
def test_preload_shuts_nvml_down_unless_pynvml_uses_nvml(monkeypatch, by_pynvml, left):
    """It counts, and has the GPUs' devices open until all have closed it; pynvml's users go on."""
    library = Library(3)
    monkeypatch.setattr("ctypes.CDLL", lambda name, mode: library)
    monkeypatch.setitem(sys.modules, "pynvml", types.SimpleNamespace(_nvmlLib_refcount=by_pynvml))
    preload._close_nvml()
    assert library.opened == left


NVML = "import os, torch\nprint('PYTORCH_NVML_BASED_CUDA_CHECK' in os.environ, torch.there)\n"


@pytest.mark.parametrize("set_by", ["nobody", "the program", "a package", "the job"])
def test_preload_hides_only_its_own_nvml_cuda_check_variable(set_by, agent, packages):
    """DeepSpeed sets it itself, before it imports torch."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    packages("torch", f"import os\nthere = os.environ.get('{name}')\n")
    packages("deepspeed", f"import os\nos.environ.setdefault('{name}', '1')\nimport torch\n")
    text = {
        "a package": "import deepspeed\n",
        "the program": f"import os\nos.environ['{name}'] = '0'\n",
    }
    options = ["--preload", "deepspeed"] if set_by == "a package" else []
    env = {name: "0"} if set_by == "the job" else {}
    begun = agent(text.get(set_by, "") + NVML, options=options, **env)
    assert begun.end() == 0
    assert begun.says() == [{
        "nobody": "False 1", "the program": "True 0", "a package": "True 1", "the job": "True 0",
    }[set_by]]  # fmt: skip
