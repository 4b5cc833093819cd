"""Records what of the E2B SDKs the passing tests use: `pytest -p compat_plugin`.

Every public method of the SDK's classes is wrapped; what a test calls, and each option it sets, counts as covered once
the test has passed. The result goes to the file `STOCKADE_COMPAT_OUT` names:

    {"sdk": "e2b 2.63.0",
     "methods": {"Sandbox.create": "tested", "Git.clone": "untested", ...},
     "options": {"Sandbox.create(timeout)": "tested", ...}}

An option is a parameter with a default. Those that every method has for the connection itself are left out.
The code interpreter's SDK is one on top of another, which has a suite of its own: of it, its own methods count.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
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
    "Volume": ("e2b", "Volume"),
    "Secret": ("e2b", "Secret"),
    "AsyncSecret": ("e2b", "AsyncSecret"),
    "AsyncVolume": ("e2b", "AsyncVolume"),
    "AsyncSandbox.git": ("e2b.sandbox_async.git", "Git"),
    "AsyncCommandHandle": ("e2b.sandbox_async.commands.command_handle", "AsyncCommandHandle"),
    "AsyncWatchHandle": ("e2b.sandbox_async.filesystem.watch_handle", "AsyncWatchHandle"),
    "AsyncCommandInputHandle": ("e2b", "AsyncCommandInputHandle"),
    "TemplateBuilder": ("e2b.template.main", "TemplateBuilder"),
    "SandboxPaginator": ("e2b", "SandboxPaginator"),
    "AsyncSandboxPaginator": ("e2b", "AsyncSandboxPaginator"),
    "SnapshotPaginator": ("e2b", "SnapshotPaginator"),
    "AsyncSnapshotPaginator": ("e2b", "AsyncSnapshotPaginator"),
    "SecretPaginator": ("e2b", "SecretPaginator"),
    "AsyncSecretPaginator": ("e2b", "AsyncSecretPaginator"),
}
OF_CODE = {
    "CodeInterpreter": ("e2b_code_interpreter", "Sandbox"),
    "AsyncCodeInterpreter": ("e2b_code_interpreter", "AsyncSandbox"),
    "Execution": ("e2b_code_interpreter", "Execution"),
    "ExecutionError": ("e2b_code_interpreter", "ExecutionError"),
    "Logs": ("e2b_code_interpreter", "Logs"),
    "Result": ("e2b_code_interpreter", "Result"),
}

# The client's own, and the same for every method; the code interpreter's two time limits are told apart.
EVERYWHERE = {"logger"} if importlib.util.find_spec("e2b_code_interpreter") else {"request_timeout", "logger"}

called, passed, known, options = set(), set(), set(), set()


def record(name, function):
    known.add(name)
    parameters = inspect.signature(function).parameters
    defaults = {
        key: parameter.default
        for key, parameter in parameters.items()
        if parameter.default is not inspect.Parameter.empty and key not in EVERYWHERE
    }
    options.update(f"{name}({key})" for key in defaults)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        called.add(name)
        given = {**dict(zip(parameters, args)), **kwargs}
        called.update(f"{name}({key})" for key, usual in defaults.items() if given.get(key, usual) is not usual)
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
            if inspect.isfunction(target) or inspect.ismethod(target):
                class_method = value.class_method_name
                setattr(owner, class_method, recorded(f"{label}.{name}", inspect.getattr_static(owner, class_method)))
        elif type(value).__name__ == "DualMethod":
            # Another one, for volumes.
            value._static_fn = recorded(f"{label}.{name}", value._static_fn)
            value._instance_fn = recorded(f"{label}.{name}", value._instance_fn)
        elif isinstance(value, (staticmethod, classmethod)) or inspect.isfunction(value):
            setattr(owner, name, recorded(f"{label}.{name}", value))


def recorded(name, value):
    if isinstance(value, (staticmethod, classmethod)):
        return type(value)(record(name, value.__func__))
    return record(name, value)


def found(module, name):
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None


def pytest_configure(config):
    if not os.environ.get("STOCKADE_COMPAT_OUT"):
        return
    classes, seen = CLASSES, set()
    if importlib.util.find_spec("e2b_code_interpreter"):
        classes, seen = OF_CODE, {found(*place) for place in CLASSES.values()}
    for label, place in classes.items():
        owner = found(*place)
        if owner is None or owner in seen:
            continue
        seen.add(owner)
        base = next((base for base in owner.__mro__[1:] if base in seen), None)
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
    states = lambda names: {name: "tested" if name in passed else "untested" for name in sorted(names)}
    result = {"sdk": release, "language": "Python", "methods": states(known), "options": states(options)}
    pathlib.Path(out).write_text(json.dumps(result, indent=1) + "\n")
