"""Sandboxes with kernels, on the server the environment names."""

import importlib.metadata
import os
import pathlib
import re

import pytest

# Kernels that are not there from the start take their time where the processor is emulated.
PATIENCE_S = 300
PATIENT = {"timeout": PATIENCE_S, "request_timeout": PATIENCE_S}


@pytest.fixture(scope="session", autouse=True)
def environment():
    if not os.environ.get("E2B_DOMAIN"):
        pytest.exit("name a server that has the template code-interpreter: E2B_DOMAIN, E2B_API_KEY, SSL_CERT_FILE")


def pytest_collection_modifyitems(items):
    major, minor, *_ = importlib.metadata.version("e2b-code-interpreter").split(".")
    for item in items:
        if item.get_closest_marker("current") and (int(major), int(minor)) <= (2, 9):
            item.add_marker(pytest.mark.skip(reason="this SDK release does not have it"))


@pytest.fixture(scope="session")
def box(environment):
    """The sandbox that most tests share."""
    from e2b_code_interpreter import Sandbox

    sandbox = Sandbox.create(timeout=3000, envs={"FROM_SANDBOX": "seen"})
    yield sandbox
    sandbox.kill()


@pytest.fixture(scope="session", params=["sync", "async"])
def either(box, request):
    """The same one, by either client."""
    from blocking import Blocking
    from e2b_code_interpreter import AsyncSandbox

    return box if request.param == "sync" else Blocking(AsyncSandbox).connect(box.sandbox_id)


@pytest.fixture(scope="session")
def context(box):
    """A context besides the default ones; it costs a kernel, so that tests share it."""
    return box.create_code_context(cwd="/tmp", request_timeout=PATIENCE_S)


@pytest.fixture
def run(box):
    """Runs code in the shared sandbox."""

    def run_code(code, **options):
        return box.run_code(code, **{**PATIENT, **options})

    return run_code


def cells(name):
    """The cells of a field case's input."""
    text = (pathlib.Path(__file__).parents[2] / "cases/inputs" / name).read_text()
    return re.split(r"(?m)^(?:#|//) %%.*$", text)[1:] or [text]


def stdout(execution):
    return "".join(execution.logs.stdout)
