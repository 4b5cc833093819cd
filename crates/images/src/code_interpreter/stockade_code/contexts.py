"""Contexts: each one kernel with a language, a directory and a state of its own.

    starting --> ready <--> running         one run at a time, in the order they came
                   ^           |
                   |           +-- client gone or its time up: interrupt --> ready
                   +-- restart +-- kernel died, or does not heed the interrupt

A kernel that died, whatever the reason, is replaced; its state is lost, which the run that saw it die is told, or
the next one, which does not run: what it was meant to go on with is not there.
"""

import asyncio
import collections
import logging
import os
import uuid

from jupyter_client import AsyncKernelManager

from . import languages, memory
from .bash import Shell
from .identity import Identity
from .output import Output

log = logging.getLogger("stockade_code")

# How long a kernel may take until it answers. Java's needs a minute on an emulated processor nobody else uses.
START_PATIENCE = 600
# How long an interrupt may take to be heeded, and how often it is sent before the kernel is replaced. On a busy host an
# emulated kernel was seen to need more than fifteen seconds in all.
INTERRUPT_PATIENCE = 15
INTERRUPTS = 3
MOST_CONTEXTS = 64


class Unavailable(Exception):
    """A context that cannot be had; the text is for the client."""

    name = "Unavailable"


class Lost(Exception):
    """A context whose kernel died since its last run; name and text are for the client."""

    def __init__(self, name, cause):
        super().__init__(
            f"the kernel died since the last run ({cause}); the state of this context is lost, this code was not run"
        )
        self.name = name


class Ended(Exception):
    """A context that was removed, or restarted, while code ran or waited in it."""


class Context:
    """One kernel. All but `run`'s caller go through `lock`."""

    def __init__(self, identifier, language, cwd, identity):
        self.id = identifier
        self.language = language
        self.cwd = cwd
        self.lock = asyncio.Lock()
        self.identity = identity
        self.sandbox_env = {}
        self.manager = None
        self.client = None
        self.output = None
        self.shell = None
        self.is_removed = False
        # How often the guest had been out of memory when the kernel was last seen alive.
        self.oom_kills = memory.oom_kills()

    def view(self):
        """As clients see it."""
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    async def start(self):
        """Starts the kernel; returns when it takes code."""
        if not os.path.isdir(self.cwd):
            wrong = "is not a directory" if os.path.exists(self.cwd) else "does not exist"
            raise Unavailable(f"cwd '{self.cwd}' {wrong}")
        left = memory.available_mib()
        if left < memory.KERNEL_NEEDS_MIB:
            raise Unavailable(
                f"{left} MiB of the sandbox's memory are left, and a kernel needs {memory.KERNEL_NEEDS_MIB}; "
                "remove a context, or use a template with more memory"
            )
        self.manager = AsyncKernelManager(kernel_name=languages.KERNELS[self.language])
        self.sandbox_env = dict(self.identity.env())
        await self.manager.start_kernel(cwd=self.cwd, env={**os.environ, **self.sandbox_env})
        self.client = self.manager.client()
        self.client.start_channels(shell=True, iopub=True, stdin=False, hb=False, control=True)
        self.output = Output(self.client, self.manager)
        try:
            await self.wait_until_ready()
            self.shell = Shell() if self.language == "bash" else None
            code = self.shell.setup() if self.shell else languages.setup(self.language)
            if code is not None:
                await self.run_quietly(code)
            if self.shell is not None:
                self.shell.is_set_up()
        except BaseException:
            await self.stop()
            raise

    async def wait_until_ready(self):
        """Until the kernel has answered on both channels: before that its output would be lost."""
        deadline = asyncio.get_running_loop().time() + START_PATIENCE
        while asyncio.get_running_loop().time() < deadline:
            if self.client is None:
                raise Ended
            message = self.client.session.msg("kernel_info_request", {})
            replies = self.output.expect(message)
            self.client.shell_channel.send(message)
            try:
                await asyncio.wait_for(replies.idle_and_reply(), 10)
                return
            except asyncio.TimeoutError:
                if not await self.manager.is_alive():
                    break
            finally:
                self.output.forget(replies)
        raise Unavailable(f"the {self.language} kernel did not start")

    async def stop(self):
        """Ends the kernel and all it started. A run in it sees that it is another's first, then that it has ended."""
        manager, client, output = self.manager, self.client, self.output
        self.manager = self.client = self.output = None
        shell, self.shell = self.shell, None
        if shell is not None:
            shell.remove()
        if output is not None:
            output.close()
        if client is not None:
            client.stop_channels()
        if manager is not None and manager.has_kernel:
            await manager.shutdown_kernel(now=True)

    async def replace(self):
        """A new kernel in place of the one there is."""
        await self.stop()
        await self.start()

    async def ensure_alive(self):
        """Replaces a kernel that has died since the last run; `Lost` if nobody was told yet."""
        if self.is_removed:
            raise Ended
        manager = self.manager
        if manager is not None and await manager.is_alive():
            return
        log.info("kernel of context %s is replaced", self.id)
        cause = None if manager is None else self.cause_of_death(manager)
        await self.replace()
        if cause is not None:
            raise Lost(*cause)

    def cause_of_death(self, manager):
        """A name and words for what a kernel died of."""
        killed = memory.oom_kills()
        is_out_of_memory, self.oom_kills = killed > self.oom_kills, killed
        if is_out_of_memory:
            return "OutOfMemory", "the guest's kernel killed it, it was out of memory"
        status = getattr(getattr(manager.provisioner, "process", None), "returncode", None)
        return "KernelDied", how(status)

    def shell_end(self):
        """Words for how the shell of a kernel ended that goes on with another one; None: it has not."""
        return self.shell.end() if self.shell is not None else None

    def command(self, code):
        """What the kernel is given to run `code`."""
        return self.shell.command(code) if self.shell is not None else code

    async def run_quietly(self, code):
        """Runs code of ours to its end; what it prints goes nowhere."""
        message = self.request(code, silent=True)
        replies = self.output.expect(message)
        try:
            self.client.shell_channel.send(message)
            await asyncio.wait_for(replies.idle_and_reply(), START_PATIENCE)
        finally:
            self.output.forget(replies)

    def has_said_all(self, replies):
        """Whether the kernel is done with a run and all its output is here."""
        return replies.is_at_end if languages.marks_end(self.language) else replies.is_done

    def ask_for_end(self, replies):
        """Has the kernel mark where a run's output ends; what it still sends is the run's."""
        message = self.request(languages.mark_end(replies.execution_count), silent=True)
        self.output.expect(message, replies)
        self.client.shell_channel.send(message)

    def request(self, code, silent=False, metadata=None, is_remembered=True):
        """A request to run code; what is not remembered is neither counted nor in the history."""
        content = {
            "code": code,
            "silent": silent,
            "store_history": is_remembered and not silent,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": True,
        }
        return self.client.session.msg("execute_request", content, metadata=metadata)

    async def prepare_env(self, run_env):
        """Sets variables. Returns what goes beside the code, and the code that puts things back."""
        wanted = self.identity.env()
        changed = {name: value for name, value in wanted.items() if self.sandbox_env.get(name) != value}
        if languages.takes_env_beside_code(self.language):
            self.sandbox_env = dict(wanted)
            return {"sandbox_env": changed, "run_env": run_env}, None
        code = languages.set_env(self.language, {**changed, **run_env})
        if code is not None:
            await self.run_quietly(code)
        elif run_env:
            raise Unavailable(f"env_vars cannot be set in a running {self.language} kernel; set them in the code")
        self.sandbox_env = dict(wanted)
        back = {name: wanted.get(name) for name in run_env}
        return {}, languages.set_env(self.language, back)

    async def calm(self, replies):
        """Ends a run that nobody waits for any more; the kernel keeps its state if it heeds an interrupt."""
        for _ in range(INTERRUPTS if languages.heeds_interrupts(self.language) else 0):
            if self.manager is None or not await self.manager.is_alive():
                # The next run has a new one.
                return
            try:
                await self.manager.interrupt_kernel()
                await asyncio.wait_for(replies.idle_and_reply(), INTERRUPT_PATIENCE)
                return
            except asyncio.TimeoutError:
                continue
            except Exception:
                log.exception("interrupt of context %s failed", self.id)
                break
        log.warning("the kernel of context %s does not heed interrupts; it is replaced", self.id)
        await self.replace()


def how(status):
    """How a process ended, for people."""
    if status is None:
        return "its exit status is not known"
    return f"signal {-status}" if status < 0 else f"exit status {status}"


class Contexts:
    """All contexts of this guest. The default ones have their kernels from the start."""

    def __init__(self, cwd):
        self.cwd = cwd
        self.identity = Identity()
        self.identity.ask()
        self.by_id = {}
        self.defaults = {}
        # By language: a kernel that takes a minute to start holds up nobody else.
        self.making = collections.defaultdict(asyncio.Lock)
        self.are_warm = False

    async def warm_up(self, python_code):
        """Makes the default contexts; code is run in Python's before anybody else's is."""
        async with self.making["python"]:
            python = await self._make("python", self.cwd)
            await python.run_quietly(python_code)
            self.defaults["python"] = python
        await self.default("javascript")
        self.are_warm = True

    def list(self):
        """All there are."""
        return list(self.by_id.values())

    def get(self, identifier):
        """One by its id, or None."""
        return self.by_id.get(identifier)

    async def default(self, language):
        """The context of those who name none; made on first use."""
        language = self.known(language)
        slot = languages.shared(language)
        async with self.making[slot]:
            if slot not in self.defaults:
                self.defaults[slot] = await self._make(slot, self.cwd)
            return self.defaults[slot]

    async def create(self, language, cwd):
        """A new one."""
        return await self._make(self.known(language), cwd or self.cwd)

    async def _make(self, language, cwd):
        if len(self.by_id) >= MOST_CONTEXTS:
            raise Unavailable(f"there are {MOST_CONTEXTS} contexts; remove one first")
        context = Context(str(uuid.uuid4()), language, cwd, self.identity)
        await context.start()
        self.by_id[context.id] = context
        return context

    async def remove(self, context):
        """Ends it; a run in it ends with an error."""
        self.by_id.pop(context.id, None)
        for language, default in list(self.defaults.items()):
            if default is context:
                del self.defaults[language]
        context.is_removed = True
        await context.stop()

    @staticmethod
    def known(language):
        """The language's name, if there is a kernel for it."""
        name = languages.canonical(language)
        if name not in languages.KERNELS:
            known = ", ".join(sorted(languages.KERNELS))
            raise Unavailable(f"language '{language}' is not available; there are {known}")
        return name
