"""One run of code, from the request to its last line."""

import asyncio
import contextlib
import json
import logging
import re

from . import languages, memory, results
from .contexts import Ended, Lost, Unavailable

log = logging.getLogger("stockade_code")

KEEPALIVE_SECONDS = 5
# How often it is looked whether the kernel lives, while it says nothing.
LOOK_SECONDS = 1
CONTEXT_ENDED = results.error("ContextEnded", "the context was removed or restarted while code ran in it")
HALF_A_PAIR = re.compile("[\ud800-\udfff]")


class ClientGone(Exception):
    """Nobody reads any more."""


async def run(context, code, run_env, sink, is_remembered=True):
    """Runs `code` and writes what happens to `sink`. Returns when the context is free again."""
    async with Keepalive(sink):
        await context.lock.acquire()
    try:
        sink.check()
        async with Keepalive(sink):
            await context.ensure_alive()
            missing = await languages.unfinished(context.language, code)
            if missing is not None:
                await finish(sink, results.error("SyntaxError", missing))
                return
            beside, back = await context.prepare_env(run_env)
        context.oom_kills = memory.oom_kills()
        message = context.request(context.command(code), metadata=beside, is_remembered=is_remembered)
        replies = context.output.expect(message)
        output = context.output
        try:
            context.client.shell_channel.send(message)
            await relay(context, replies, sink)
            if back is not None and context.manager is not None:
                await context.run_quietly(back)
        except ClientGone:
            await context.calm(replies)
        finally:
            output.forget(replies)
    except ClientGone:
        pass
    except Ended:
        with contextlib.suppress(ClientGone):
            await finish(sink, CONTEXT_ENDED)
    except (Lost, Unavailable) as problem:
        with contextlib.suppress(ClientGone):
            await finish(sink, results.error(problem.name, str(problem)))
    finally:
        context.lock.release()


async def relay(context, replies, sink):
    """Writes what the kernel says until it has said all, or is dead."""
    manager = context.manager
    was_starved = False
    has_asked = has_told_error = False
    failure = None
    while True:
        while (message := replies.take()) is not None:
            event = results.event_of(message["header"]["msg_type"], message["content"])
            # The request that asks for the end is input too.
            if event is not None and not (has_asked and event["type"] == "number_of_executions"):
                has_told_error |= event["type"] == "error"
                await sink.write(event)
        if replies.has_failed and not has_asked:
            failure = replies.reply["content"]
        if context.has_said_all(replies) or (has_asked and replies.has_failed):
            if (end := context.shell_end()) is not None:
                await died(context, sink, "KernelDied", end)
                return
            explained = results.unexplained if languages.marks_end(context.language) else results.untold
            await finish(sink, explained(failure) if failure and not has_told_error else None)
            return
        sink.check()
        if not replies.has_failed and await replies.wait(LOOK_SECONDS):
            continue
        is_alive = await manager.is_alive()
        if context.manager is not manager:
            await finish(sink, CONTEXT_ENDED)
            return
        if not is_alive:
            await died(context, sink, *context.cause_of_death(manager))
            return
        if replies.is_done and not has_asked:
            # Failed code leaves no mark, nor does code that has broken what would have sent it.
            context.ask_for_end(replies)
            has_asked = True
            continue
        is_starved = memory.is_starved()
        if is_starved and was_starved:
            left = f"less than {memory.STARVED_BELOW_MIB} MiB of the sandbox's memory were left and nothing got on"
            await died(context, sink, "OutOfMemory", left)
            return
        was_starved = is_starved
        await sink.keep_alive()


async def died(context, sink, name, cause):
    """Says that the kernel died, or has to, and of what, then puts another one in its place."""
    value = f"the kernel died ({cause}); the state of this context is lost, the next run has a new kernel"
    await context.stop()
    await finish(sink, results.error(name, value))
    try:
        await context.start()
    except (Ended, Unavailable) as problem:
        # The next run tries again, and is told.
        log.info("context %s is without a kernel: %s", context.id, problem)


def line_of(event):
    """An event as a line. Half a surrogate pair, which Python's texts may hold and JSON's not, is shown as its escape."""
    return HALF_A_PAIR.sub(lambda half: f"\\\\u{ord(half[0]):04x}", json.dumps(event, ensure_ascii=False)) + "\n"


async def finish(sink, event=None):
    """The last lines; the client has all of them when this returns, whatever there is still to tidy up."""
    if event is not None:
        await sink.write(event)
    await sink.write({"type": "end_of_execution"})
    await sink.end()


class Keepalive:
    """Writes a sign of life every few seconds while something takes its time."""

    def __init__(self, sink):
        self.sink = sink
        self.task = None

    async def __aenter__(self):
        async def beat():
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                await self.sink.keep_alive()

        self.task = asyncio.create_task(beat())

    async def __aexit__(self, *_):
        self.task.cancel()
        try:
            await self.task
        except (asyncio.CancelledError, ClientGone):
            pass


class Sink:
    """A client's stream of lines."""

    def __init__(self, handler):
        self.handler = handler
        self.is_gone = False
        self.last = asyncio.get_running_loop().time()

    def check(self):
        """Ends the run if the client has gone."""
        if self.is_gone:
            raise ClientGone

    async def write(self, event):
        """One line, on its way when this returns: a slow client holds up its own code only."""
        self.check()
        self.handler.write(line_of(event))
        try:
            await self.handler.flush()
        except Exception as error:
            raise ClientGone from error
        self.check()
        self.last = asyncio.get_running_loop().time()

    async def end(self):
        """Nothing follows."""
        try:
            await self.handler.finish()
        except Exception as error:
            raise ClientGone from error

    async def keep_alive(self):
        """A line that says nothing, if there has been none for a while."""
        if asyncio.get_running_loop().time() - self.last >= KEEPALIVE_SECONDS:
            await self.write({"type": "keepalive"})
