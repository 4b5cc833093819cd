"""One sample of E2B's SDK for each line on standard input: from the call for a sandbox to the answer of its first command
(`command`) or of its first code (`code`), in milliseconds. What it says is one JSON object a line."""

import importlib.metadata
import json
import sys
import time


def command():
    from e2b import Sandbox

    begin = time.perf_counter()
    sandbox = Sandbox.create(timeout=600)
    answer = sandbox.commands.run("echo ready").stdout
    return begin, time.perf_counter(), sandbox, answer == "ready\n"


def code():
    from e2b_code_interpreter import Sandbox

    begin = time.perf_counter()
    sandbox = Sandbox.create(timeout=600)
    created = time.perf_counter()
    answer = sandbox.run_code("1+1", timeout=300, request_timeout=300).text
    return (begin, created), time.perf_counter(), sandbox, answer == "2"


def release(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def say(**what):
    print(json.dumps(what), flush=True)


say(e2b=release("e2b"), code_interpreter=release("e2b-code-interpreter"))
for line in sys.stdin:
    try:
        begin, end, sandbox, right = {"command": command, "code": code}[line.strip()]()
        sandbox.kill()
        begins = begin if isinstance(begin, tuple) else (begin,)
        say(ms=[(end - begin) * 1000 for begin in begins], error=None if right else "the answer is wrong")
    except Exception as error:  # The sample failed; the next one may not.
        say(ms=[], error=f"{type(error).__name__}: {error}")
