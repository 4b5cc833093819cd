"""AsyncSandbox: the same server through the other client."""

import asyncio

import pytest
from e2b import AsyncSandbox, CommandExitException, PtySize


def test_a_whole_life(server):
    async def story():
        sandbox = await AsyncSandbox.create(timeout=120, metadata={"kind": "async"})
        try:
            assert (await sandbox.commands.run("echo hi")).stdout == "hi\n"
            with pytest.raises(CommandExitException):
                await sandbox.commands.run("exit 2")
            out = []
            await sandbox.commands.run("echo a; sleep 0.2; echo b", on_stdout=out.append)
            assert out == ["a\n", "b\n"]
            await sandbox.files.write("/tmp/async-file", b"\x00\x01")
            assert bytes(await sandbox.files.read("/tmp/async-file", format="bytes")) == b"\x00\x01"
            stream = await sandbox.files.read("/tmp/async-file", format="stream")
            assert b"".join([chunk async for chunk in stream]) == b"\x00\x01"
            assert (await sandbox.get_info()).metadata == {"kind": "async"}
            assert await sandbox.is_running()
            again = await AsyncSandbox.connect(sandbox.sandbox_id)
            assert (await again.commands.run("cat /tmp/async-file | wc -c")).stdout.strip() == "2"
        finally:
            assert await sandbox.kill()

    asyncio.run(story())


def test_terminals(server):
    async def story():
        sandbox = await AsyncSandbox.create(timeout=120)
        try:
            seen = bytearray()
            handle = await sandbox.pty.create(PtySize(rows=24, cols=80), on_data=seen.extend)
            await sandbox.pty.resize(handle.pid, PtySize(rows=50, cols=90))
            await sandbox.pty.send_stdin(handle.pid, b"stty size; exit\n")
            await handle.wait()
            assert b"50 90" in seen
        finally:
            await sandbox.kill()

    asyncio.run(story())


def test_many_commands_share_one_connection(server):
    async def story():
        sandbox = await AsyncSandbox.create(timeout=300)
        try:
            runs = [sandbox.commands.run(f"sleep 0.2; echo {n}", timeout=300) for n in range(50)]
            results = await asyncio.gather(*runs)
            assert [result.stdout for result in results] == [f"{n}\n" for n in range(50)]
        finally:
            await sandbox.kill()

    asyncio.run(story())
