"""The loop of an agent: a model asks for tools, the tools are a sandbox's, until the model is done."""

import json

from e2b_code_interpreter import Sandbox


def tools(sandbox):
    """What the model may ask for."""

    def python(code):
        execution = sandbox.run_code(code)
        if execution.error:
            return f"{execution.error.name}: {execution.error.value}"
        return "".join(execution.logs.stdout) + (execution.text or "")

    def shell(command):
        return sandbox.commands.run(command).stdout

    def write(path, text):
        sandbox.files.write(path, text)
        return f"wrote {path}"

    return {"python": python, "shell": shell, "write": write}


def model(messages):
    """A model's answers, from a script. It sees the results and goes on from the last one."""
    results = [message["content"] for message in messages if message["role"] == "tool"]
    script = [
        ("write", {"path": "/home/user/primes.py", "text": "def primes(n):\n    return [x for x in range(2, n) if all(x % y for y in range(2, x))]\n"}),
        ("python", {"code": "from prime import primes"}),
        # The error of the step before tells what to mend.
        ("python", {"code": "from primes import primes\nfound = primes(30)\nlen(found)"}),
        ("shell", {"command": "wc -l < /home/user/primes.py"}),
        ("python", {"code": "sum(found)"}),
    ]
    if len(results) < len(script):
        name, arguments = script[len(results)]
        return {"role": "assistant", "tool": name, "arguments": arguments}
    return {"role": "assistant", "content": f"There are {results[2]} primes below 30; their sum is {results[4]}."}


def main():
    with Sandbox.create() as sandbox:
        known, messages = tools(sandbox), [{"role": "user", "content": "How many primes are below 30, and what is their sum?"}]
        while True:
            answer = model(messages)
            messages.append(answer)
            if "tool" not in answer:
                break
            result = known[answer["tool"]](**answer["arguments"])
            messages.append({"role": "tool", "content": result.strip()})
        assert messages[4]["content"].startswith("ModuleNotFoundError"), json.dumps(messages, indent=1)
        print(messages[-1]["content"])


main()
