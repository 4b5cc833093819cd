"""What a kernel sends, sorted by the request it answers.

The output channel is read all the time: the kernel's socket drops what is not. Where a client reads more slowly
than its code writes, the kernel is halted until the client has caught up.
"""

import asyncio
import collections
import logging
import os
import signal

import zmq

from . import languages

log = logging.getLogger("stockade_code")

# Output nobody has read yet, in bytes: above the first the kernel is halted, below the second it goes on.
HALT_ABOVE = 16 << 20
GO_ON_BELOW = 4 << 20


class Replies:
    """Messages about a run, in order: about one request, and those sent after it for the run's sake."""

    def __init__(self, owner):
        self.owner = owner
        self.messages = collections.deque()
        self.arrived = asyncio.Event()
        self.is_idle = False
        self.reply = None
        self.end = None
        self.bytes = 0

    def put(self, message, size):
        self.messages.append((message, size))
        self.bytes += size
        self.arrived.set()

    def take(self):
        """The next message, or None if there is none yet."""
        if not self.messages:
            return None
        message, size = self.messages.popleft()
        self.bytes -= size
        self.owner.balance()
        return message

    @property
    def is_done(self):
        """Whether the kernel has said all about it."""
        return self.is_idle and self.reply is not None

    @property
    def has_failed(self):
        """Whether the kernel has said that it could not be done."""
        return self.is_done and self.reply["content"].get("status") == "error"

    @property
    def execution_count(self):
        """The run's number, once there is a reply."""
        return self.reply["content"].get("execution_count")

    @property
    def is_at_end(self):
        """Whether the mark behind its output has come, and the kernel is done with it."""
        return self.is_done and self.end == {"execution_count": self.execution_count}

    async def wait(self, timeout):
        """Until something arrives; True if it did."""
        try:
            await asyncio.wait_for(self.arrived.wait(), timeout)
        except asyncio.TimeoutError:
            return False
        self.arrived.clear()
        return True

    async def idle_and_reply(self):
        """Until the kernel is done with it; output is thrown away."""
        while not self.is_done:
            while self.take() is not None:
                pass
            await self.wait(None)


class Output:
    """Reads a kernel's channels."""

    def __init__(self, client, manager):
        self.client = client
        self.manager = manager
        self.expected = {}
        self.is_halted = False
        # No limit of its own: `balance` has one that loses nothing.
        client.iopub_channel.socket.setsockopt(zmq.RCVHWM, 0)
        self.tasks = [
            asyncio.create_task(self._read(client.iopub_channel, self._from_iopub)),
            asyncio.create_task(self._read(client.shell_channel, self._from_shell)),
        ]

    def expect(self, message, replies=None):
        """Where messages about this request will be; with those of an earlier one, if these are given."""
        replies = replies or Replies(self)
        replies.reply = None
        self.expected[message["header"]["msg_id"]] = replies
        return replies

    def forget(self, replies):
        """No longer keeps them."""
        self.expected = {identifier: kept for identifier, kept in self.expected.items() if kept is not replies}
        self.balance()

    def close(self):
        """Stops reading."""
        for task in self.tasks:
            task.cancel()

    async def _read(self, channel, take):
        while True:
            try:
                frames = await channel.socket.recv_multipart()
                _, parts = self.client.session.feed_identities(frames)
                message = self.client.session.deserialize(parts)
            except asyncio.CancelledError:
                raise
            except zmq.ZMQError:
                return
            except Exception:
                log.exception("a message of a kernel was not understood")
                continue
            replies = self.expected.get(message["parent_header"].get("msg_id"))
            if replies is not None:
                take(replies, message, sum(len(frame) for frame in frames))

    def _from_shell(self, replies, message, _size):
        replies.reply = message
        replies.arrived.set()

    def _from_iopub(self, replies, message, size):
        if message["header"]["msg_type"] == "status":
            replies.is_idle = message["content"]["execution_state"] == "idle"
            replies.arrived.set()
        elif message["header"]["msg_type"] == languages.OUTPUT_END:
            replies.end = message["content"]
            replies.arrived.set()
        else:
            replies.put(message, size)
            self.balance()

    def balance(self):
        """Halts the kernel or lets it go on, by how much is waiting."""
        waiting = sum(replies.bytes for replies in set(self.expected.values()))
        if not self.is_halted and waiting > HALT_ABOVE:
            self._signal(signal.SIGSTOP)
            self.is_halted = True
        elif self.is_halted and waiting < GO_ON_BELOW:
            self._signal(signal.SIGCONT)
            self.is_halted = False

    def _signal(self, number):
        pid = getattr(self.manager.provisioner, "pid", None)
        if pid:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
