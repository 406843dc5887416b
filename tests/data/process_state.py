"""Print as JSON what a process may have of its own: modules' values, and what it draws."""

import json
import os
import random
import sys
import types
import warnings

warnings.simplefilter("ignore")  # attributes that are deprecated
ADDRESSES = range(1 << 44, 1 << 47)
SKIPPED = {"sys", "builtins", "__main__", "posix", "os", "process_state", "sitecustomize"}
found = {}


def text(value, depth=0):
    """A value in words; None for what cannot be compared between processes."""
    kind = type(value)
    if kind in (str, bytes, float, bool, type(None)) or (kind is int and value not in ADDRESSES):
        return repr(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, random.Random) and kind is not random.SystemRandom:
        return f"Random {hash(value.getstate())}"
    if hasattr(kind, "initial_seed"):
        return f"{name} {value.initial_seed()}"
    if name.startswith("numpy.random.") and hasattr(value, "bit_generator"):
        return f"numpy {value.bit_generator.state}"
    if name == "numpy.random.mtrand.RandomState":
        return f"numpy {value.get_state(legacy=False)}"
    if name == "uuid.UUID":
        return repr(value)
    if depth < 2 and kind in (tuple, list) and len(value) < 1000:
        return [text(each, depth + 1) for each in value]
    return None


def look(module):
    for name, value in list(vars(module).items()):
        words = text(value)
        if words is not None:
            found[f"{module.__name__}.{name}"] = words
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for attribute, each in list(vars(value).items()):
                if (words := text(each)) is not None and not attribute.startswith("__"):
                    found[f"{module.__name__}.{name}.{attribute}"] = words


for module in list(sys.modules.values()):
    if isinstance(module, types.ModuleType) and module.__name__ not in SKIPPED:
        look(module)

# What is only created when it is asked for.
import multiprocessing  # noqa: E402
import secrets  # noqa: E402
import ssl  # noqa: E402
import tempfile  # noqa: E402
import threading  # noqa: E402
import uuid  # noqa: E402

found["random.random"] = random.random()
found["random state"] = str(hash(random.getstate()))
found["uuid.uuid1"] = str(uuid.uuid1())
found["uuid.uuid4"] = str(uuid.uuid4())
found["tempfile"] = [next(tempfile._get_candidate_names()), tempfile.mkdtemp(dir=".")]
found["secrets"] = secrets.token_hex()
found["ssl"] = ssl.RAND_bytes(16).hex()
found["authkey"] = bytes(multiprocessing.current_process().authkey).hex()
found["pid"] = [os.getpid(), threading.get_native_id(), threading.main_thread().native_id]
found["one pid"] = len({*found["pid"]})
if "numpy" in sys.modules:
    import numpy

    found["numpy.random.rand"] = numpy.random.rand()
    found["numpy.random.default_rng"] = numpy.random.default_rng().random()
    numpy.random.seed(7)
    found["numpy, seeded"] = numpy.random.rand()
random.seed(7)
found["random, seeded"] = random.random()
#: more
print(json.dumps(found))
