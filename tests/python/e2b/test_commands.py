"""sandbox.commands"""

import base64
import concurrent.futures
import hashlib
import threading

import pytest
from e2b import CommandExitException, InvalidArgumentException, NotFoundException, TimeoutException
from e2b.exceptions import AuthenticationException, SandboxException

from conftest import eventually


def test_run_returns_output_and_exit_code(box):
    result = box.commands.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code, result.error) == ("out\n", "err\n", 0, None)


def test_a_failing_command_raises_with_code_and_output(box):
    with pytest.raises(CommandExitException) as caught:
        box.commands.run("echo partial; exit 7")
    assert caught.value.exit_code == 7
    assert caught.value.stdout == "partial\n"
    assert caught.value.error == "exit status 7"


def test_a_command_killed_by_a_signal_has_code_minus_one_and_says_which(box):
    with pytest.raises(CommandExitException) as caught:
        box.commands.run("kill -KILL $$")
    assert (caught.value.exit_code, caught.value.error) == (-1, "signal: killed")
    with pytest.raises(CommandExitException) as caught:
        box.commands.run("kill -TERM $$")
    assert (caught.value.exit_code, caught.value.error) == (-1, "signal: terminated")


def test_callbacks_get_each_write_as_it_comes(box):
    out, err = [], []
    box.commands.run(
        "echo one; sleep 0.3; echo two; sleep 0.3; echo three >&2", on_stdout=out.append, on_stderr=err.append
    )
    assert out == ["one\n", "two\n"]
    assert err == ["three\n"]


def test_environment_of_one_command(box):
    assert box.commands.run("echo $ONE-$TWO", envs={"ONE": "1", "TWO": "a b'\""}).stdout == "1-a b'\"\n"
    assert box.commands.run("echo [$ONE]").stdout == "[]\n"


def test_cwd(box, place):
    assert box.commands.run("pwd", cwd=place).stdout.strip() == place


def test_a_missing_cwd_is_an_invalid_argument(box):
    with pytest.raises(InvalidArgumentException, match="cwd '/no/such/place' does not exist"):
        box.commands.run("pwd", cwd="/no/such/place")


@pytest.mark.machine
def test_a_cwd_that_cannot_be_entered_is_said_to_be_that(box):
    with pytest.raises(InvalidArgumentException, match="cannot enter cwd '/root': permission denied"):
        box.commands.run("pwd", cwd="/root")


@pytest.mark.machine
def test_relative_cwd_and_tilde_start_at_home(box):
    box.files.make_dir("/home/user/below")
    assert box.commands.run("pwd", cwd="below").stdout == "/home/user/below\n"
    assert box.commands.run("pwd", cwd="~/below").stdout == "/home/user/below\n"
    assert box.commands.run("pwd").stdout == "/home/user\n"


@pytest.mark.machine
def test_users(box):
    assert box.commands.run("whoami").stdout == "user\n"
    assert box.commands.run("whoami", user="root").stdout == "root\n"
    assert box.commands.run("echo $HOME-$USER-$LOGNAME").stdout == "/home/user-user-user\n"
    assert box.commands.run("sudo whoami").stdout == "root\n"


def test_an_unknown_user_is_refused_by_name(box):
    with pytest.raises(AuthenticationException, match="invalid username: 'nobody-here'"):
        box.commands.run("true", user="nobody-here")


def test_timeout_kills_the_command(box, place):
    with pytest.raises(TimeoutException):
        box.commands.run(f"echo $$ > {place}/pid; sleep 1000", timeout=10)
    pid = box.files.read(f"{place}/pid").strip()
    eventually(lambda: "gone" in box.commands.run(f"kill -0 {pid} 2>/dev/null || echo gone").stdout)


def test_timeout_kills_children_too(box, place):
    with pytest.raises(TimeoutException):
        box.commands.run(f"(sleep 1000 & echo $! > {place}/child; wait)", timeout=10)
    pid = box.files.read(f"{place}/child").strip()
    eventually(lambda: "gone" in box.commands.run(f"kill -0 {pid} 2>/dev/null || echo gone").stdout)


def test_no_timeout_with_zero(box):
    assert box.commands.run("sleep 1.5; echo done", timeout=0).stdout == "done\n"


def test_background_and_wait(box):
    handle = box.commands.run("sleep 0.2; echo late; exit 3", background=True)
    assert handle.pid > 0
    with pytest.raises(CommandExitException) as caught:
        handle.wait()
    assert (caught.value.exit_code, caught.value.stdout) == (3, "late\n")


def test_iterating_a_handle(box):
    handle = box.commands.run("echo a; sleep 0.2; echo b >&2", background=True)
    assert list(handle) == [("a\n", None, None), (None, "b\n", None)]


def test_kill(box):
    handle = box.commands.run("sleep 1000", background=True)
    assert handle.kill() is True
    with pytest.raises(CommandExitException) as caught:
        handle.wait()
    assert (caught.value.exit_code, caught.value.error) == (-1, "signal: killed")
    assert box.commands.kill(handle.pid) is False


def test_kill_of_an_unknown_process_is_false(box):
    assert box.commands.kill(4_000_000) is False


def test_list_shows_what_runs(box):
    handle = box.commands.run("sleep 1000", background=True, envs={"MARK": "listed"}, cwd="/tmp")
    try:
        found = [process for process in box.commands.list() if process.pid == handle.pid]
        assert len(found) == 1
        assert (found[0].cmd, found[0].args) == ("/bin/bash", ["-l", "-c", "sleep 1000"])
        assert found[0].envs == {"MARK": "listed"}
        assert found[0].cwd == "/tmp"
    finally:
        handle.kill()
    eventually(lambda: all(process.pid != handle.pid for process in box.commands.list()))


def test_stdin(box):
    handle = box.commands.run("cat", background=True, stdin=True)
    box.commands.send_stdin(handle.pid, "first ")
    box.commands.send_stdin(handle.pid, b"second\xff\n")
    box.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "first second\ufffd\n"


def test_stdin_through_the_handle(box):
    handle = box.commands.run("read line; echo got:$line", background=True, stdin=True)
    handle.send_stdin("hello\n")
    assert handle.wait().stdout == "got:hello\n"


def test_without_stdin_a_command_reads_nothing(box):
    assert box.commands.run("cat; echo end").stdout == "end\n"


def test_stdin_of_an_unknown_process_is_not_found(box):
    with pytest.raises(NotFoundException):
        box.commands.send_stdin(4_000_000, "x")


def test_stdin_of_an_ended_process_is_not_found(box):
    handle = box.commands.run("true", background=True, stdin=True)
    handle.wait()
    with pytest.raises(NotFoundException):
        box.commands.send_stdin(handle.pid, "late\n")


def test_stdin_not_asked_for_is_refused(box):
    handle = box.commands.run("sleep 1000", background=True)
    try:
        with pytest.raises(SandboxException):
            box.commands.send_stdin(handle.pid, "x")
    finally:
        handle.kill()


@pytest.mark.current
def test_stream_input(box):
    handle = box.commands.run("wc -c", background=True, stdin=True)
    box.commands.stream_input(handle.pid, (b"x" * 1000 for _ in range(50)))
    handle.close_stdin()
    assert handle.wait().stdout.strip() == "50000"
    with pytest.raises(NotFoundException):
        box.commands.stream_input(4_000_000, ["x"])


def test_a_megabyte_goes_in_and_comes_back(box):
    handle = box.commands.run("md5sum", background=True, stdin=True)
    data = bytes(range(256)) * 4096
    for start in range(0, len(data), 65536):
        box.commands.send_stdin(handle.pid, data[start : start + 65536])
    box.commands.close_stdin(handle.pid)
    assert handle.wait().stdout.split()[0] == hashlib.md5(data).hexdigest()


def test_connect_sees_output_from_then_on_and_the_end(box, place):
    handle = box.commands.run(
        f"echo early; until [ -e {place}/go ]; do sleep 0.05; done; echo late; exit 4", background=True
    )
    first = next(iter(handle))
    assert first == ("early\n", None, None)
    handle.disconnect()
    again = box.commands.connect(handle.pid)
    assert again.pid == handle.pid
    box.files.write(f"{place}/go", "")
    with pytest.raises(CommandExitException) as caught:
        again.wait()
    assert (caught.value.exit_code, caught.value.stdout) == (4, "late\n")


def test_connect_to_an_unknown_process_is_not_found(box):
    with pytest.raises(NotFoundException):
        box.commands.connect(4_000_000)


def test_a_late_connect_still_learns_the_exit(box):
    handle = box.commands.run("exit 5", background=True)
    with pytest.raises(CommandExitException):
        handle.wait()
    with pytest.raises(CommandExitException) as caught:
        box.commands.connect(handle.pid).wait()
    assert caught.value.exit_code == 5


def test_a_command_outlives_its_listener(box, place):
    handle = box.commands.run(f"sleep 0.5; touch {place}/survived", background=True)
    handle.disconnect()
    eventually(lambda: box.files.exists(f"{place}/survived"))


def test_a_background_child_that_lets_go_of_the_output_does_not_hold_the_command(box):
    result = box.commands.run("sleep 1000 >/dev/null 2>&1 & echo started; echo $!", timeout=30)
    started, pid = result.stdout.split()
    assert started == "started"
    box.commands.run(f"kill {pid}")


def test_output_of_every_kind_survives(box):
    assert box.commands.run("printf 'no newline'").stdout == "no newline"
    assert box.commands.run("printf 'é🙂\\n'").stdout == "é🙂\n"
    script = "printf '\\xf0\\x9f'; sleep 0.2; printf '\\x99\\x82'"
    assert box.commands.run(script).stdout == "🙂"
    assert box.commands.run("printf 'a\\xffb'").stdout == "a\ufffdb"


def test_a_long_output_comes_whole(box):
    result = box.commands.run("head -c 5000000 /dev/zero | tr '\\0' x", timeout=120)
    assert len(result.stdout) == 5_000_000
    assert set(result.stdout) == {"x"}


@pytest.mark.machine
@pytest.mark.current
def test_a_hundred_megabytes_of_output_come_whole_and_in_order(box):
    total, digest = 0, hashlib.sha256()

    def take(text):
        nonlocal total
        total += len(text)
        digest.update(text.encode())

    # Numbered lines of one length: a missing or a misplaced one changes the digest.
    ended = box.commands.run("seq 10000000 22499999", on_stdout=take, timeout=900, request_timeout=900)
    assert (ended.exit_code, total) == (0, 9 * 12_500_000)
    expected = hashlib.sha256()
    for first in range(10_000_000, 22_500_000, 100_000):
        expected.update("".join(f"{number}\n" for number in range(first, first + 100_000)).encode())
    assert digest.digest() == expected.digest()


@pytest.mark.machine
@pytest.mark.current
def test_a_hundred_megabytes_of_input_arrive_whole(box):
    piece = bytes(range(256)) * 4096
    handle = box.commands.run("sha256sum", background=True, stdin=True, timeout=900)
    for _ in range(100):
        box.commands.send_stdin(handle.pid, piece)
    box.commands.close_stdin(handle.pid)
    assert handle.wait().stdout.split()[0] == hashlib.sha256(piece * 100).hexdigest()


def test_a_slow_listener_gets_everything(box):
    pause = threading.Event()
    got = []

    def slow(text):
        if len(got) < 5:
            pause.wait(0.3)
        got.append(text)

    box.commands.run("seq 1 200000", on_stdout=slow, timeout=120)
    assert "".join(got) == "".join(f"{n}\n" for n in range(1, 200_001))


def test_quotes_and_newlines_reach_the_shell_as_written(box):
    text = "it's \"quoted\" $HOME `x` \\ \n end"
    encoded = base64.b64encode(text.encode()).decode()
    assert box.commands.run(f"cat <<'EOF' | base64 -w0\n{text}\nEOF").stdout == base64.b64encode(
        (text + "\n").encode()
    ).decode(), encoded


def test_a_program_that_does_not_exist(box):
    with pytest.raises(CommandExitException) as caught:
        box.commands.run("no-such-program-here")
    assert caught.value.exit_code == 127
    assert "no-such-program-here" in caught.value.stderr


def test_a_nul_byte_is_refused(box):
    with pytest.raises(Exception) as caught:
        box.commands.run("echo a\0b")
    assert not isinstance(caught.value, CommandExitException)


def test_an_argument_list_that_is_too_long_is_refused(box):
    with pytest.raises(SandboxException):
        box.commands.run("echo " + "x" * 3_000_000)


def test_fifty_commands_at_once(box):
    def one(number):
        result = box.commands.run(f"sleep 0.2; echo {number}; echo err{number} >&2", timeout=300)
        return result.stdout, result.stderr

    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        results = list(pool.map(one, range(50)))
    assert results == [(f"{n}\n", f"err{n}\n") for n in range(50)]
