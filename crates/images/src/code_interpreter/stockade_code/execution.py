"""One run of code, from the request to its last line."""

import asyncio
import json

from . import results
from .contexts import Unavailable

KEEPALIVE_SECONDS = 5
# How often it is looked whether the kernel lives, while it says nothing.
LOOK_SECONDS = 1


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
            beside, back = await context.prepare_env(run_env)
        killed = oom_kills()
        message = context.request(code, metadata=beside, is_remembered=is_remembered)
        replies = context.output.expect(message)
        output = context.output
        try:
            context.client.shell_channel.send(message)
            await relay(context, replies, sink, killed)
            if back is not None and context.manager is not None:
                await context.run_quietly(back)
        except ClientGone:
            await context.calm(replies)
        finally:
            output.forget(message)
    except ClientGone:
        pass
    except Unavailable as problem:
        await finish(sink, results.error("Unavailable", str(problem)))
    finally:
        context.lock.release()


async def relay(context, replies, sink, killed):
    """Writes what the kernel says until it is done, or dead."""
    manager = context.manager
    while True:
        while (message := replies.take()) is not None:
            event = results.event_of(message["header"]["msg_type"], message["content"])
            if event is not None:
                await sink.write(event)
        if replies.is_done:
            await finish(sink)
            return
        sink.check()
        if await replies.wait(LOOK_SECONDS):
            continue
        if context.manager is not manager:
            await finish(sink, results.error("ContextEnded", "the context was removed or restarted while code ran in it"))
            return
        if not await manager.is_alive():
            await died(context, sink, oom_kills() > killed)
            return
        await sink.keep_alive()


async def died(context, sink, is_out_of_memory):
    """Says that the kernel died and of what, then starts another one."""
    status = getattr(getattr(context.manager.provisioner, "process", None), "returncode", None)
    if is_out_of_memory:
        name, cause = "OutOfMemory", "the guest's kernel killed it, it was out of memory"
    else:
        name, cause = "KernelDied", how(status)
    value = f"the kernel died ({cause}); the state of this context is lost, the next run has a new kernel"
    await finish(sink, results.error(name, value))
    await context.replace()


def how(status):
    """How a process ended, for people."""
    if status is None:
        return "its exit status is not known"
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def oom_kills():
    """How often the guest's kernel has killed something for lack of memory."""
    try:
        with open("/proc/vmstat", encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0


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
        self.handler.write(json.dumps(event) + "\n")
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
