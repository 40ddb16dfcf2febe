import ast
import importlib
import importlib.resources
import inspect
import subprocess
import sys

import pytest
from syncfree.backends.vllm import imports


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package on the path, whose modules are not imported yet."""
    folder = tmp_path / "guinea"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "data.txt").write_text("data")
    (folder / "model.py").write_text("class Runner:\n    def run(self):\n        return 'ran'\n")
    (folder / "broken.py").write_text("raise RuntimeError('their own trouble')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [n for n in sys.modules if n.split(".")[0] == "guinea"]:
        del sys.modules[name]
    imports._finder.waiting.clear()
    if imports._finder in sys.meta_path:
        sys.meta_path.remove(imports._finder)


def test_the_hook_gets_the_module_once_it_was_executed(package):
    seen = []
    imports.after_import("guinea.model", lambda module: seen.append(module.Runner().run()))
    assert seen == []
    importlib.import_module("guinea.model")
    assert seen == ["ran"]


def test_a_module_that_is_there_already_is_hooked_at_once(package):
    module = importlib.import_module("guinea.model")
    seen = []
    imports.after_import("guinea.model", seen.append)
    assert seen == [module]


def test_asking_twice_calls_once(package):
    seen = []
    for _ in range(2):
        imports.after_import("guinea.model", seen.append)
    importlib.import_module("guinea.model")
    assert len(seen) == 1
    assert sys.meta_path.count(imports._finder) == 1


def test_an_import_keeps_its_loader_source_and_resources(package):
    imports.after_import("guinea.model", lambda module: None)
    module = importlib.import_module("guinea.model")
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
    assert module.__loader__ is module.__spec__.loader
    assert "return 'ran'" in inspect.getsource(module.Runner)
    assert importlib.resources.files("guinea").joinpath("data.txt").read_text() == "data"


def test_a_hook_that_raises_does_not_fail_the_import(package, caplog):
    def hook(module):
        raise KeyError("ours")

    imports.after_import("guinea.model", hook)
    assert importlib.import_module("guinea.model").Runner().run() == "ran"
    assert "guinea.model was left as it is: KeyError" in caplog.text


def test_a_module_that_fails_fails_as_it_would_without_us(package):
    imports.after_import("guinea.broken", lambda module: None)
    with pytest.raises(RuntimeError, match="their own trouble"):
        importlib.import_module("guinea.broken")


def test_a_module_that_does_not_exist_is_still_missing(package):
    imports.after_import("guinea.missing", lambda module: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("guinea.missing")


def test_loading_the_plugin_imports_neither_vllm_nor_torch_nor_the_profiler():
    program = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "from syncfree.backends.vllm import register\n"
        "register()\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "ours = sorted(n for n in set(sys.modules) - before if n.startswith('syncfree'))\n"
        "print(sorted(new & {'vllm', 'torch', 'numpy', 'zmq', 'msgspec', 'rich'}), ours)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    heavy, _, ours = done.stdout.strip().partition(" ")
    assert heavy == "[]"
    parts = {name.removeprefix("syncfree.").split(".vllm")[0] for name in ast.literal_eval(ours)}
    assert parts == {"syncfree", "backends"}
