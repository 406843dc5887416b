"""Whether a program could influence the import of torch: what its source shows."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from clusterkit.agent import influences, module_files, static_look

OWN = {
    "pack/__init__.py": "",
    "pack/sets.py": 'import os\nos.environ["OMP_NUM_THREADS"] = "3"\n',
    "pack/clean.py": "import json\n",
    "pack/torches.py": "import torch\n",
    "pack/lazy.py": "def late():\n    import pack.sets\n",
    "guarded.py": "import os\nif __name__ == '__main__':\n"
    "    os.environ['OMP_NUM_THREADS'] = '3'\n",
    "names.py": "import os\nfrom os import environ\n",
}


def looked(folder, text=None, module=None, **files):
    for name, content in {**OWN, **files, "train.py": text or ""}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    return static_look.look(
        str(folder / "train.py"), module, str(folder), influences.Influences, vars(module_files)
    )


HARMLESS = {
    "modules that may be missing": "try:\n    import not_there\nexcept ImportError:\n    pass\n"
    "import winreg\nimport torch",
    "nothing": "import torch",
    "reads": "import os\nx = os.environ['A'], os.environ.get('TORCH_LOGS'), 'B' in os.environ\n"
    "for name in os.environ: print(os.environ)\nimport torch",
    "names that nobody reads": "import os\nos.environ['MASTER_ADDR'] = 'x'\n"
    "os.environ.setdefault('NCCL_DEBUG', 'INFO')\nos.environ.update(WANDB_MODE='x', RANK='0')\n"
    "os.environ.update({'CUDA_VISIBLE_DEVICES': '0'})\nos.environ |= {'HF_HOME': 'x'}\n"
    "del os.environ['MINE']\nos.environ.pop('TOKENIZERS_PARALLELISM', None)\nimport torch",
    "for a child": "import os, subprocess\n"
    "subprocess.run(['true'], env={**os.environ, 'OMP_NUM_THREADS': '1'})\n"
    "env = os.environ.copy()\nenv['OMP_NUM_THREADS'] = '3'\nimport torch",
    "its own object": "import argparse\nargs = argparse.Namespace()\nargs.lr = 1\nimport torch",
    "its own module": "import pack.clean\npack.clean.x = 1\nimport torch",
    "its own class": "class A: pass\nA.x = 1\nimport torch",
    "own modules": "from pack import clean\nfrom pack.torches import torch\n",
    "guarded in a module": "import guarded, torch",
    "checked only": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pack.sets\n"
    "import torch",
    "harmless packages": "import numpy as np, yaml, tqdm, transformers\nnp.random.seed(0)\n"
    "import torch",
    "evaluates": "import torch\nmodel = torch.nn.Linear(1, 1)\nmodel.eval()\n"
    "torch.backends.cudnn.benchmark = True",
    "an environment as a default": "import os\ndef f(environ=os.environ): return environ.get('A')\n"
    "import torch",
    "in a function": "def main():\n    import torch\nmain()",
    "with a fallback": "try:\n    import torch\nexcept ImportError:\n    torch = None",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_static_look_clears_program_harmless_to_torch_import(name, tmp_path):
    assert looked(tmp_path, HARMLESS[name]) == (True, None, None)


BEFORE = {
    "a module that it writes": "import generated_settings",
    "timed": "import timeit\ntimeit.timeit('os.environ.clear()', setup='import os')",
    "assigned": 'os.environ["OMP_NUM_THREADS"] = "3"',
    "JIT": "os.environ['PYTORCH_JIT'] = '0'",
    "logs": "os.environ['TORCH_LOGS'] = '+dynamo'",
    "a constant's name": "NAME = 'TORCH_LOGS'; os.environ[NAME] = 'x'",
    "default": "os.environ.setdefault('OMP_NUM_THREADS', '3')",
    "updated": "os.environ.update(OMP_NUM_THREADS='3')",
    "updated with a mapping": "os.environ.update({'MKL_NUM_THREADS': '3'})",
    "updated with what is not known": "os.environ.update(json.load(open('env.json')))",
    "or": "os.environ |= {'MKL_NUM_THREADS': '3'}",
    "deleted": "del os.environ['TORCH_LOGS']",
    "popped": "os.environ.pop('TORCH_LOGS', None)",
    "cleared": "os.environ.clear()",
    "put": "os.putenv('OMP_NUM_THREADS', '3')",
    "a name that is not known": "os.environ[sys.argv[1]] = '3'",
    "names of a loop": "for name in ('A', 'B'): os.environ[name] = '1'",
    "another name for it": "env = os.environ; env['OMP_NUM_THREADS'] = '3'",
    "passed on": "print(list(map(f, [os.environ])))",
    "imported as": "from os import environ as e; e['OMP_NUM_THREADS'] = '3'",
    "by way of a module": "import names; names.os.environ['OMP_NUM_THREADS'] = '3'",
    "by way of a star": "from names import *; environ['OMP_NUM_THREADS'] = '3'",
    "in a module": "import pack.sets",
    "in a module, from": "from pack.sets import os",
    "in a module's function": "import pack.lazy",
    "in a function": "def f(): os.environ['OMP_NUM_THREADS'] = '3'",
    "in a method": "class A:\n    def f(self): os.environ['OMP_NUM_THREADS'] = '3'",
    "in a lambda": "f = lambda: os.environ.update(OMP_NUM_THREADS='3')",
    "in a condition": "if x:\n    import torch\nelse:\n    os.environ['OMP_NUM_THREADS'] = '3'",
    "dotenv": "from dotenv import load_dotenv",
    "path put first": "sys.path.insert(0, 'lib')",
    "path extended": "sys.path += ['lib']",
    "path appended": "sys.path.append('lib')",
    "path set": "sys.path[:] = []",
    "site": "import site; site.addsitedir('lib')",
    "finders": "sys.meta_path.insert(0, f)",
    "modules": "sys.modules['numpy'] = f",
    "a class patched": "import logging; logging.Logger.handle = f",
    "a function patched": "import json; setattr(json, 'dumps', f)",
    "a patched class by another name": "import logging\nL = logging.Logger\nL.handle = f",
    "import itself": "import builtins; builtins.__import__ = f",
    "mocked": "from unittest import mock; mock.patch('json.dumps').start()",
    "exec": "exec(open('config.py').read())",
    "eval": "eval(sys.argv[1])",
    "a plugin": "import importlib; importlib.import_module(sys.argv[1])",
    "a module by its name": "import importlib; importlib.import_module('pack.sets')",
    "runpy": "import runpy; runpy.run_path('config.py')",
    "a file that is no Python": "import broken",
    "the processors": "os.sched_setaffinity(0, {0})",
    "the folder": "os.chdir('/')",
    "a library": "import ctypes; ctypes.CDLL('libx.so')",
    "logging": "import logging.config; logging.config.dictConfig({})",
    "standard error": "sys.stderr = open('log', 'w')",
    "pip": "import subprocess; subprocess.run([sys.executable, '-m', 'pip', 'install', 'torch'])",
}


@pytest.mark.parametrize("name", BEFORE)
def test_static_look_names_statement_that_could_influence_torch_import(name, tmp_path):
    text = f"import json, os, sys\n{BEFORE[name]}\nimport torch\n"
    found = looked(tmp_path, text, **{"broken.py": "x ="})
    assert found.uses_torch
    assert found.torch
    assert re.match(r"(train|sets|broken)\.py:\d: |/.*/broken\.py: SyntaxError", found.torch)
    assert found.dynamo == found.torch


@pytest.mark.parametrize("name", sorted(BEFORE.keys() - {"pip", "in a condition", "dotenv"}))
def test_static_look_allows_torch_import_before_influencing_statement(name, tmp_path):
    found = looked(tmp_path, f"import json, os, sys\nimport torch\n{BEFORE[name]}\n",
                   **{"broken.py": "x ="})  # fmt: skip
    assert found.torch is None


AFTER = {
    "a compiler's variable": "os.environ['TORCH_COMPILE_DISABLE'] = '1'",
    "another one": "def main(): os.environ['TORCHINDUCTOR_MAX_AUTOTUNE'] = '1'",
    "temporary files": "os.environ['TMPDIR'] = '/x'",
    "the folder": "os.chdir('x')",
    "a class of torch": "torch.nn.Linear.forward = f",
    "a file that is executed": "exec(open('config.py').read())",
}


@pytest.mark.parametrize("name", AFTER)
def test_static_look_names_influence_on_dynamo_after_torch_import(name, tmp_path):
    found = looked(tmp_path, f"import os, torch\n{AFTER[name]}\n")
    assert (found.torch, found.dynamo) == (None, f"train.py:2: {AFTER[name]}")


def test_static_look_ignores_torch_only_variables_for_dynamo(tmp_path):
    text = "import os, torch\nos.environ['OMP_NUM_THREADS'] = '3'"
    assert looked(tmp_path, text) == (True, None, None)


def test_static_look_walks_module_as_python_m_runs_module(tmp_path):
    files = {"mod/__init__.py": "import pack.sets\n", "mod/__main__.py": "import torch\n"}
    assert looked(tmp_path, module="mod", **files).torch.startswith("sets.py:2: os.environ")
    found = looked(tmp_path, module="guarded", **{"guarded.py": OWN["guarded.py"] + "import torch"})
    assert found.torch.startswith("guarded.py:3")


def test_static_look_counts_module_imported_late_and_early_as_early(tmp_path):
    text = "def late():\n    import torch\n    import pack.sets\nimport pack.sets\nimport torch\n"
    assert looked(tmp_path, text).torch.startswith("sets.py:2: ")


def test_static_look_reports_program_without_torch(tmp_path):
    assert looked(tmp_path, "import json, pack.clean").uses_torch is False


# ---------------------------------------------------------------- what imports read

RECORD = """
import importlib, json, os, sys
reads, kind = {}, type(os.environ)
get, started = kind.__getitem__, dict(os.environ)
def read(self, name):
    reads.setdefault(name, None)
    return get(self, name)
kind.__getitem__ = read
state = lambda: (sys.excepthook, sys.getrecursionlimit(), sys.getdlopenflags(), sys.argv[:],
                 random.getstate(), os.getcwd(), sys.path[:], sys.meta_path[:])
import random
before, found = state(), {}
for name in sys.argv[1:]:
    reads.clear()
    os.write(198, f"import {name}\\n".encode())
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    names = os.environ.keys() | started
    changed = sorted(name for name in names if os.environ.get(name) != started.get(name))
    found[name] = [sorted(reads), state() == before, changed]
    started = dict(os.environ)
os.write(198, b"import \\n")
print(json.dumps(found))
"""
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>
#define READ(name) char *name(const char *n) { static char *(*real)(const char *); char b[400]; \\
  if (!real) real = dlsym(RTLD_NEXT, #name); \\
  if (write(198, b, snprintf(b, sizeof b, "read %s\\n", n)) < 0) {} return real(n); }
READ(getenv)
READ(secure_getenv)
"""


def recorded(tmp_path, *names, preloaded=""):
    """What imports read in Python, and in C, whether they changed the process, what they set."""
    log = os.open(tmp_path / "reads", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 198)
    try:
        done = subprocess.run(
            [sys.executable, "-c", RECORD, *names], pass_fds=[198], stdout=subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "LD_PRELOAD": preloaded},
            check=True, cwd=tmp_path,
        )  # fmt: skip
    finally:
        os.close(log)
        os.close(198)
    in_c, current = {}, ""
    for line in (tmp_path / "reads").read_text().splitlines():
        word, _, name = line.partition(" ")
        if word == "import":
            current = name
        else:
            in_c.setdefault(current, set()).add(name)
    return json.loads(done.stdout.splitlines()[-1]), in_c


# tqdm looks through all variables for its own; a machine's own ones are none that a program sets.
# "bar" is what LLVM asks for, so that compilers keep its getenv.
READ_BY_ALL = re.compile(r"PATH$|HOME$|PWD$|_$|LD_PRELOAD$|LC_|LANG|SHLVL$|bar$")


def test_influence_tables_cover_variables_read_by_torch_imports(tmp_path):
    if shutil.which("gcc"):
        (tmp_path / "shim.c").write_text(SHIM)
        command = ["gcc", "-shared", "-fPIC", "-o", "shim.so", "shim.c", "-ldl"]
        subprocess.run(command, cwd=tmp_path, check=True)
    shim = str(tmp_path / "shim.so") if shutil.which("gcc") else ""
    tables = {"numpy": influences.READ_BY_TORCH, "torch": influences.READ_BY_TORCH,
              "torch._dynamo": influences.READ_BY_DYNAMO}  # fmt: skip
    found, in_c = recorded(tmp_path, *tables, preloaded=shim)
    all_reads = {read for each, _, _ in found.values() for read in each}
    # Nor what differs between ranks.
    assert not all_reads & {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    for name, table in tables.items():
        reads, unchanged, variables = found[name]
        reads = {*reads, *in_c.get(name, ())}
        assert len(reads) > 3  # it is measured
        assert {
            read for read in reads if not (table.match(read) or READ_BY_ALL.match(read))
        } == set()
        assert unchanged
        assert variables == (["TORCHINDUCTOR_CACHE_DIR"] if name == "torch._dynamo" else [])


def harmless_packages():
    names = re.findall(r"\w+", static_look.HARMLESS.pattern.replace("$", ""))
    return sorted(names)


def test_harmless_packages_set_no_variable_torch_reads(tmp_path):
    found, _ = recorded(tmp_path, *harmless_packages())
    assert {"numpy", "transformers", "accelerate"} <= found.keys()
    for _, _, variables in found.values():
        bad = [each for each in variables if influences.READ_BY_TORCH.match(each)]
        assert set(bad) <= {"TORCHINDUCTOR_CACHE_DIR"}  # set by torch._dynamo itself


def test_deepspeed_import_sets_no_variable_dynamo_reads(tmp_path):
    """Once torch is imported, its source is not looked at."""
    found, _ = recorded(tmp_path, "torch", "deepspeed")
    if "deepspeed" not in found:
        pytest.skip("deepspeed is not installed")
    _, unchanged, variables = found["deepspeed"]
    assert unchanged
    bad = {each for each in variables if influences.READ_BY_DYNAMO.match(each)}
    assert bad <= {"TORCHINDUCTOR_CACHE_DIR"}  # set by torch._dynamo itself


@pytest.mark.parametrize(
    ("text", "torch", "dynamo"),
    [
        ("import torch, deepspeed\ndeepspeed.comm.timeout = 9", None, None),
        ("import torch\nfrom deepspeed import comm as c\nc.timeout = 9", None, None),
        ("import deepspeed, torch", "__init__.py:2: ", "__init__.py:2: "),
        ("import torch, speed", None, "__init__.py:2: "),
        ("import torch, speed\nspeed.comm.timeout = 9", None, "__init__.py:2: "),
        ("import torch, deepspeed\ntorch.nn.Linear.forward = 9", None, "train.py:2: "),
    ],
)
def test_static_look_skips_deepspeed_source_after_torch_import(
    text, torch, dynamo, tmp_path, monkeypatch
):
    for name in ("deepspeed", "speed"):
        package = tmp_path / "site-packages" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(
            "import os\nos.environ['TORCH_COMPILE_DISABLE'] = '1'\nfrom . import comm\n"
        )
        (package / "comm.py").write_text("timeout = 1\n")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    found = looked(tmp_path, text)
    assert found.uses_torch
    for said, wanted in ((found.torch, torch), (found.dynamo, dynamo)):
        assert (said is None) if wanted is None else (said or "").startswith(wanted), found
