"""Every method and option of the code interpreter's SDK, with either client."""

import json
import os
import re

import pytest
from conftest import PATIENCE_S, PATIENT
from e2b.exceptions import InvalidArgumentException, NotFoundException, TimeoutException

EVERYTHING = """
import os, sys
print("to out"); sys.stdout.flush()
print("to err", file=sys.stderr); sys.stderr.flush()
display(os.environ["ONCE"])
1 / 0
"""


@pytest.mark.surface
def test_a_run_tells_everything_as_it_comes(either):
    seen = []
    execution = either.run_code(
        EVERYTHING,
        language="python",
        on_stdout=lambda message: seen.append(("out", message.line, message.error)),
        on_stderr=lambda message: seen.append(("err", message.line, message.error)),
        on_result=lambda result: seen.append(("result", result.text)),
        on_error=lambda error: seen.append(("error", error.name, error.value)),
        envs={"ONCE": "once"},
        **PATIENT,
    )
    error = ("error", "ZeroDivisionError", "division by zero")
    assert seen == [("out", "to out\n", False), ("err", "to err\n", True), ("result", "once"), error]
    assert (execution.logs.stdout, execution.logs.stderr) == (["to out\n"], ["to err\n"])
    assert (execution.text, [result.text for result in execution.results]) == (None, ["once"])
    assert "1 / 0" in re.sub(r"\x1b\[[\d;]*m", "", execution.error.traceback)
    assert json.loads(execution.logs.to_json()) == {"stdout": ["to out\n"], "stderr": ["to err\n"]}
    assert json.loads(execution.error.to_json())["name"] == "ZeroDivisionError"
    assert "once" in execution.to_json()


@pytest.mark.surface
def test_a_context_lives_its_life(either):
    context = either.create_code_context(cwd="/tmp", language="python", request_timeout=PATIENCE_S)
    assert (context.language, context.cwd) == ("python", "/tmp")
    assert context.id in [known.id for known in either.list_code_contexts()]
    assert either.run_code("import os\nkept = 1\nos.getcwd()", context=context, **PATIENT).text == "/tmp"
    assert either.run_code("kept", **PATIENT).error.name == "NameError"
    either.restart_code_context(context)
    assert either.run_code("kept", context=context, **PATIENT).error.name == "NameError"
    assert either.run_code("import os\nos.getcwd()", context=context, **PATIENT).text == "/tmp"
    either.remove_code_context(context)
    assert context.id not in [known.id for known in either.list_code_contexts()]
    for gone in (
        lambda: either.run_code("1", context=context, **PATIENT),
        lambda: either.remove_code_context(context.id),
        lambda: either.restart_code_context(context.id),
    ):
        with pytest.raises(NotFoundException):
            gone()


def test_a_timeout_interrupts_and_the_state_stays(either):
    either.run_code("before_timeout = 7", **PATIENT)
    with pytest.raises(TimeoutException):
        either.run_code("import time\nwhile True:\n    time.sleep(0.1)", timeout=3)
    assert either.run_code("before_timeout", **PATIENT).text == "7"


def test_what_cannot_be_had_is_refused(either, context):
    with pytest.raises(InvalidArgumentException):
        either.run_code("1", context=context, language="python")
    with pytest.raises(Exception, match="cobol"):
        either.run_code("1", language="cobol")
    with pytest.raises(Exception, match="cobol"):
        either.create_code_context(language="cobol")
    with pytest.raises(Exception, match="/no/such/dir"):
        either.create_code_context(cwd="/no/such/dir")


@pytest.mark.current
def test_a_client_of_its_own_runs_code(box):
    from e2b_code_interpreter import E2B

    client = E2B(api_key=os.environ["E2B_API_KEY"], domain=os.environ["E2B_DOMAIN"])
    assert client.Sandbox.connect(box.sandbox_id).run_code("40 + 2", **PATIENT).text == "42"
