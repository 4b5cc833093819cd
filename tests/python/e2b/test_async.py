"""AsyncSandbox: the same server through the other client."""

import asyncio
import json
import uuid

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


def lives_in(story, **options):
    """Runs a story about one sandbox."""

    async def whole():
        sandbox = await AsyncSandbox.create(**{"timeout": 300, **options})
        try:
            await story(sandbox)
        finally:
            await sandbox.kill()

    asyncio.run(whole())


def test_processes_are_listed_joined_fed_and_ended(server):
    async def story(sandbox):
        commands = sandbox.commands
        handle = await commands.run("cat; exit 3", background=True, stdin=True)
        assert handle.pid in [process.pid for process in await commands.list()]
        joined = await commands.connect(handle.pid)
        await commands.send_stdin(handle.pid, "one ")
        await handle.send_stdin("two")
        await commands.close_stdin(handle.pid)
        for one in (handle, joined):
            with pytest.raises(CommandExitException) as ended:
                await one.wait()
            assert (ended.value.stdout, ended.value.exit_code) == ("one two", 3)
        long = [await commands.run("sleep 1000", background=True) for _ in range(2)]
        assert await commands.kill(long[0].pid)
        with pytest.raises(CommandExitException):
            await long[0].wait()
        assert not await commands.kill(long[0].pid)
        await long[1].disconnect()
        assert await long[1].kill()

    lives_in(story)


@pytest.mark.current
def test_input_is_streamed(server):
    async def story(sandbox):
        handle = await sandbox.commands.run("cat", background=True, stdin=True)
        async with sandbox.commands.stream_input(handle.pid) as stream:
            for piece in ("a", "b", "c"):
                await stream.send(piece)
        await sandbox.commands.close_stdin(handle.pid)
        assert (await handle.wait()).stdout == "abc"
        seen = bytearray()
        terminal = await sandbox.pty.create(PtySize(rows=24, cols=80), on_data=seen.extend)
        async with sandbox.pty.stream_input(terminal.pid) as stream:
            await stream.send("echo strea")
            await stream.send("med; exit\n")
        await terminal.wait()
        assert b"streamed" in seen

    lives_in(story)


def test_terminals_are_joined_and_ended(server):
    async def story(sandbox):
        terminal = await sandbox.pty.create(PtySize(rows=24, cols=80), on_data=lambda _: None)
        seen, said = bytearray(), asyncio.Event()

        def take(data):
            seen.extend(data)
            if b"joined-2" in seen:
                said.set()

        joined = await sandbox.pty.connect(terminal.pid, on_data=take)
        await sandbox.pty.send_stdin(terminal.pid, b"echo joined-$((1 + 1))\n")
        await asyncio.wait_for(said.wait(), 60)
        assert await sandbox.pty.kill(terminal.pid)
        with pytest.raises(CommandExitException):
            await joined.wait()
        assert not await sandbox.pty.kill(terminal.pid)

    lives_in(story)


def test_files_and_directories(server):
    async def story(sandbox):
        files, root = sandbox.files, "/tmp/async-files"
        assert await files.make_dir(root)
        assert not await files.make_dir(root)
        written = await files.write_files([{"path": f"{root}/{name}", "data": name} for name in "ab"])
        assert [entry.name for entry in written] == ["a", "b"]
        assert [entry.name for entry in await files.list(root)] == ["a", "b"]
        assert (await files.rename(f"{root}/a", f"{root}/c")).path == f"{root}/c"
        assert not await files.exists(f"{root}/a") and await files.exists(f"{root}/c")
        assert (await files.get_info(f"{root}/c")).size == 1
        await files.remove(root)
        assert not await files.exists(root)

    lives_in(story)


def test_pause_fork_and_snapshots(server):
    async def story(sandbox):
        await sandbox.files.write("/tmp/state", "here")
        assert await sandbox.pause()
        assert await AsyncSandbox.beta_pause(sandbox.sandbox_id) is False
        await sandbox.connect(timeout=300)
        (child,) = await sandbox.fork(count=1)
        assert await child.files.read("/tmp/state") == "here"
        await child.kill()
        snapshot = await sandbox.create_snapshot()
        listed = await AsyncSandbox.list_snapshots(sandbox_id=sandbox.sandbox_id).next_items()
        assert snapshot.snapshot_id in [known.snapshot_id for known in listed]
        other = await AsyncSandbox.create(snapshot.snapshot_id, timeout=300)
        assert await other.files.read("/tmp/state") == "here"
        await other.kill()
        assert await AsyncSandbox.delete_snapshot(snapshot.snapshot_id)
        assert not await AsyncSandbox.delete_snapshot(snapshot.snapshot_id)

    lives_in(story)


def test_what_is_known_of_a_sandbox(server, edge):
    async def story(sandbox):
        mine = await AsyncSandbox.list().next_items()
        assert sandbox.sandbox_id in [info.sandbox_id for info in mine]
        before = (await sandbox.get_info()).end_at
        await sandbox.set_timeout(600)
        assert (await sandbox.get_info()).end_at > before
        assert await sandbox.get_metrics()
        assert sandbox.get_host(8000).startswith(f"8000-{sandbox.sandbox_id}.")
        await sandbox.files.write("/tmp/signed", "signed")
        url = sandbox.download_url("/tmp/signed")
        assert edge.get_url(url).text == "signed"
        assert "signature=" in sandbox.upload_url("/tmp/up")

    lives_in(story)


def test_a_network_is_changed(server):
    async def story(sandbox):
        await sandbox.update_network({"deny_out": ["8.8.8.8"]})
        assert (await sandbox.get_info()).network["deny_out"] == ["8.8.8.8"]

    lives_in(story)


@pytest.mark.machine
def test_a_template(server):
    from e2b import AsyncTemplate

    async def story():
        name = f"async-{uuid.uuid4().hex[:12]}"
        assert not await AsyncTemplate.alias_exists(name)
        log = []
        options = {"on_build_logs": log.append, "skip_cache": True}
        template = AsyncTemplate().skip_cache().from_base_image().run_cmd("echo built > /home/user/made.txt")
        await AsyncTemplate.build(template, f"{name}:default", tags=["first"], **options)
        assert any("echo built" in entry.message for entry in log)
        assert await AsyncTemplate.alias_exists(name) and await AsyncTemplate.exists(name)
        await AsyncTemplate.assign_tags(f"{name}:default", ["second"])
        assert {tag.tag for tag in await AsyncTemplate.get_tags(name)} == {"default", "first", "second"}
        await AsyncTemplate.remove_tags(name, ["second"])
        sandbox = await AsyncSandbox.create(name, timeout=300)
        assert await sandbox.files.read("made.txt") == "built\n"
        await sandbox.kill()
        again = AsyncTemplate().from_template("base").run_cmd("true")
        info = await AsyncTemplate.build_in_background(again, alias=name, tags=["third"], **options)
        while (told := await AsyncTemplate.get_build_status(info, logs_offset=1)).status.value == "building":
            await asyncio.sleep(0.2)
        assert told.status.value == "ready"
        with pytest.raises(Exception, match="registry image 'a' is not supported"):
            await AsyncTemplate.build(AsyncTemplate().from_image("a"), alias=name)

    asyncio.run(story())


def test_a_template_as_text(server):
    from e2b import AsyncTemplate, Template

    for kind in (Template, AsyncTemplate):
        template = kind().from_template("base").skip_cache().run_cmd("true")
        assert json.loads(kind.to_json(template))["steps"][0]["force"] is True
        assert "RUN pip" in kind.to_dockerfile(kind().from_image("a").run_cmd("pip"))
