"""The HTTP service.

    GET    /health                   "OK" once the default kernel takes code
    POST   /execute                  {code, context_id?, language?, env_vars?} -> one JSON object a line
    GET    /contexts                 [{id, language, cwd}]
    POST   /contexts                 {language?, cwd?} -> {id, language, cwd}
    POST   /contexts/{id}/restart
    DELETE /contexts/{id}
    POST   /rehearsal                goes through what a first run goes through; nothing of it is left

Lines have a `type`: number_of_executions, stdout, stderr, result, error, keepalive, and end_of_execution last.
"""

import argparse
import asyncio
import json
import logging
import sys

import tornado.httpserver
import tornado.web

from . import execution
from .contexts import Contexts, Unavailable

MAX_BODY_BYTES = 64 << 20
# What agents use most is part of the template's memory, and fonts are looked up before anyone waits.
WARM_UP = """
import e2b_charts, matplotlib.pyplot as _plot, numpy, pandas
_figure = _plot.figure()
_figure.gca().bar(["a"], [1])
get_ipython().display_formatter.format(_figure)
get_ipython().display_formatter.format(pandas.DataFrame({"a": [1]}))
_plot.close("all")
del _plot, _figure, e2b_charts, numpy, pandas
"""


# Shown, but neither counted nor kept as `_`.
REHEARSED = "display(1 + 1)"


class Handler(tornado.web.RequestHandler):
    """What all routes share: JSON in, text errors out."""

    def initialize(self, contexts):
        self.contexts = contexts

    def refuse(self, status, text):
        self.set_status(status)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(text)

    def body(self, *fields):
        """The request's object, which has no other fields, empty if there is none; None after a refusal."""
        try:
            body = json.loads(self.request.body or b"{}")
        except ValueError as error:
            self.refuse(400, f"the body is not JSON: {error}")
            return None
        if not isinstance(body, dict):
            self.refuse(400, "the body is not an object")
            return None
        unknown = next((name for name in body if name not in fields), None)
        if unknown is not None:
            expected = f"expected one of {', '.join(fields)}" if fields else "no field is expected here"
            self.refuse(400, f"unknown field {unknown!r}, {expected}")
            return None
        return body

    def text(self, body, name):
        """A field that is a text or absent."""
        value = body.get(name)
        if value is not None and not isinstance(value, str):
            raise tornado.web.HTTPError(400, reason=f"{name} is not a text")
        return value

    def finish_json(self, value):
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps(value))

    def write_error(self, status_code, **_kwargs):
        self.refuse(status_code, self._reason)


class Health(Handler):
    def get(self):
        if not self.contexts.are_warm:
            return self.refuse(503, "the first kernels are starting")
        self.finish_json("OK")


class Execute(Handler):
    sink = None

    async def post(self):
        body = self.body("code", "context_id", "language", "env_vars")
        if body is None:
            return
        code, identifier, language = (self.text(body, name) for name in ("code", "context_id", "language"))
        env = {} if body.get("env_vars") is None else body["env_vars"]
        if code is None:
            return self.refuse(400, "code is missing")
        if execution.HALF_A_PAIR.search(code):
            return self.refuse(400, "code has half a surrogate pair in it, which is no character")
        if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
            return self.refuse(400, "env_vars is not an object of texts")
        if any(not name or "=" in name or "\0" in name + value for name, value in env.items()):
            return self.refuse(400, "env_vars has a name that is empty or contains '=', or a NUL")
        if identifier and language:
            return self.refuse(400, "Only one of context_id or language can be provided")
        self.sink = execution.Sink(self)
        try:
            context = self.contexts.get(identifier) if identifier else await self.contexts.default(language)
        except Unavailable as problem:
            return self.refuse(400, str(problem))
        if context is None:
            return self.refuse(404, f"Context {identifier} not found")
        self.set_header("Content-Type", "application/x-ndjson")
        await execution.run(context, code, env, self.sink)

    def on_connection_close(self):
        if self.sink is not None:
            self.sink.is_gone = True


class Rehearsal(Handler):
    async def post(self):
        context = await self.contexts.default("python")
        await execution.run(context, REHEARSED, {}, execution.Sink(self), is_remembered=False)


class ContextList(Handler):
    def get(self):
        self.finish_json([context.view() for context in self.contexts.list()])

    async def post(self):
        body = self.body("language", "cwd")
        if body is None:
            return
        try:
            context = await self.contexts.create(self.text(body, "language"), self.text(body, "cwd"))
        except Unavailable as problem:
            return self.refuse(500, str(problem))
        self.finish_json(context.view())


class One(Handler):
    def context(self, identifier):
        context = self.contexts.get(identifier)
        if context is None:
            self.refuse(404, f"Context {identifier} not found")
        return context

    async def delete(self, identifier):
        context = self.context(identifier)
        if context is not None:
            await self.contexts.remove(context)
            self.finish("")


class Restart(One):
    async def post(self, identifier):
        if self.body() is None:
            return
        context = self.context(identifier)
        if context is None:
            return
        # Whatever runs in it ends first: its kernel goes.
        await context.stop()
        async with context.lock:
            if context.manager is None:
                try:
                    await context.start()
                except Unavailable as problem:
                    return self.refuse(500, str(problem))
        self.finish("")


async def serve(port, cwd):
    """Takes requests, which wait for the default kernels if these are not there yet."""
    contexts = Contexts(cwd)
    arguments = {"contexts": contexts}
    application = tornado.web.Application(
        [
            (r"/health", Health, arguments),
            (r"/execute", Execute, arguments),
            (r"/rehearsal", Rehearsal, arguments),
            (r"/contexts", ContextList, arguments),
            (r"/contexts/([^/]+)", One, arguments),
            (r"/contexts/([^/]+)/restart", Restart, arguments),
        ]
    )
    server = tornado.httpserver.HTTPServer(application, max_body_size=MAX_BODY_BYTES, max_buffer_size=2 * MAX_BODY_BYTES)
    server.listen(port, "127.0.0.1")
    await contexts.warm_up(WARM_UP)
    await asyncio.Event().wait()


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    parser = argparse.ArgumentParser(prog="stockade_code", description="Runs code in Jupyter kernels.")
    parser.add_argument("--port", type=int, default=49999)
    parser.add_argument("--cwd", default="/home/user", help="directory of contexts that name none")
    options = parser.parse_args()
    asyncio.run(serve(options.port, options.cwd))
