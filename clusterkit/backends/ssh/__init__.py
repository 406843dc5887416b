"""Backend ssh: machines reached over SSH, one node each."""

from __future__ import annotations

import sys
from importlib import util
from threading import RLock
from types import ModuleType
from typing import Any


class _Later(ModuleType):
    """A module that is loaded at the first use of one of its attributes.

    `importlib.util.LazyLoader` does not help: the import statement alone makes it load the module.
    """

    def __getattr__(self, name: str) -> Any:
        with _lock:
            if (spec := self.__spec__) is not None and self.__dict__.pop("_later", False):
                assert spec.loader is not None
                spec.loader.exec_module(self)
                self.__class__ = ModuleType  # type: ignore[assignment]
        return ModuleType.__getattribute__(self, name)


_lock = RLock()
# paramiko needs invoke only for its own `Match exec`, and importing it takes nearly half the time
# that importing paramiko takes.
if "invoke" not in sys.modules and (_spec := util.find_spec("invoke")) is not None:
    sys.modules["invoke"] = _module = util.module_from_spec(_spec)
    _module.__class__ = _Later
    _module.__dict__["_later"] = True
