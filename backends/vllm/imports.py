"""Calls a function once a module has been imported, or at once where it already is.

Kept here, and not taken from a library: a plugin in somebody's server brings no dependency of its own.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

logger = logging.getLogger("syncfree")

Hook = Callable[[ModuleType], None]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: wraps the loader that the other finders give for a module somebody waits for."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Hook]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self.waiting.pop(fullname))
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Runs the module with its own loader, hands it back to that loader, then calls the hooks."""

    def __init__(self, loader: importlib.abc.Loader, hooks: list[Hook]) -> None:
        self._loader = loader
        self._hooks = hooks

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Whoever asks the module for its loader later (resources, source lines) must meet the real one.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for hook in self._hooks:
            _call(hook, module)


_finder = _Finder()


def after_import(name: str, hook: Hook) -> None:
    """Call `hook(module)` after module `name` was imported; now, if it is there already. The same hook once only."""
    module = sys.modules.get(name)
    if module is not None:
        _call(hook, module)
        return
    hooks = _finder.waiting.setdefault(name, [])
    if hook not in hooks:
        hooks.append(hook)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def waiting() -> bool:
    """Whether hooks wait for a module that was not imported yet."""
    return bool(_finder.waiting)


def stop_waiting() -> None:
    """Forget the hooks of modules that were not imported yet."""
    _finder.waiting.clear()
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def _call(hook: Hook, module: ModuleType) -> None:
    try:
        hook(module)
    except Exception as error:  # noqa: BLE001 - an import of somebody's server must not fail because of us
        logger.warning("syncfree: %s was left as it is: %s: %s", module.__name__, type(error).__name__, error)
