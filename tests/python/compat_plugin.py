"""Records which public methods of the E2B SDKs the passing tests call: `pytest -p compat_plugin`.

Every public method of the SDK's classes is wrapped; what a test calls counts as covered once the test has passed.
The result goes to the file `STOCKADE_COMPAT_OUT` names:

    {"sdk": "e2b 2.63.0", "methods": {"Sandbox.create": "tested", "Git.clone": "untested", ...}}
"""

import functools
import importlib
import importlib.metadata
import inspect
import json
import os
import pathlib

# Where the classes are, by the names the table has for them. Async twins count on their own.
CLASSES = {
    "Sandbox": ("e2b", "Sandbox"),
    "Sandbox.commands": ("e2b.sandbox_sync.commands.command", "Commands"),
    "Sandbox.pty": ("e2b.sandbox_sync.commands.pty", "Pty"),
    "Sandbox.files": ("e2b.sandbox_sync.filesystem.filesystem", "Filesystem"),
    "Sandbox.git": ("e2b.sandbox_sync.git", "Git"),
    "CommandHandle": ("e2b.sandbox_sync.commands.command_handle", "CommandHandle"),
    "WatchHandle": ("e2b.sandbox_sync.filesystem.watch_handle", "WatchHandle"),
    "Template": ("e2b", "Template"),
    "AsyncSandbox": ("e2b", "AsyncSandbox"),
    "AsyncSandbox.commands": ("e2b.sandbox_async.commands.command", "Commands"),
    "AsyncSandbox.pty": ("e2b.sandbox_async.commands.pty", "Pty"),
    "AsyncSandbox.files": ("e2b.sandbox_async.filesystem.filesystem", "Filesystem"),
    "AsyncTemplate": ("e2b", "AsyncTemplate"),
    "CodeInterpreter": ("e2b_code_interpreter", "Sandbox"),
    "AsyncCodeInterpreter": ("e2b_code_interpreter", "AsyncSandbox"),
    "Volume": ("e2b", "Volume"),
    "Secret": ("e2b", "Secret"),
    "AsyncSecret": ("e2b", "AsyncSecret"),
    "AsyncVolume": ("e2b", "AsyncVolume"),
    "AsyncSandbox.git": ("e2b.sandbox_async.git", "Git"),
    "AsyncCommandHandle": ("e2b.sandbox_async.commands.command_handle", "AsyncCommandHandle"),
    "AsyncWatchHandle": ("e2b.sandbox_async.filesystem.watch_handle", "AsyncWatchHandle"),
}

called, passed, known = set(), set(), {}


def record(name, function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        called.add(name)
        return function(*args, **kwargs)

    return wrapper


def wrap(label, owner, base=None):
    """Wraps the public methods a class itself, or a base of the same package, has."""
    for name, value in inspect.getmembers_static(owner):
        inherited = base is not None and inspect.getattr_static(base, name, None) is value
        if name.startswith("_") or inherited or not hasattr(owner, name):
            continue
        if type(value).__name__ == "class_method_variant":
            # The SDK's own descriptor: one name for a class's and an instance's method.
            for part in ("class_method_name", "method"):
                if inspect.isfunction(getattr(value, part, None)):
                    setattr(value, part, record(f"{label}.{name}", getattr(value, part)))
            target = getattr(owner, getattr(value, "class_method_name", ""), None)
            known[f"{label}.{name}"] = "untested"
            if inspect.isfunction(target) or inspect.ismethod(target):
                rewrap(owner, getattr(value, "class_method_name"), f"{label}.{name}")
            continue
        if isinstance(value, (staticmethod, classmethod)):
            known[f"{label}.{name}"] = "untested"
            setattr(owner, name, type(value)(record(f"{label}.{name}", value.__func__)))
        elif inspect.isfunction(value):
            known[f"{label}.{name}"] = "untested"
            setattr(owner, name, record(f"{label}.{name}", value))


def rewrap(owner, name, label):
    value = inspect.getattr_static(owner, name)
    if isinstance(value, (staticmethod, classmethod)):
        setattr(owner, name, type(value)(record(label, value.__func__)))
    elif inspect.isfunction(value):
        setattr(owner, name, record(label, value))


def pytest_configure(config):
    if not os.environ.get("STOCKADE_COMPAT_OUT"):
        return
    wrapped = set()
    for label, (module, name) in CLASSES.items():
        try:
            owner = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
        if owner in wrapped:
            continue
        wrapped.add(owner)
        base = next((base for base in owner.__mro__[1:] if base in wrapped), None)
        wrap(label, owner, base)


def pytest_runtest_setup(item):
    called.clear()


def pytest_runtest_makereport(item, call):
    if call.when == "teardown" and call.excinfo is None and getattr(item, "stockade_passed", False):
        passed.update(called)
    if call.when == "call":
        item.stockade_passed = call.excinfo is None


def pytest_sessionfinish(session):
    out = os.environ.get("STOCKADE_COMPAT_OUT")
    if not out:
        return
    packages = ["e2b_code_interpreter", "e2b"]
    installed = [name for name in packages if importlib.util.find_spec(name)]
    release = f"{installed[0].replace('_', '-')} {importlib.metadata.version(installed[0])}"
    methods = {name: "tested" if name in passed else state for name, state in sorted(known.items())}
    result = {"sdk": release, "language": "Python", "methods": methods}
    pathlib.Path(out).write_text(json.dumps(result, indent=1) + "\n")
