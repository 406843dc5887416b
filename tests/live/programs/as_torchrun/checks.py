"""Small programs in one: each prints what a program may depend on, in a line of its own.

``same NAME VALUE``: alike under every launcher and in every run, rank by rank. ``own NAME VALUE``:
drawn at random, and so in no other rank and no other run.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import uuid
import warnings
from pathlib import Path

os.environ["SET_BEFORE_IMPORTS"] = "1"
import numpy
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, RandomSampler

RANK = int(os.environ["RANK"])
CHECKS = []


def same(check):
    CHECKS.append(("same", check))
    return check


def own(check):
    CHECKS.append(("own", check))
    return check


class Numbers(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return index, torch.rand(1).item(), random.random()


# ---------------------------------------------------------------- drawn


@own
def torch_numbers():
    return torch.rand(4).tolist()


@own
def torch_seed():
    return torch.initial_seed()


@own
def dropout():
    return torch.nn.functional.dropout(torch.ones(200)).nonzero().flatten().tolist()


@own
def weights():
    return torch.nn.Linear(4, 2).weight.flatten().tolist()


@own
def shuffled():
    return [index for batch in DataLoader(Numbers(), batch_size=8, shuffle=True) for index in
            batch[0].tolist()]  # fmt: skip


@own
def workers():
    loader = DataLoader(Numbers(), batch_size=10, num_workers=2)
    return [[each.tolist() for each in batch[1:]] for batch in loader]


@own
def sampled():
    return list(RandomSampler(range(60)))


@own
def numpy_numbers():
    return numpy.random.rand(3).tolist(), numpy.random.permutation(30).tolist()


@own
def numpy_generator():
    return numpy.random.default_rng().random(3).tolist()


@own
def python_numbers():
    return random.random(), random.sample(range(1000), 20)


@own
def names():
    return [uuid.uuid4().hex, uuid.uuid1().hex, next(tempfile._get_candidate_names())]


@own
def forked_numbers():
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(write, json.dumps([random.random(), os.urandom(8).hex()]).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return os.read(read, 999).decode()


# ---------------------------------------------------------------- alike


@same
def seeded():
    torch.manual_seed(3 + RANK)
    numpy.random.seed(3 + RANK)
    random.seed(3 + RANK)
    order = [index for batch in DataLoader(Numbers(), shuffle=True) for index in batch[0].tolist()]
    return torch.rand(2).tolist(), numpy.random.rand(), random.random(), order


@same
def seeded_workers():
    loader = DataLoader(Numbers(), batch_size=20, num_workers=2, shuffle=True,
                        generator=torch.Generator().manual_seed(RANK))  # fmt: skip
    return [[each.tolist() for each in batch] for batch in loader]


@same
def arguments():
    return sys.argv, sys.orig_argv[1:] if "pack" in sys.argv else None


@same
def ranks():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK",
             "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RESTART_COUNT",
             "TORCHELASTIC_MAX_RESTARTS", "OMP_NUM_THREADS", "ODD", "EMPTY", "SET_BEFORE_IMPORTS",
             "PYTORCH_NVML_BASED_CUDA_CHECK", "CUDA_MODULE_LOADING")  # fmt: skip
    return {name: os.environ.get(name) for name in names}


@same
def c_environment():
    return subprocess.run(["sh", "-c", 'echo "$RANK $ODD $SET_BEFORE_IMPORTS"'],
                          capture_output=True, text=True).stdout  # fmt: skip


@same
def main_module():
    import __main__

    shown = sorted(name for name in vars(__main__) if name.startswith("__"))
    return shown, __main__.__file__, __name__, __spec__ is None, __main__.Numbers is Numbers


@same
def paths():
    return sys.path[:2], os.getcwd(), Path(__file__).name, sys.flags.safe_path


@same
def stack():
    import inspect

    return [(frame.function, Path(frame.filename).name) for frame in inspect.stack()]


@same
def signals():
    import signal

    names = ["SIGINT", "SIGTERM", "SIGQUIT", "SIGHUP", "SIGPIPE", "SIGCHLD", "SIGUSR1"]
    handlers = {name: str(signal.getsignal(getattr(signal, name))) for name in names}
    return str(handlers).split(" at 0x")[0], str(signal.pthread_sigmask(signal.SIG_BLOCK, []))


@same
def interrupted():
    import signal

    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        return "KeyboardInterrupt"


@same
def hash_order():
    return list({"a", "b", "c", "torch", "rank"}), hash("x")


@same
def standard_input():
    return sys.stdin.read(), sys.stdin.isatty()


@same
def streams():
    return [(each.encoding, each.errors, each.isatty()) for each in (sys.stdout, sys.stderr)]


@same
def child_python():
    done = subprocess.run(
        [sys.executable, "-c", "import os, sys; print(sys.argv, os.environ['RANK'], 1 / 0)", "a b"],
        capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout, done.stderr, done.returncode


def work(number):
    return number * 2, __name__


@same
def pools():
    import multiprocessing

    found = []
    for how in ("fork", "spawn")[: 2 - RANK]:  # to spawn imports torch again: 4 s of a processor
        with multiprocessing.get_context(how).Pool(1) as pool:
            found.append(pool.map(work, [1, 2]))
    return found


@same
def threads():
    found = []
    thread = threading.Thread(target=lambda: found.append(threading.current_thread().name))
    thread.start()
    thread.join()
    return found, threading.main_thread().native_id == os.getpid(), torch.get_num_threads()


@same
def warned():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("mine", stacklevel=1)
        warnings.warn("outermost", stacklevel=5)
    return [(str(each.message), Path(each.filename).name, each.lineno) for each in caught]


@same
def patched_import():
    sys.path.insert(0, str(Path(__file__).parent / "pack"))
    import json_of_pack

    return json_of_pack.VALUE


@same
def defaults():
    return (torch.get_default_dtype(), torch.get_num_interop_threads() > 0, sys.getrecursionlimit(),
            torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
            sys.dont_write_bytecode, type(sys.modules["torch"]).__name__)  # fmt: skip


@same
def pickled():
    import copy
    import pickle

    data = pickle.dumps(Numbers())
    return type(pickle.loads(data)).__module__, type(copy.deepcopy(Numbers())) is Numbers


@same
def logged():
    import io
    import logging

    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(name)s %(funcName)s %(filename)s %(message)s"))
    logger = logging.getLogger("here")
    logger.addHandler(handler)
    logger.warning("said", stacklevel=1)
    logger.propagate = False
    return text.getvalue(), logging.getLogger().handlers, logging.getLogger().level


@same
def trained():
    # Without DistributedDataParallel: to free it sometimes hangs with gloo (torch 2.13).
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + RANK)
        inputs = torch.randn(8, 4)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(loss.item())
    dist.barrier()
    dist.destroy_process_group()
    return losses, model.weight.tolist()


if __name__ == "__main__":
    for kind, check in CHECKS:
        try:
            value = check()
        except Exception as error:
            value = f"{type(error).__name__}: {error}"
        print(kind, check.__name__, repr(value), flush=True)
