"""What a kernel reports, as lines of our protocol."""

import time

FIELDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}


def event_of(kind, content):
    """The line for a message on the kernel's output channel; None for those that say nothing."""
    if kind == "stream":
        return {"type": content["name"], "text": content["text"], "timestamp": time.time_ns()}
    if kind in ("execute_result", "display_data"):
        return {"type": "result", "is_main_result": kind == "execute_result", **fields_of(content["data"])}
    if kind == "execute_input":
        return {"type": "number_of_executions", "execution_count": content["execution_count"]}
    if kind == "error":
        # The bash kernel names none: its value is the exit status.
        return error(content["ename"] or "Error", content["evalue"], "\n".join(content["traceback"]))
    return None


def error(name, value, traceback=""):
    """The line that says what went wrong."""
    return {"type": "error", "name": name, "value": value, "traceback": traceback}


def untold(reply):
    """The line for code whose failure stands in the kernel's answer alone."""
    return error(reply.get("ename") or "Error", reply.get("evalue") or "", "\n".join(reply.get("traceback") or []))


def unexplained(reply):
    """The line for code that failed without a word, as Deno's does if it was not even begun."""
    cause = "the kernel does not say why; code that does not parse and packages that cannot be had end like this"
    return error(reply.get("ename") or "Error", f"{reply.get('evalue') or 'failed'}: {cause}")


def fields_of(bundle):
    """A bundle of representations by our names; those without one go into `extra`."""
    fields, extra = {}, {}
    for mime, value in bundle.items():
        # Older kernels send text as a list of lines.
        if isinstance(value, list) and all(isinstance(line, str) for line in value) and mime.startswith("text/"):
            value = "".join(value)
        if mime == "text/plain":
            value = unquoted(value)
        if mime in FIELDS:
            fields[FIELDS[mime]] = value
        else:
            extra[mime] = value
    if extra:
        fields["extra"] = extra
    return fields


def unquoted(text):
    """A string's representation without the quotes around it."""
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text
