"""sandbox.pty"""

import pytest
from e2b import CommandExitException, NotFoundException, PtySize
from e2b.exceptions import SandboxException


def collect(handle):
    """Everything a terminal prints up to its end, and its exit code."""
    seen = bytearray()
    try:
        handle.wait(on_pty=seen.extend)
        return bytes(seen), 0
    except CommandExitException as ended:
        return bytes(seen), ended.exit_code


def read_until(handle, text):
    seen = bytearray()
    for _, _, data in handle:
        seen.extend(data)
        if text in seen:
            return
    raise AssertionError(f"ended without {text}: {bytes(seen)}")


def test_a_shell_takes_input_and_ends_with_its_code(box):
    handle = box.pty.create(PtySize(rows=24, cols=80), envs={"MARK": "seen"})
    box.pty.send_stdin(handle.pid, b"echo [$MARK] $TERM; exit 3\n")
    output, code = collect(handle)
    assert b"[seen] xterm-256color" in output
    assert code == 3


def test_size_and_resize(box):
    handle = box.pty.create(PtySize(rows=30, cols=100))
    box.pty.send_stdin(handle.pid, b"stty size; read x; stty size; exit\n")
    read_until(handle, b"30 100")
    box.pty.resize(handle.pid, PtySize(rows=40, cols=120))
    box.pty.send_stdin(handle.pid, b"\n")
    output, code = collect(handle)
    assert b"40 120" in output
    assert code == 0


def test_cwd_and_colours(box, place):
    handle = box.pty.create(PtySize(rows=24, cols=200), cwd=place)
    box.pty.send_stdin(handle.pid, b"pwd; printf '\\033[31mred\\033[0m\\n'; exit\n")
    output, _ = collect(handle)
    assert place.encode() in output
    assert b"\x1b[31mred\x1b[0m" in output


def test_kill(box):
    handle = box.pty.create(PtySize(rows=24, cols=80))
    assert box.pty.kill(handle.pid) is True
    _, code = collect(handle)
    assert code == -1
    assert box.pty.kill(handle.pid) is False


def test_connect(box):
    handle = box.pty.create(PtySize(rows=24, cols=80))
    handle.disconnect()
    again = box.pty.connect(handle.pid)
    box.pty.send_stdin(again.pid, b"echo re''attached; exit\n")
    output, code = collect(again)
    assert b"reattached" in output
    assert code == 0


def test_connect_to_an_unknown_terminal_is_not_found(box):
    with pytest.raises(NotFoundException):
        box.pty.connect(4_000_000)


def test_ctrl_c_interrupts_and_ctrl_d_ends(box):
    handle = box.pty.create(PtySize(rows=24, cols=80))
    # An interrupt throws away what was typed ahead, and an end of input counts only where a program reads
    # lines, so each step waits for the one before.
    box.pty.send_stdin(handle.pid, b"PS1='at-''prompt>'\n")
    read_until(handle, b"at-prompt>")
    # The shell hands the terminal to a program that it has started; what is pressed before that goes to the
    # shell, which ignores it. So the program itself says when it is there.
    box.pty.send_stdin(handle.pid, b"sh -c 'echo rea\"\"dy; exec sleep 1000'\n")
    read_until(handle, b"ready")
    box.pty.send_stdin(handle.pid, b"\x03")
    read_until(handle, b"at-prompt>")
    box.pty.send_stdin(handle.pid, b"echo rea''ding; cat; echo re''ad; exit 9\n")
    read_until(handle, b"reading")
    box.pty.send_stdin(handle.pid, b"\x04")
    output, code = collect(handle)
    assert b"read" in output
    assert code == 9


def test_stdin_of_a_terminal_cannot_be_closed(box):
    handle = box.pty.create(PtySize(rows=24, cols=80))
    try:
        with pytest.raises(SandboxException):
            box.commands.close_stdin(handle.pid)
    finally:
        handle.kill()


@pytest.mark.current
def test_stream_input(box):
    handle = box.pty.create(PtySize(rows=24, cols=80))
    box.pty.stream_input(handle.pid, ["echo strea", "med; exit\n"])
    output, _ = collect(handle)
    assert b"streamed" in output


@pytest.mark.machine
def test_user(box):
    handle = box.pty.create(PtySize(rows=24, cols=80), user="root")
    box.pty.send_stdin(handle.pid, b"whoami; exit\n")
    output, _ = collect(handle)
    assert b"root" in output
