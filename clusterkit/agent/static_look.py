"""Whether a program could influence an import that is made before it runs: a look at its source.

Run as text, like `forkserver`. The files that the program runs are walked in the order in which
Python would run them. Up to the import of torch nothing may change what that import reads: the
environment, the modules that it finds, classes that it uses. torch._dynamo is imported when the
first optimizer is made, so for it nothing may do so anywhere. What cannot be told counts as if it
did.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

_MOST_BYTES, _MOST_INSTALLED_BYTES = 2 << 20, 256 << 10  # 1 MiB takes about a second
# Installed packages whose imports change nothing that torch reads (tests/unit/test_static_look.py).
HARMLESS = re.compile(
    r"(PIL|accelerate|einops|filelock|fsspec|huggingface_hub|jinja2|matplotlib|mpmath|networkx|numpy"
    r"|packaging|psutil|pydantic|regex|requests|rich|safetensors|sympy|tensorboard|tokenizers|tqdm"
    r"|transformers|typing_extensions|yaml)$"
)
_USES_TORCH = re.compile(
    r"(torch\w*|deepspeed|transformers|accelerate|lightning|pytorch_lightning)$"
)


class Found(NamedTuple):
    """What `look` has found; a reason is ``file:line: statement``."""

    uses_torch: bool
    torch: str | None
    """Why torch may not be preloaded; None: it may be."""
    dynamo: str | None
    """The same for torch._dynamo."""


def look(
    file: str, module: str | None, folder: str | None, influences: Callable[..., Any], files: Any
) -> Found:
    """Look through a program.

    Args:
        file: the program, where it is no ``module``.
        module: its name, where it is started with ``-m``.
        folder: the first one of its ``sys.path``; None: no more than this process has.
        influences: `influences.Influences`.
        files: what `module_files` defines.
    """
    walk = _Walk([folder, *sys.path] if folder else list(sys.path), influences, files)
    try:
        if module:
            found = list(files["files_of"](module, walk.path))
            package = found and found[-1][0] == module and found[-1][2]
            walk.main = f"{module}.__main__" if package else module
            walk.imports(walk.main, False, f"-m {module}")
        else:
            walk.main = "__main__"
            main = os.path.join(file, "__main__.py") if os.path.isdir(file) else file
            walk.visit(main, walk.main, "", False)
    except RecursionError:
        walk.doubt("the program's code is nested too deeply", False)
    return Found(walk.uses_torch, walk.before, walk.before or walk.ever)


class _Walk:
    def __init__(self, path: list[str], influences: Callable[..., Any], files: Any) -> None:
        self.path, self.influences, self._files = path, influences, files
        self.main = ""  # the module that runs as ``__main__``
        self.known: dict[str, _File] = {}  # by module
        self._visited: dict[tuple[str, bool], bool] = {}
        """By file, and whether torch was imported before it: whether it surely is after it."""
        self._own: set[str] = set()  # first words of modules' names
        self.uses_torch = False
        self.before: str | None = None
        self.ever: str | None = None
        self._bytes = {False: 0, True: 0}  # by whether they are installed

    def doubt(self, where: str, done: bool, *, torch: bool = True, dynamo: bool = True) -> None:
        """Note an influence; ``done``: torch is imported by then."""
        if torch and not done and self.before is None:
            self.before = where
        if dynamo and self.ever is None:
            self.ever = where

    def visit(self, file: str, name: str, package: str, done: bool) -> bool:
        """Walk a file; return whether torch is surely imported when it has run."""
        if (file, done) in self._visited:
            return self._visited[file, done]
        if done and self.ever is not None:
            return done  # nothing more can be found
        self._visited[file, done] = done
        try:
            with open(file, "rb") as opened:
                text = opened.read(_MOST_BYTES)
            installed = self._files["is_installed"](file)
            self._bytes[installed] += len(text)
            if self._bytes[installed] >= (_MOST_INSTALLED_BYTES if installed else _MOST_BYTES):
                self.doubt(f"{file}: too large to search", done)
                return done
            tree = ast.parse(text, file)
        except (OSError, SyntaxError, ValueError, MemoryError) as error:
            self.doubt(f"{file}: {type(error).__name__}", done)
            return done
        self._own.add(name.partition(".")[0])
        self.known[name] = walked = _File(
            self, file, text.decode(errors="replace"), name, package, installed
        )  # fmt: skip
        self._visited[file, done] = walked.body(tree.body, done)
        return self._visited[file, done]

    def imports(self, name: str, done: bool, where: str) -> bool:
        """Walk what an import of this module runs; return whether torch is imported then."""
        files, first = self._files, name.partition(".")[0]
        if _USES_TORCH.match(first):
            self.uses_torch = True
        for full, file, inner in files["files_of"](name, self.path):
            if full == first:
                if full == "torch":
                    return True
                if files["is_of_python"](file) or full in sys.builtin_module_names:
                    return done
                harmless = HARMLESS.match(full) or (done and full == "deepspeed")
                if harmless and files["is_installed"](file):
                    return done
            if file.endswith(".py"):
                done = self.visit(file, full, full if inner else full.rpartition(".")[0], done)
            elif file:
                self.doubt(f"{where}: import {full} (not Python)", done)
        return done

    def is_own(self, name: str) -> bool:
        return name.partition(".")[0] in self._own

    def is_missing(self, name: str) -> bool:
        """Return whether there is no such module: the program may be about to write it."""
        first = name.partition(".")[0]
        known = first in getattr(sys, "stdlib_module_names", ()) or not first  # Python 3.10
        return not known and not any(True for _ in self._files["files_of"](first, self.path))


class _File:
    """One file that the program runs."""

    def __init__(
        self, walk: _Walk, file: str, text: str, name: str, package: str, installed: bool
    ) -> None:
        self._walk, self._file, self._lines = walk, file, text.splitlines()
        self._name, self._package = name, package
        self.names: dict[str, str] = {}  # what imports have bound, by local name
        self._texts: dict[str, str] = {}  # constants of the module
        self._influences = walk.influences(self.names, self._texts, walk.is_own)
        self._optional = installed  # whether a module that is missing here is one to do without

    def _doubt(self, node: Any, done: bool, **of: bool) -> None:
        line = self._lines[node.lineno - 1].strip() if node.lineno <= len(self._lines) else ""
        where = f"{os.path.basename(self._file)}:{node.lineno}: {line[:100]}"
        self._walk.doubt(where, done, **of)

    # -- statements

    def body(self, statements: Iterable[ast.stmt], done: bool) -> bool:
        """Walk statements; return whether torch is imported after them."""
        for statement in statements:
            done = self._statement(statement, done)
        return done

    def _statement(self, node: Any, done: bool) -> bool:
        if isinstance(node, ast.Import):
            return self._import(node, done)
        if isinstance(node, ast.ImportFrom):
            return self._import_from(node, done)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._bind_defaults(node.args)
            self._expressions([*node.decorator_list, node.args], done)
            self.body(node.body, done)
        elif isinstance(node, ast.ClassDef):
            self._expressions([*node.decorator_list, *node.bases, *node.keywords], done)
            return self.body(node.body, done)
        elif isinstance(node, ast.If):
            return self._if(node, done)
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            self._expression(ast.comprehension(node.target, node.iter, [], 0), done)
            self.body([*node.body, *node.orelse], done)
        elif isinstance(node, ast.While):
            self._expression(node.test, done)
            self.body([*node.body, *node.orelse], done)
        elif isinstance(node, ast.Try) or type(node).__name__ == "TryStar":
            before, self._optional = self._optional, True
            first = self.body(node.body[:1], done)
            rest = self.body(node.body[1:], first)
            self._optional = before
            for handler in node.handlers:
                self.body(handler.body, done)
            self.body(node.orelse, rest)
            return self.body(node.finalbody, done) or first
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            self._expressions(node.items, done)
            return self.body(node.body, done)
        elif type(node).__name__ == "Match":
            self._expressions([node.subject], done)
            for case in node.cases:
                self._expressions([case.guard], done)
                self.body(case.body, done)
        elif not self._bind(node):
            self._expression(node, done)
        return done

    def _if(self, node: ast.If, done: bool) -> bool:
        test = ast.unparse(node.test)
        if test in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            return self.body(node.orelse, done)
        if re.fullmatch(r"__name__ == '__main__'|'__main__' == __name__", test):
            return self.body(node.body if self._name == self._walk.main else node.orelse, done)
        self._expression(node.test, done)
        then, other = self.body(node.body, done), self.body(node.orelse, done)
        return then and other

    def _import(self, node: ast.Import, done: bool) -> bool:
        for each in node.names:
            local = each.asname or each.name.split(".")[0]
            self.names[local] = each.name if each.asname else local
            done = self._imported(node, each.name, done)
        return done

    def _import_from(self, node: ast.ImportFrom, done: bool) -> bool:
        name = node.module or ""
        if node.level:
            parts = self._package.split(".")
            base = parts[: len(parts) - node.level + 1]
            name = ".".join([*base, *([name] if name else [])])
        done = self._imported(node, name, done)
        for each in node.names:
            if each.name == "*":
                own = self._walk.known.get(name)
                if own is not None:
                    self.names.update(own.names)
                elif name in ("os", "sys", "posix"):
                    self._doubt(node, done)
                continue
            self.names[each.asname or each.name] = f"{name}.{each.name}"
            if self._walk.is_own(name):
                own = self._walk.known.get(name)
                if own is not None and each.name in own.names:
                    self.names[each.asname or each.name] = own.names[each.name]
                done = self._imported(node, f"{name}.{each.name}", done)
        return done

    def _imported(self, node: ast.stmt, name: str, done: bool) -> bool:
        missing = not self._optional and self._walk.is_missing(name)
        if missing or name.split(".")[0] in ("dotenv", "environs"):
            self._doubt(node, done)
            return done
        return self._walk.imports(name, done, f"{os.path.basename(self._file)}:{node.lineno}")

    def _bind(self, node: ast.stmt) -> bool:
        """Follow ``name = module.Class``, ``NAME = "text"``; return whether that is all it does."""
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
            return False
        name, value = node.targets[0].id, node.value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            known = self._texts.setdefault(name, value.value)
            self._texts[name] = value.value if known == value.value else ""
        elif isinstance(value, (ast.Attribute, ast.Name)) and name not in self.names:
            dotted = self._influences.dotted(value)
            if dotted is not None:
                self.names[name] = dotted
                return len(node.targets) == 1
        return False

    def _bind_defaults(self, arguments: ast.arguments) -> None:
        """Follow ``def f(environ=os.environ)``."""
        names = [*arguments.posonlyargs, *arguments.args][-len(arguments.defaults) or None :]
        pairs = [*zip(names, arguments.defaults), *zip(arguments.kwonlyargs, arguments.kw_defaults)]  # noqa: B905 (3.9)
        for name, value in pairs:
            dotted = value and self._influences.dotted(value)
            if dotted == "os.environ" and self.names.setdefault(name.arg, dotted) == dotted:
                arguments.defaults = [each for each in arguments.defaults if each is not value]
                kept = [each for each in arguments.kw_defaults if each is not value]
                arguments.kw_defaults = kept

    # -- expressions

    def _expressions(self, nodes: Iterable[Any], done: bool) -> None:
        for node in nodes:
            self._expression(node, done)

    def _expression(self, node: Any, done: bool) -> None:
        for found in self._influences.of(node):
            self._doubt(found.node, done, torch=found.torch, dynamo=found.dynamo)
        while self._influences.imports:
            self._walk.imports(self._influences.imports.pop(), done, self._file)
