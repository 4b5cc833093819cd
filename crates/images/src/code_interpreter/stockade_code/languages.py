"""The languages there are kernels for, and how environment variables are set in each.

Python kernels take variables beside the code (`kernel`): one round trip. For the others a piece of code sets
them first, and another one puts back what held for one run only.
"""

import json
import shlex

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


def takes_env_beside_code(language):
    """Whether the kernel takes variables with the request."""
    return language == "python"


def heeds_interrupts(language):
    """Whether the kernel has a way to end a run and keep its state; Deno's has none."""
    return KERNELS.get(language) != "deno"


def setup(language):
    """Code to run once in a new kernel; None: none is needed."""
    if KERNELS.get(language) != "deno":
        return None
    # A promise left as the value of a cell is awaited before it is shown.
    return """
Object.defineProperty(Promise.prototype, Symbol.for("Jupyter.display"), {
  configurable: true,
  async value() {
    const value = await this;
    const own = value?.[Symbol.for("Jupyter.display")];
    if (typeof own === "function") return await own.call(value);
    if (value === undefined) return {};
    return { "text/plain": typeof value === "string" ? value : Deno.inspect(value, { colors: false }) };
  },
});
undefined;
"""


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
