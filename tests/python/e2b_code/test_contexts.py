"""Contexts, languages, and what ends a run early."""

import time

import pytest
from conftest import PATIENCE_S, cells, stdout
from e2b_code_interpreter import Sandbox
from e2b.exceptions import InvalidArgumentException, NotFoundException, TimeoutException


@pytest.fixture
def context(box):
    context = box.create_code_context(cwd="/tmp", request_timeout=PATIENCE_S)
    yield context
    try:
        box.remove_code_context(context)
    except NotFoundException:
        pass


def test_the_default_contexts_are_there_from_the_start(box):
    languages = [context.language for context in box.list_code_contexts()]
    assert "python" in languages and "javascript" in languages


def test_a_context_has_a_directory_and_a_state_of_its_own(box, run, context):
    run("mine = 'default'")
    assert run("import os\nmine = 'own'\nos.getcwd()", context=context).text == "/tmp"
    assert run("mine").text == "default"
    assert (context.language, context.cwd) == ("python", "/tmp")
    assert context.id in [known.id for known in box.list_code_contexts()]


def test_a_restart_keeps_the_place_and_loses_the_state(box, run, context):
    run("kept = 1", context=context)
    box.restart_code_context(context)
    assert run("kept", context=context).error.name == "NameError"
    assert run("import os\nos.getcwd()", context=context).text == "/tmp"


def test_a_removed_context_is_gone(box, run, context):
    box.remove_code_context(context)
    with pytest.raises(NotFoundException):
        run("1", context=context)
    with pytest.raises(NotFoundException):
        box.remove_code_context(context)
    with pytest.raises(NotFoundException):
        box.restart_code_context(context.id)


def test_what_cannot_be_had_is_refused(box, run, context):
    with pytest.raises(InvalidArgumentException):
        run("1", context=context, language="python")
    with pytest.raises(Exception, match="cobol"):
        run("1", language="cobol")
    with pytest.raises(Exception, match="/no/such/dir"):
        box.create_code_context(cwd="/no/such/dir")


def test_javascript_awaits_at_top_level(run):
    first, second, third = (run(cell, language="javascript") for cell in cells("code_await.js"))
    assert (stdout(first), first.text) == ("before\nafter foo\n", "foo")
    assert second.text == "42"
    assert (third.error.name, third.error.value) == ("TypeError", "bad thing")
    assert run("got", language="js").text == "foo"


def test_typescript_shares_javascripts_context(run):
    assert run("const typed: number = 5; typed * 2", language="typescript").text == "10"
    assert run("typed", language="javascript").text == "5"


@pytest.mark.parametrize(
    ("language", "code", "expected"),
    [
        ("bash", "cd /; echo $PWD; echo $ONCE", "/\nonce\n"),
        ("r", "x <- c(1, 2, 3)\ncat(sum(x), Sys.getenv('ONCE'), '\\n')", "6 once \n"),
    ],
)
def test_other_languages_run_with_an_environment(run, language, code, expected):
    assert stdout(run(code, language=language, envs={"ONCE": "once"})) == expected


@pytest.mark.long
def test_java_runs(run):
    assert run("int a = 6; a * 7", language="java", timeout=900, request_timeout=900).text == "42"


def test_bash_reports_exit_status(run):
    execution = run("echo before; ls /no/such/file 2>/dev/null", language="bash")
    assert stdout(execution) == "before\n"
    assert execution.error.value == "2"


def test_a_timeout_interrupts_and_the_state_stays(run):
    run("before_timeout = 7")
    with pytest.raises(TimeoutException):
        run("import time\nwhile True:\n    time.sleep(0.1)", timeout=3)
    assert run("before_timeout").text == "7"


def test_javascript_that_loops_forever_is_replaced(run):
    with pytest.raises(TimeoutException):
        run("while (true) {}", language="javascript", timeout=3)
    assert run("1 + 1", language="javascript").text == "2"


def test_runs_in_one_context_wait_for_each_other(box, run):
    import threading

    order = []
    first = threading.Thread(target=lambda: run("import time\ntime.sleep(2)\nprint('slow')", on_stdout=lambda _: order.append("slow")))
    first.start()
    time.sleep(0.5)
    run("print('fast')", on_stdout=lambda _: order.append("fast"))
    first.join()
    assert order == ["slow", "fast"]


def test_a_kernel_that_dies_is_reported_and_replaced(run, context):
    run("other = 'lives'", context=context)
    run("lost = 1")
    execution = run("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert execution.error.name == "KernelDied"
    assert "signal 9" in execution.error.value
    assert run("1 + 1").text == "2"
    assert run("lost").error.name == "NameError"
    assert run("other", context=context).text == "lives"


@pytest.mark.long
def test_a_kernel_without_memory_says_so():
    box = Sandbox.create(timeout=1200)
    try:
        other = box.create_code_context(request_timeout=PATIENCE_S)
        box.run_code("y = 'kept'", context=other)
        (code,) = cells("code_oom.py")
        execution = box.run_code(code, timeout=PATIENCE_S)
        assert execution.error is not None
        # Python itself may find out first.
        assert execution.error.name in ("OutOfMemory", "MemoryError")
        assert box.run_code("1 + 1", timeout=PATIENCE_S).text == "2"
        assert box.run_code("y", context=other, timeout=PATIENCE_S).text == "kept"
        assert box.commands.run("echo ok").stdout == "ok\n"
    finally:
        box.kill()


@pytest.mark.long
def test_the_service_comes_back_after_it_was_killed():
    box = Sandbox.create(timeout=1200)
    try:
        box.commands.run("pkill -9 -f 'python3 -m stockade_code'", user="root")
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                assert box.run_code("'back'", timeout=PATIENCE_S).text == "back"
                break
            except TimeoutException:
                time.sleep(1)
        else:
            raise AssertionError("the service did not come back")
    finally:
        box.kill()


def test_code_needs_the_sandboxs_token(box):
    import httpx
    import ssl
    import os

    host = box.get_host(49999)
    name, _, port = host.partition(":")
    context = ssl.create_default_context(cafile=os.environ["SSL_CERT_FILE"])
    with httpx.Client(verify=context) as client:
        answer = client.post(
            f"https://127.0.0.1:{port or 443}/execute",
            json={"code": "1"},
            headers={"Host": host},
            extensions={"sni_hostname": name},
        )
    assert answer.status_code == 401
