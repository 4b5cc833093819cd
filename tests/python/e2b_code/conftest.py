"""Sandboxes with kernels, on the server the environment names."""

import os
import pathlib
import sys

import pytest

# Kernels that are not there from the start take their time where the processor is emulated.
PATIENCE_S = 300


@pytest.fixture(scope="session", autouse=True)
def environment():
    if not os.environ.get("E2B_DOMAIN"):
        pytest.exit("name a server that has the template code-interpreter: E2B_DOMAIN, E2B_API_KEY, SSL_CERT_FILE")


@pytest.fixture(scope="session")
def box(environment):
    """The sandbox that most tests share."""
    from e2b_code_interpreter import Sandbox

    sandbox = Sandbox.create(timeout=3000, envs={"FROM_SANDBOX": "seen"})
    yield sandbox
    sandbox.kill()


@pytest.fixture
def run(box):
    """Runs code in the shared sandbox."""

    def run_code(code, **options):
        return box.run_code(code, **{"timeout": PATIENCE_S, "request_timeout": PATIENCE_S, **options})

    return run_code


def cells(name):
    """The cells of a field case's input."""
    import re

    text = (pathlib.Path(__file__).parents[2] / "cases/inputs" / name).read_text()
    return re.split(r"(?m)^(?:#|//) %%.*$", text)[1:] or [text]


def stdout(execution):
    return "".join(execution.logs.stdout)
