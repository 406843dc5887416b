"""What a piece of source could change of an import of torch that comes after it.

Run as text, like `forkserver`. What cannot be told counts as a change.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

# What the imports read of the environment, measured with torch 2.13 and numpy 2.4 by
# tests/unit/test_static_look.py: whole families, because other versions read more of them.
READ_BY_TORCH = re.compile(
    r"(?!TORCHELASTIC_|TORCH_NCCL_|TORCH_HOME$|CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|LAUNCH_BLOCKING)$"
    r"|PYTHON(HASHSEED|PATH|WARNINGS|UNBUFFERED)$)"
    r"(TORCH|PYTORCH_|OMP_|GOMP_|KMP_|LIBOMP|MKL|I_MPI_|OMPI_COMM_WORLD_LOCAL_|MPI_LOCAL|OPENBLAS_"
    r"|GOTO_|BLIS_|VECLIB_|NPY_|NUMPY_|NVPL_|ATEN_|ACC_|ONEDNN_|DNNL_|INTEL_|ITT_|KINETO_|THP_"
    r"|GFORTRAN_|OPENSSL_|FX_|COMPILE_|TQDM_|CUDA_|CUDNN_|CUBLAS|NVIDIA_|ROCM_|HIP_|HSA_|MIOPEN_"
    r"|TRITON_|LD_|MALLOC_|GLIBC_|GLIBCXX_|PYTHON|_PYTHON"
    r"|NVRTC_|NV_NVVM_|LIBNVVM_|LLVM_|CASK_|AS_SECURE_)"  # libraries of a build for CUDA
)
READ_BY_DYNAMO = re.compile(
    r"(?!TORCH_(NCCL|FORCE|SHOW_CPP|CPP_LOG|DISTRIBUTED|GLOO|FR)_|TORCHELASTIC_|TORCH_HOME$)"
    r"(TORCH|PYTORCH_(?!CUDA_ALLOC_CONF|ALLOC_CONF|NVML)|AOT|INDUCTOR_|PT2_|PARTITIONER_|CUTEDSL_"
    r"|CUTLASS_|DUMP_|ENABLE_|FAKE_|FX_|LOG_|UNSAFE_|ATEN_|TRITON_|MPMATH_|SYMPY_|SAGE_|HOME$|TMP"
    r"|TEMP|LNAME$|LOGNAME$|USER|CI$|CXX$|CC$|PATH$|CUDA_(HOME|PATH)|ROCM_|HIP_|XDG_|_PYTHON"
    r"|PYTHON(USERBASE|INSPECT)|LLVM_|PTXAS_)"
)
_ENVIRONMENT = ("os.environ", "os.environb", "posix.environ")
_SYSTEM = tuple(f"sys.{name}" for name in ("path", "meta_path", "path_hooks", "modules"))
_READS = ("__contains__", "copy", "count", "get", "index", "items", "keys", "values")
_READERS = re.compile(r"builtins\.(any|bool|dict|iter|len|list|print|set|sorted|str|tuple)$")
_CHANGES_PROCESS = re.compile(
    r"addsitedir|chdir|chroot|cpu_affinity|dictConfig|exec_module|fchdir|fileConfig|LoadLibrary"
    r"|finalize|runcode|runsource|timeit"
    r"|install_import_hook|load_dotenv|reload|run_module|run_path|sched_setaffinity|setLoggerClass"
    r"|setdlopenflags|spec_from_file_location|CDLL|PyDLL|import_module|__import__|exec|eval"
)
_TEXT = ("eval", "exec")
_IMPORTS = ("importlib.import_module", "builtins.__import__")
_STARTS = re.compile(r"subprocess\.|os\.(system|popen|spawn|posix_spawn)|pip\.")
_INSTALLS = re.compile(r"\b(pip3?|conda|uv)\b")
# Settings that torch's own imports do not read, and that programs make everywhere.
_SETTINGS = re.compile(
    r"deepspeed\.|torch\.(backends\.|compile$|_dynamo\.config|_inductor\.config)|sys\.\w*hook$"
)


class Influence(NamedTuple):
    node: Any
    torch: bool
    """Whether it matters to an import of torch that follows."""
    dynamo: bool
    """The same for torch._dynamo."""


class Influences:
    """Finds them in one file.

    Args:
        names: what local names stand for that imports have bound.
        texts: the text of each constant of the module.
        is_own: whether a module is one of the program's own.
    """

    def __init__(
        self,
        names: Mapping[str, str],
        texts: Mapping[str, str],
        is_own: Callable[[str], bool],
    ) -> None:
        self._names, self._texts, self._is_own = names, texts, is_own
        self.imports: list[str] = []
        """Modules that calls have been seen to import, by a name that is known."""

    def dotted(self, node: Any) -> str | None:
        """Return the full name of ``node``, if it is one that begins with an imported name."""
        words: list[str] = []
        while isinstance(node, ast.Attribute):
            words.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        first = self._names.get(node.id)
        if first is None and not words and hasattr(builtins, node.id):
            first = f"builtins.{node.id}"
        return None if first is None else ".".join([first, *reversed(words)])

    def of(self, node: Any) -> Iterator[Influence]:
        """Yield what an expression, or a statement without others in it, may change."""
        if node is None:
            return
        if kind := self._global(node):  # it is used in no way that is known
            yield self._written(node, kind, None)
        elif isinstance(node, ast.Subscript) and (kind := self._global(node.value)):
            if not isinstance(node.ctx, ast.Load):
                yield self._written(node, kind, node.slice)
            yield from self.of(node.slice)
        elif isinstance(node, ast.AugAssign) and (kind := self._global(node.target)):
            yield from self._updated(node, kind, [node.value], [])
            yield from self.of(node.value)
        elif isinstance(node, ast.Call):
            yield from self._call(node)
        elif isinstance(node, ast.Lambda):
            yield from self.of(node.body)
        else:
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                yield from self._patched(node, self.dotted(node))
            for child in ast.iter_child_nodes(node):
                if not (self._global(child) and self._is_read(node)):
                    yield from self.of(child)

    def _global(self, node: Any) -> str | None:
        """Return which global mapping or list this names: the environment or one of the imports."""
        name = self.dotted(node) if isinstance(node, (ast.Attribute, ast.Name)) else None
        if name in _ENVIRONMENT:
            return "environ"
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb"):
            return "environ"
        return "sys" if name in _SYSTEM else None

    @staticmethod
    def _is_read(parent: Any) -> bool:
        """Return whether this node only reads a mapping or list in it."""
        if isinstance(parent, ast.keyword):
            return parent.arg in (None, "env")
        if isinstance(parent, ast.Dict):
            return True  # ``{**os.environ}``; as a value it would be a new name for it
        return isinstance(
            parent, (ast.Compare, ast.For, ast.comprehension, ast.FormattedValue, ast.BinOp)
        )

    def _written(self, node: Any, kind: str, name: Any) -> Influence:
        if kind == "sys":
            return Influence(node, True, True)
        if isinstance(name, ast.Name) and name.id.isupper():
            text = self._texts.get(name.id) or None
        else:
            text = name.value if isinstance(name, ast.Constant) else None  # type: ignore[assignment]
        if not isinstance(text, str):
            return Influence(node, True, True)
        return Influence(node, bool(READ_BY_TORCH.match(text)), bool(READ_BY_DYNAMO.match(text)))

    def _updated(
        self, node: Any, kind: str, values: list[Any], keywords: list[Any]
    ) -> Iterator[Influence]:
        for value in values:
            if isinstance(value, ast.Dict):
                for key in value.keys:
                    yield self._written(node, kind, key)
            else:
                yield self._written(node, kind, None)
        for each in keywords:
            yield self._written(node, kind, each.arg and ast.Constant(each.arg))

    def _call(self, node: ast.Call) -> Iterator[Influence]:
        method = node.func.attr if isinstance(node.func, ast.Attribute) else None
        name = self.dotted(node.func)
        last = method or (name or "").rpartition(".")[2]
        first = node.args[0] if node.args else None
        kind = self._global(node.func.value) if isinstance(node.func, ast.Attribute) else None
        if kind and method == "update":
            yield from self._updated(node, kind, node.args, node.keywords)
        elif kind and method not in _READS:
            yield self._written(node, kind, None if method == "update" else first)
        elif last in ("putenv", "unsetenv"):
            yield self._written(node, "environ", first)
        elif last in _TEXT and (method or isinstance(first, ast.Constant)):
            pass  # ``model.eval()``
        elif name in _IMPORTS and isinstance(first, ast.Constant) and len(node.args) == 1:
            self.imports.append(str(first.value))
        elif _CHANGES_PROCESS.fullmatch(last) or (name or "").startswith(
            ("unittest.mock.", "mock.")
        ):
            yield Influence(node, True, True)
        elif name in ("builtins.setattr", "builtins.delattr", "builtins.vars") and first:
            patched = self.dotted(first)
            if patched and not patched.startswith("builtins."):
                yield from self._patched(node, patched)
        elif name and _STARTS.match(name) and _INSTALLS.search(" ".join(_texts_in(node.args))):
            yield Influence(node, True, False)
        of = node.func.value if isinstance(node.func, ast.Attribute) else None
        looks = self.dotted(of.func) if isinstance(of, ast.Call) and method in _READS else None
        if not (kind or looks == "builtins.vars"):  # ``vars(module).items()``
            yield from self.of(node.func)
        reads = _READERS.match(name or "")
        for each in node.args:
            if not (reads and self._global(each)):
                yield from self.of(each)
        for keyword in node.keywords:
            if not (self._global(keyword.value) and self._is_read(keyword)):
                yield from self.of(keyword.value)

    def _patched(self, node: Any, name: str | None) -> Iterator[Influence]:
        """An attribute of this name is set: harmless where it is the program's own object."""
        if name and not self._is_own(name) and not _SETTINGS.match(name):
            yield Influence(node, True, True)


def _texts_in(nodes: list[Any]) -> Iterator[str]:
    for node in nodes:
        for each in ast.walk(node):
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                yield each.value
