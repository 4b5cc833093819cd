"""The languages there are kernels for, how environment variables are set in each, and when their output has ended.

Python kernels take variables beside the code (`kernel`): one round trip. For the others a piece of code sets
them first, and another one puts back what held for one run only.

Deno's kernel runs code in one thread and speaks Jupyter in another. What code prints, shows and returns goes from one to
the other through a queue that is emptied message by message, and the answer that the code is done goes past it: of code
that prints much, most comes after that. So the end of a run's output is marked in the queue itself.
"""

import asyncio
import json
import os
import pathlib
import shlex
import subprocess

ALIASES = {"": "python", "python3": "python", "js": "javascript", "ts": "typescript", "sh": "bash", "shell": "bash"}

# Language → name of its kernel's specification.
KERNELS = {
    "python": "python3",
    "javascript": "deno",
    "typescript": "deno",
    "bash": "bash",
    "r": "ir",
    "java": "java",
}


def canonical(language):
    """The language's one name; it need not be one we have."""
    name = (language or "").strip().lower()
    return ALIASES.get(name, name)


def shared(language):
    """The language whose default context this one uses."""
    return "javascript" if language == "typescript" else language


# What bash says of code that goes on behind its end, in which an interactive shell waits for more.
UNFINISHED = ("unexpected end of file", "unexpected EOF", "delimited by end-of-file")


async def unfinished(language, code):
    """What is missing at the end of code that the kernel would wait for; None: nothing."""
    if language != "bash":
        return None
    shell = await asyncio.create_subprocess_exec(
        "bash", "-O", "extglob", "-n", stdin=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "LC_ALL": "C"}
    )
    _, said = await shell.communicate(code.encode(errors="replace"))
    lines = said.decode(errors="replace").splitlines()
    return next((line.removeprefix("bash: ") for line in lines if any(words in line for words in UNFINISHED)), None)


def takes_env_beside_code(language):
    """Whether the kernel takes variables with the request."""
    return language == "python"


def heeds_interrupts(language):
    """Whether the kernel has a way to end a run and keep its state; Deno's has none."""
    return KERNELS.get(language) != "deno"


# The type of the message behind the last output of a run, as in deno.js. It holds the run's number.
OUTPUT_END = "stockade_output_end"


def marks_end(language):
    """Whether it takes an OUTPUT_END to tell that there is no more output; other kernels send it before they are idle."""
    return KERNELS.get(language) == "deno"


def mark_end(execution_count):
    """Code that sends the mark behind all output there has been."""
    return f'globalThis[Symbol.for("{OUTPUT_END}")]({execution_count});'


def setup(language):
    """Code to run once in a new kernel; None: none is needed."""
    if KERNELS.get(language) != "deno":
        return None
    return pathlib.Path(__file__).with_name("deno.js").read_text()


def set_env(language, values):
    """Code that sets variables; None: the language has no way to. A value of None removes the variable."""
    if not values:
        return None
    if KERNELS.get(language) == "deno":
        lines = [
            f"Deno.env.delete({json.dumps(name)});" if value is None
            else f"Deno.env.set({json.dumps(name)}, {json.dumps(value)});"
            for name, value in values.items()
        ]
        return "\n".join([*lines, "undefined;"])
    if language == "bash":
        return "\n".join(
            f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
            for name, value in values.items()
            if name.isidentifier()
        )
    if language == "r":
        return "\n".join(
            f"Sys.unsetenv({json.dumps(name)})" if value is None
            # R reads JSON's escapes but for the one of the solidus, which json.dumps does not write.
            else f"invisible(do.call(Sys.setenv, setNames(list({json.dumps(value, ensure_ascii=False)}), "
            f"{json.dumps(name, ensure_ascii=False)})))"
            for name, value in values.items()
        )
    return None
