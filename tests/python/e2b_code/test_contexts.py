"""Contexts, languages, and what ends a run early."""

import concurrent.futures
import os
import ssl
import threading
import time

import httpx
import pytest
from conftest import PATIENCE_S, PATIENT, cells, stdout
from e2b_code_interpreter import Sandbox
from e2b.exceptions import TimeoutException


def test_the_default_contexts_are_there_from_the_start(box):
    languages = [context.language for context in box.list_code_contexts()]
    assert "python" in languages and "javascript" in languages


def test_a_context_has_a_directory_and_a_state_of_its_own(run, context):
    run("mine = 'default'")
    assert run("import os\nmine = 'own'\nos.getcwd()", context=context).text == "/tmp"
    assert run("mine").text == "default"


def test_javascript_awaits_at_top_level(run):
    first, second, third = (run(cell, language="javascript") for cell in cells("code_await.js"))
    assert (stdout(first), first.text) == ("before\nafter foo\n", "foo")
    assert second.text == "42"
    assert (third.error.name, third.error.value) == ("TypeError", "bad thing")
    assert run("got", language="js").text == "foo"


def test_typescript_shares_javascripts_context(run):
    assert run("const typed: number = 5; typed * 2", language="typescript").text == "10"
    assert run("typed", language="javascript").text == "5"


def test_a_javascript_run_ends_behind_all_its_output(run):
    lines = "for (let i = 0; i < 300; i++) console.log(i);"
    expected = "".join(f"{i}\n" for i in range(300))
    for _ in range(2):
        execution = run(f"{lines} 'value'", language="javascript")
        assert (stdout(execution), execution.text) == (expected, "value")
        failed = run(f"{lines} throw new Error('told')", language="javascript")
        assert (stdout(failed), failed.error.value) == (expected, "told")
    slow = "await new Promise((done) => setTimeout(done, 300)); return { 'text/plain': 'late' };"
    assert run(f"({{ async [Symbol.for('Jupyter.display')]() {{ {slow} }} }})", language="javascript").text == "late"


def test_many_lines_of_javascript_come_in_order_and_together(run):
    lines = 5000
    shown = "Deno.jupyter.display({ [Symbol.for('Jupyter.display')]: () => ({ 'text/plain': 'shown' }) })"
    events = []
    execution = run(
        f"for (let i = 0; i < {lines}; i++) console.log(i); await {shown}; console.error('after'); console.log('end');",
        language="javascript",
        on_stdout=lambda message: events.append(message.line),
        on_stderr=lambda message: events.append(message.line),
        on_result=lambda result: events.append(result.text),
    )
    assert "".join(events) == "".join(f"{i}\n" for i in range(lines)) + "shownafter\nend\n"
    assert len(execution.logs.stdout) < lines / 2


def test_javascript_errors_that_nobody_catches_are_told(run):
    rest = "await new Promise((done) => setTimeout(done, 300)); 'went on'"
    for code, told in (
        ("setTimeout(() => { throw new TypeError('in a timer') }, 1);", "Uncaught TypeError: in a timer\n"),
        ("setTimeout(() => { throw { odd: 1 } }, 1);", "Uncaught { odd: 1 }\n"),
        ("Promise.reject(new RangeError('in a promise'));", "Uncaught (in promise) RangeError: in a promise\n"),
        ("Promise.reject();", "Uncaught (in promise) undefined\n"),
    ):
        execution = run(f"{code} {rest}", language="javascript")
        assert "".join(execution.logs.stderr).startswith(told), code
        assert (execution.text, execution.error) == ("went on", None)
    # One that comes between runs has nobody to be told to, and costs the next run nothing.
    run("setTimeout(() => { throw new Error('late') }, 1); undefined", language="javascript")
    assert run("'next'", language="javascript").text == "next"


def test_javascript_that_does_not_parse_is_an_error(run):
    assert "does not parse" in run("1 +* 2", language="javascript").error.value
    assert "does not parse" in run("let typed: number = ;", language="typescript").error.value
    assert run("throw new Error('told')", language="javascript").error.value == "told"


def test_what_javascript_writes_to_its_streams_is_output(run):
    execution = run(
        "process.stdout.write('é1\\n'); process.stderr.write('2\\n');"
        "await Deno.stdout.write(new TextEncoder().encode('3\\n'))",
        language="javascript",
    )
    assert (stdout(execution), "".join(execution.logs.stderr), execution.error) == ("é1\n3\n", "2\n", None)


def test_bash_that_goes_on_behind_its_end_is_an_error(run):
    assert run("kept=1", language="bash").error is None
    for code in ("echo 'unterminated", "if true; then", "cat << END\nx", "echo $("):
        assert run(code, language="bash").error.name == "SyntaxError", code
    assert stdout(run("shopt -s extglob; echo $kept", language="bash")) == "1\n"


@pytest.mark.long
def test_what_javascript_prints_at_once_may_be_large(run):
    for size in (100_000, 8_000_000):
        # Characters of two units each, one of which is at the end of a piece.
        execution = run(f"console.log('a' + '\\u{{1f600}}'.repeat({size // 2})); 'value'", language="javascript")
        assert execution.text == "value"
        assert stdout(execution) == "a" + "\U0001f600" * (size // 2) + "\n"


@pytest.mark.parametrize(
    ("language", "code", "expected"),
    [
        ("bash", "cd /; echo $PWD; echo $ONCE", "/\nonce\n"),
        pytest.param("r", "x <- c(1, 2, 3)\ncat(sum(x), Sys.getenv('ONCE'), '\\n')", "6 once \n", marks=pytest.mark.long),
    ],
)
def test_other_languages_run_with_an_environment(run, language, code, expected):
    assert stdout(run(code, language=language, envs={"ONCE": "once"})) == expected


def test_bash_reads_nothing_and_leaves_no_trace_in_its_shell(run):
    code = "kept=yes; cat; read line; echo [$line]; PS1=xx; exec >/dev/null 2>&1; set -e"
    assert stdout(run(code, language="bash", timeout=60)) == "[]\n"
    assert stdout(run("shopt -s expand_aliases; false; echo $kept", language="bash")) == "yes\n"
    many = run("\n".join(f"echo {i}" for i in range(500)) + "\ncat <<'END'\n$kept 'é\nEND", language="bash")
    assert stdout(many) == "".join(f"{i}\n" for i in range(500)) + "$kept 'é\n"


@pytest.mark.long
def test_a_bash_that_ends_is_told_and_replaced(run):
    for code, cause in (("lost=1; exit 5", "exit status 5"), ("set -e; false; echo no", "exit status 1"), ("kill -9 $$", "killed")):
        error = run(code, language="bash").error
        assert error.name == "KernelDied" and cause in error.value, code
        assert stdout(run("echo a $lost", language="bash")) == "a\n"


def test_code_that_waits_in_a_context_that_is_removed_ends_with_it(box):
    context = box.create_code_context(request_timeout=PATIENCE_S)
    box.run_code("import os; print(os.getpid())", context=context, **PATIENT)
    kernels = "pgrep -fc '[i]pykernel_launcher' || true"
    before = int(box.commands.run(kernels, user="root").stdout)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = pool.submit(box.run_code, "import time; time.sleep(60)", context=context, **PATIENT)
        time.sleep(1)
        waiting = pool.submit(box.run_code, "print('ran')", context=context, **PATIENT)
        time.sleep(1)
        box.remove_code_context(context)
        for ended in (running.result(), waiting.result()):
            assert (ended.error.name, stdout(ended)) == ("ContextEnded", "")
    assert int(box.commands.run(kernels, user="root").stdout) == before - 1


@pytest.mark.long
def test_a_kernel_that_starts_holds_up_no_other_language(box):
    fresh = Sandbox.create(timeout=600)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        slow = pool.submit(fresh.run_code, "cat(6 * 7)", language="r", **PATIENT)
        time.sleep(1)
        assert fresh.run_code("6 * 7", **PATIENT).text == "42"
        assert not slow.done(), "R's kernel was there at once: this shows nothing"
        assert stdout(slow.result()) == "42"
    fresh.kill()


def test_bash_reports_exit_status(run):
    execution = run("echo before; ls /no/such/file 2>/dev/null", language="bash")
    assert stdout(execution) == "before\n"
    assert execution.error.value == "2"


@pytest.mark.long
def test_java_runs(run):
    assert run("int a = 6; a * 7", language="java", timeout=900, request_timeout=900).text == "42"


@pytest.mark.long
def test_javascript_that_loops_forever_is_replaced(run):
    with pytest.raises(TimeoutException):
        run("while (true) {}", language="javascript", timeout=3)
    assert run("1 + 1", language="javascript").text == "2"


def test_runs_in_one_context_wait_for_each_other(run):
    order = []
    slow = "import time\nprint('began', flush=True)\ntime.sleep(2)\nprint('slow')"
    began = threading.Event()

    def heard(message):
        began.set()
        order.extend(message.line.split())

    first = threading.Thread(target=lambda: run(slow, on_stdout=heard))
    first.start()
    assert began.wait(PATIENCE_S)
    run("print('fast')", on_stdout=lambda message: order.append(message.line.strip()))
    first.join()
    assert order == ["began", "slow", "fast"]


def test_a_kernel_that_dies_is_reported_and_replaced(run, context):
    run("other = 'lives'")
    run("lost = 1", context=context)
    execution = run("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", context=context)
    assert execution.error.name == "KernelDied"
    assert "signal 9" in execution.error.value
    assert run("1 + 1", context=context).text == "2"
    assert run("lost", context=context).error.name == "NameError"
    assert run("other").text == "lives"


def test_a_kernel_that_died_between_two_runs_is_told_to_the_next_one(run, box, context):
    pid = run("import os\nlost = os.getpid(); lost", context=context).text
    # It is gone once it is a zombie: what it had takes a while to free.
    box.commands.run(f"kill -9 {pid}; while grep -qs '^State:.[^Z]' /proc/{pid}/status; do sleep 0.1; done", user="root")
    execution = run("ran = 1", context=context)
    assert execution.error.name == "KernelDied"
    assert "signal 9" in execution.error.value and "was not run" in execution.error.value
    assert run("'ran' in globals(), 'lost' in globals()", context=context).text == "(False, False)"


def test_a_restart_ends_what_runs_in_a_context(run, box, context):
    ended = []
    began = threading.Event()
    slow = "import time; print('in', flush=True); time.sleep(60)"
    first = threading.Thread(target=lambda: ended.append(run(slow, context=context, on_stdout=lambda _: began.set())))
    first.start()
    assert began.wait(PATIENCE_S)
    box.restart_code_context(context)
    first.join()
    assert ended[0].error.name == "ContextEnded"
    assert run("1 + 1", context=context).text == "2"


@pytest.mark.long
def test_a_context_for_which_there_is_no_memory_is_refused():
    sandbox = Sandbox.create(timeout=1200)
    assert sandbox.run_code("hog = b'x' * (1 << 30)", **PATIENT).error is None
    made = []
    with pytest.raises(Exception, match="memory are left") as refused:
        for _ in range(40):
            made.append(sandbox.create_code_context(request_timeout=PATIENCE_S))
    assert made, refused.value
    assert sandbox.commands.run("echo alive").stdout == "alive\n"
    assert sandbox.run_code("1 + 1", **PATIENT).text == "2"
    sandbox.kill()


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
        # The kernels of the one before went with it.
        assert box.commands.run("pgrep -c deno").stdout == "1\n"
    finally:
        box.kill()


def post(box, path, body, **headers):
    """Asks the service of a sandbox, without the SDK."""
    host = box.get_host(49999)
    name, _, port = host.partition(":")
    context = ssl.create_default_context(cafile=os.environ["SSL_CERT_FILE"])
    with httpx.Client(verify=context, timeout=PATIENCE_S) as client:
        return client.post(
            f"https://127.0.0.1:{port or 443}{path}",
            json=body,
            headers={"Host": host, **headers},
            extensions={"sni_hostname": name},
        )


def test_code_needs_the_sandboxs_token(box):
    assert post(box, "/execute", {"code": "1"}).status_code == 401


def test_fields_that_are_not_known_are_refused(box, context):
    token = {"X-Access-Token": box._envd_access_token}
    for path, body in (
        ("/execute", {"code": "1", "timeout": 3}),
        ("/contexts", {"language": "bash", "timeout": 3}),
        (f"/contexts/{context.id}/restart", {"timeout": 3}),
    ):
        answer = post(box, path, body, **token)
        assert (answer.status_code, "unknown field 'timeout'" in answer.text) == (400, True)
    known = {"code": "6 * 7", "context_id": context.id, "language": None, "env_vars": None}
    assert '"text": "42"' in post(box, "/execute", known, **token).text
