"""What passes between the service and Bash besides the kernel's channels: the code, and how the shell ended.

The kernel types code into a shell on a terminal, knows its end by the prompt, and puts a new shell in the place of one that
ended without a word. So the code goes through a file, its input is empty, and what would hide the prompt is undone behind it.
"""

import pathlib
import shlex
import shutil
import tempfile

# `set -e` and `set -x` would be about this and the kernel's own commands from here on.
END = """__stockade_end() {
  local status=$?
  set +ex
  exec >/dev/tty 2>&1
  PS1=$__stockade_ps1 PS2=$__stockade_ps2 PROMPT_COMMAND=
  return $status
}
readonly -f __stockade_end
readonly __stockade_ps1=$PS1 __stockade_ps2=$PS2"""


class Shell:
    """The shell of one kernel."""

    def __init__(self):
        # Not in /tmp, which code may clear.
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="stockade-bash-", dir="/run"))
        self.code, self.exit = self.directory / "code", self.directory / "exit"
        self.pid = None

    def setup(self):
        """Code to run once."""
        on_exit = f"printf %s $? >{shlex.quote(str(self.exit))}"
        return f"{END}\nprintf %s $$ >{shlex.quote(str(self.code))}\ntrap {shlex.quote(on_exit)} EXIT"

    def is_set_up(self):
        """To be told when that code has run."""
        self.pid = int(self.code.read_text())

    def command(self, code):
        """What the kernel is given to run `code`. It is read whole, whatever is in it, and reads nothing."""
        self.code.write_text(code, encoding="utf-8", newline="")
        return f'eval "$(<{shlex.quote(str(self.code))})" </dev/null; __stockade_end'

    def end(self):
        """Words for how the shell ended; None: it has not."""
        if is_running(self.pid):
            return None
        try:
            return f"exit status {int(self.exit.read_text())}"
        except (OSError, ValueError):
            return "the shell was killed or replaced by another program"

    def remove(self):
        """Takes the files away."""
        shutil.rmtree(self.directory, ignore_errors=True)


def is_running(pid):
    """Whether there is such a process; one that nobody has waited for yet is none."""
    try:
        # The name in brackets may hold anything.
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return False
    return state not in ("Z", "X")
