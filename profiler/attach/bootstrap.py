"""The first code of ours that runs in the target; makes the rest importable. Standard library only.

It runs on frida's own thread and takes the GIL like any thread does. What keeps the target's threads waiting is how
long we hold it: nothing is compiled here, a thread that waits for it gets it soon (see yielding.py), and between the
modules that we import there are rests, so that their work is spread over many steps of the server.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import marshal
import os
import sys
import threading
import zlib
from types import ModuleType
from typing import Any

_PACKAGE = "syncfree"


class Bundle(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules of ours from the block that the client brought. `pace`: rests after each, while there is one."""

    def __init__(self, modules: dict[str, tuple[str, bool, bytes]], digest: str) -> None:
        self.modules = modules
        self.syncfree_digest = digest
        self.pace: Any = None

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.modules:
            return None
        file, package, _ = self.modules[fullname]
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=file, is_package=package)
        if package:  # where the folder can be read from here, its compiled parts are used
            spec.submodule_search_locations = [os.path.dirname(file)]  # noqa: PTH120 - pathlib may not be loaded
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        file, _, code = self.modules[module.__name__]
        module.__file__ = file
        exec(marshal.loads(zlib.decompress(code)), module.__dict__)
        if self.pace is not None:
            self.pace.rest()


def settle(modules: dict[str, tuple[str, bool, bytes]], digest: str) -> str:
    """Make our modules importable, in place of those of another release that an older visit left."""
    leave()
    for name in [n for n in sys.modules if n == _PACKAGE or n.startswith(_PACKAGE + ".")]:
        del sys.modules[name]
    sys.meta_path.insert(0, Bundle(modules, digest))
    return "settled"


def resume() -> str:
    """Make the modules importable again that an older visit brought: they are the same."""
    leave()
    sys.meta_path.insert(0, _loader())
    return "settled"


def _loader() -> Any:
    return getattr(getattr(sys.modules.get(_PACKAGE), "__spec__", None), "loader", None)


def leave() -> str:
    """Take our finder out again."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not hasattr(finder, "syncfree_digest")]
    return "left"


def call(name: str, request: str) -> str:
    """One function of the guest: JSON in, JSON out."""
    try:
        yielding = importlib.import_module(f"{_PACKAGE}.profiler.yielding")
        with yielding.gently():
            answer = _call(name, request, yielding.Pace())
    except Exception as error:  # noqa: BLE001 - the client gets the reason, whatever it is
        answer = {"refused": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
    _forget_thread()
    return json.dumps(answer)


def _call(name: str, request: str, pace: Any) -> Any:
    bundle = _loader()
    ours = hasattr(bundle, "syncfree_digest")  # else the target's own syncfree
    if ours:
        bundle.pace = pace
    try:
        guest = importlib.import_module(f"{_PACKAGE}.profiler.attach.guest")
        return getattr(guest, name)(**json.loads(request))
    finally:
        if ours:
            bundle.pace = None


def _forget_thread() -> None:
    """`threading` keeps an entry, for good, of each thread that it did not start: each visit would leave one."""
    dummy = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
    if type(dummy).__name__ == "_DummyThread":
        del threading._active[threading.get_ident()]  # type: ignore[attr-defined]
