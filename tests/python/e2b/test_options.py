"""Every option the SDK documents, with either client: seen to have its effect, here or refused in test_refused.py."""

import datetime
import functools
import inspect
import io
import uuid

import pytest
from e2b import CommandExitException, FilesystemEventType, PtySize, Sandbox, SandboxQuery, SandboxState

from conftest import eventually


def takes(function, option):
    """Whether this release and this client have an option."""
    return option in inspect.signature(getattr(function, "inner", function)).parameters


def left_s(info):
    return (info.end_at - datetime.datetime.now(datetime.timezone.utc)).total_seconds()


# What create is given, and how that is seen then.
CREATE = {
    "template": ("base:default", lambda box, info: info.name == "base"),
    "timeout": (500, lambda box, info: 300 < left_s(info) <= 501),
    "metadata": ({"a b": "é & c"}, lambda box, info: info.metadata == {"a b": "é & c"}),
    "envs": ({"GIVEN": "1 2"}, lambda box, info: box.commands.run("echo $GIVEN").stdout == "1 2\n"),
    "secure": (True, lambda box, info: bool(box._envd_access_token)),
    "allow_internet_access": (False, lambda box, info: info.allow_internet_access is False),
    "network": (
        {"allow_public_traffic": False, "mask_request_host": "${PORT}.a.example"},
        lambda box, info: (info.network["allow_public_traffic"], info.network["mask_request_host"])
        == (False, "${PORT}.a.example"),
    ),
    "lifecycle": (
        {"on_timeout": {"action": "pause"}, "auto_resume": True},
        lambda box, info: (info.lifecycle["on_timeout"], info.lifecycle["auto_resume"]) == ("pause", True),
    ),
    "idempotency_key": (None, lambda box, info: True),
}
REFUSED = {"iam", "volume_mounts"}
# Sandboxes of their own: test_mcp.py.
ELSEWHERE = {"mcp"}
# The client's own: the server never sees it.
LOCAL = {"logger"}


@pytest.fixture(scope="module")
def made(sdk):
    """A sandbox with every option that there is, and what it was made with."""
    asked = {option: value for option, (value, _) in CREATE.items() if takes(sdk.Sandbox.create, option)}
    if "idempotency_key" in asked:
        asked["idempotency_key"] = uuid.uuid4().hex
    sandbox = sdk.Sandbox.create(**asked)
    yield sandbox, asked
    sandbox.kill()


@pytest.mark.parametrize("option", CREATE)
def test_an_option_of_create_has_its_effect(made, option):
    sandbox, asked = made
    if option not in asked:
        pytest.skip("this release does not have it")
    assert CREATE[option][1](sandbox, sandbox.get_info())


@pytest.mark.machine
def test_a_sandbox_that_need_not_be_secured_is_open_where_the_release_sends_that(sdk, edge):
    create = getattr(sdk.Sandbox.create, "inner", sdk.Sandbox.create)
    # Later releases take the option, say that they ignore it, and secure every sandbox.
    is_ignored = inspect.signature(create).parameters["secure"].default is None
    sandbox = sdk.Sandbox.create(secure=False, timeout=300)
    try:
        assert (sandbox._envd_access_token is None) != is_ignored
        assert sandbox.commands.run("echo open").stdout == "open\n"
        sandbox.files.write("/tmp/open", "to all")
        answer = edge.request("GET", sandbox.get_host(49983), "/files?path=/tmp/open")
        assert answer.status_code == 401 if is_ignored else answer.text == "to all"
    finally:
        sandbox.kill()


@pytest.mark.current
def test_a_create_that_is_repeated_with_its_key_finds_the_same_sandbox(sdk, made):
    sandbox, asked = made
    assert sdk.Sandbox.create(**asked).sandbox_id == sandbox.sandbox_id


def test_there_is_no_other_option_of_create():
    options = {name for name, kind in inspect.signature(Sandbox.create).parameters.items() if kind.kind != kind.VAR_KEYWORD}
    assert options - LOCAL <= set(CREATE) | REFUSED | ELSEWHERE


def test_lists_go_on_at_their_token(sdk):
    mark = {"mark": uuid.uuid4().hex}
    boxes = [sdk.Sandbox.create(timeout=300, metadata=mark) for _ in range(2)]
    query = SandboxQuery(metadata=mark, state=[SandboxState.RUNNING])
    first = sdk.Sandbox.list(query=query, limit=1, **order(sdk, "asc"))
    [one] = first.next_items()
    rest = sdk.Sandbox.list(query=query, limit=1, next_token=first.next_token, **order(sdk, "asc"))
    [two] = rest.next_items()
    assert {one.sandbox_id, two.sandbox_id} == {box.sandbox_id for box in boxes}
    for box in boxes:
        box.kill()


def order(sdk, which):
    return {"order": which} if takes(sdk.Sandbox.list, "order") else {}


def test_snapshots_are_found_by_name_and_by_sandbox_page_by_page(sdk, either):
    name = f"options-{uuid.uuid4().hex[:12]}"
    named, other = either.create_snapshot(name), either.create_snapshot()
    assert named.names == [name]
    if takes(sdk.Sandbox.list_snapshots, "name"):
        [found] = sdk.Sandbox.list_snapshots(name=name).next_items()
        assert found.snapshot_id == named.snapshot_id
    first = sdk.Sandbox.list_snapshots(sandbox_id=either.sandbox_id, limit=1)
    pages = [first.next_items()]
    assert first.has_next
    rest = sdk.Sandbox.list_snapshots(sandbox_id=either.sandbox_id, limit=1, next_token=first.next_token)
    pages.append(rest.next_items())
    ids = {snapshot.snapshot_id for page in pages for snapshot in page}
    assert ids == {named.snapshot_id, other.snapshot_id}
    assert {known.snapshot_id for known in either.list_snapshots(limit=100).next_items()} == ids
    for id in ids:
        assert sdk.Sandbox.delete_snapshot(id)


def test_secrets_are_listed_page_by_page(sdk):
    names = [f"options-{uuid.uuid4().hex}" for _ in range(2)]
    for name in names:
        sdk.Secret.create(name, "v", metadata={"a": "1"})
    sdk.Secret.update(names[0], "w", metadata={"a": "2"})
    seen, token = {}, None
    while True:
        page = sdk.Secret.list(limit=1, next_token=token)
        seen.update({secret.name: secret.metadata for secret in page.next_items()})
        token = page.next_token
        if not page.has_next:
            break
    assert [seen[name] for name in names] == [{"a": "2"}, {"a": "1"}]
    for name in names:
        assert sdk.Secret.destroy(name)


def test_metrics_of_a_time(either):
    now = datetime.datetime.now(datetime.timezone.utc)
    hour = datetime.timedelta(hours=1)
    assert either.get_metrics(start=now - hour, end=now + hour)
    assert either.get_metrics(start=now - 2 * hour, end=now - hour) == []


def test_a_fork_lives_as_long_as_it_is_told(either):
    [child] = either.fork(timeout=77, count=1)
    assert 20 < left_s(child.get_info()) <= 78
    child.kill()


def at_work(sdk, **options):
    """A sandbox with a file, and a process that runs."""
    sandbox = sdk.Sandbox.create(timeout=300, **options)
    sandbox.files.write("kept", "here")
    return sandbox, sandbox.commands.run("sleep 1000", background=True)


def has_rebooted(sandbox, process):
    """Whether the file is there and the process is not."""
    return sandbox.files.read("kept") == "here" and process.pid not in [other.pid for other in sandbox.commands.list()]


@pytest.mark.machine
@pytest.mark.current
def test_what_is_paused_without_memory_starts_anew(sdk):
    sandbox, process = at_work(sdk)
    assert sandbox.pause(mode="filesystem")
    sandbox.connect(timeout=300, on_resume="reboot")
    assert has_rebooted(sandbox, process)
    sandbox.kill()


FILESYSTEM_ONLY = [{"keep_memory": False}, pytest.param({"mode": "filesystem"}, marks=pytest.mark.current)]


@pytest.mark.machine
@pytest.mark.parametrize("words", FILESYSTEM_ONLY, ids=str)
def test_a_timeout_may_keep_the_disk_alone(sdk, words):
    sandbox, process = at_work(sdk, lifecycle={"on_timeout": {"action": "pause", **words}})
    sandbox.set_timeout(1)
    eventually(lambda: sandbox.get_info().state == SandboxState.PAUSED)
    sandbox.connect(timeout=300)
    assert has_rebooted(sandbox, process)
    sandbox.kill()


@pytest.mark.machine
@pytest.mark.current
def test_memory_that_was_kept_is_dropped_where_a_reboot_is_asked_for(sdk):
    sandbox, process = at_work(sdk)
    sandbox.commands.run("sync")
    assert sandbox.pause(mode="full")
    sandbox.connect(timeout=300, on_resume="reboot")
    assert has_rebooted(sandbox, process)
    sandbox.kill()


@pytest.mark.machine
@pytest.mark.current
def test_a_strict_pause_asks_the_guest_first(sdk):
    sandbox = sdk.Sandbox.create(timeout=300)
    pauses = [sandbox.pause, sandbox.beta_pause, functools.partial(sdk.Sandbox.beta_pause, sandbox.sandbox_id)]
    for pause in pauses:
        assert pause(strict=True)
        sandbox.connect(timeout=300)
    assert sandbox.is_running()
    sandbox.kill()


@pytest.mark.machine
@pytest.mark.parametrize("words", FILESYSTEM_ONLY, ids=str)
@pytest.mark.parametrize("pause", ["pause", "beta_pause"])
def test_a_pause_without_memory_has_four_spellings(sdk, pause, words):
    sandbox = sdk.Sandbox.create(timeout=300)
    assert getattr(sandbox, pause)(**words)
    assert sandbox.get_info().state == SandboxState.PAUSED
    sandbox.kill()


@pytest.mark.machine
@pytest.mark.current
def test_a_snapshot_without_memory_starts_anew(sdk, either):
    either.files.write("kept", "here")
    snapshot = either.create_snapshot(mode="filesystem")
    sandbox = sdk.Sandbox.create(snapshot.snapshot_id, timeout=300)
    assert sandbox.files.read("kept") == "here"
    sandbox.kill()
    assert sdk.Sandbox.delete_snapshot(snapshot.snapshot_id)


@pytest.mark.machine
def test_a_command_runs_as_it_is_told(either):
    out, err = [], []
    ended = either.commands.run(
        "echo $X; id -un; pwd; echo to-err >&2",
        envs={"X": "1 2"},
        user="root",
        cwd="/tmp",
        on_stdout=out.append,
        on_stderr=err.append,
        timeout=70,
    )
    assert ended.stdout == "".join(out) == "1 2\nroot\n/tmp\n"
    assert ended.stderr == "".join(err) == "to-err\n"


@pytest.mark.current
def test_output_is_not_kept_when_it_is_not_wanted(either):
    out = []
    assert not either.commands.run("echo told", retain_output=False, on_stdout=out.append).stdout
    assert out == ["told\n"]


def test_a_command_is_joined_with_options(either):
    handle = either.commands.run("cat; echo to-err >&2", background=True, stdin=True, timeout=70)
    out, err = [], []
    options = {"on_stdout": out.append, "on_stderr": err.append}
    at_connect = takes(either.commands.connect, "on_stdout")
    retain = {"retain_output": False} if takes(either.commands.connect, "retain_output") else {}
    joined = either.commands.connect(handle.pid, timeout=70, **retain, **(options if at_connect else {}))
    if hasattr(handle, "close_stdin"):
        handle.send_stdin("x\n")
        handle.close_stdin()
    else:
        either.commands.send_stdin(handle.pid, "x\n")
        either.commands.close_stdin(handle.pid)
    joined.wait(**({} if at_connect else options))
    assert (out, err) == (["x\n"], ["to-err\n"])
    assert handle.wait().stdout == "x\n"


@pytest.mark.current
def test_input_is_streamed_within_a_time(either):
    handle = either.commands.run("wc -c", background=True, stdin=True)
    give(either.commands, handle.pid, "12345")
    either.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "5\n"
    terminal = open_terminal(either)
    give(either.pty, terminal.pid, "exit 4\n")
    with pytest.raises(CommandExitException) as ended:
        terminal.wait()
    assert ended.value.exit_code == 4


def give(where, pid, text):
    """Streams input: an iterable to the one client, the inner side of `async with` to the other."""
    if takes(where.stream_input, "data"):
        where.stream_input(pid, [text], timeout=70)
        return
    from blocking import blocking

    async def story():
        async with where.inner.stream_input(pid, timeout=70) as stream:
            await stream.send(text)

    blocking(story())


def open_terminal(sandbox, **options):
    if takes(sandbox.pty.create, "on_data"):
        options.setdefault("on_data", lambda data: None)
    return sandbox.pty.create(PtySize(rows=24, cols=200), **options)


@pytest.mark.machine
def test_a_terminal_opens_as_it_is_told(either):
    seen = bytearray()
    async_only = {"on_data": seen.extend} if takes(either.pty.create, "on_data") else {}
    handle = open_terminal(either, cwd="/tmp", envs={"X": "1 2"}, user="root", timeout=70, **async_only)
    joined = either.pty.connect(handle.pid, timeout=70, **({"on_data": lambda data: None} if async_only else {}))
    either.pty.send_stdin(handle.pid, b"echo $X-$(id -un)-$(pwd); exit\n")
    handle.wait(**({} if async_only else {"on_pty": seen.extend}))
    assert b"1 2-root-/tmp" in seen
    joined.wait()


@pytest.mark.machine
def test_files_are_their_users(either):
    """Each call by another user than the usual one, in a place that only that one reaches."""
    files, root = either.files, f"/root/{uuid.uuid4().hex}"
    assert files.make_dir(root, user="root")
    files.write(f"{root}/one", "1", user="root", metadata={"a": "b"}, gzip=True, use_octet_stream=True)
    several = [{"path": f"{root}/{name}", "data": name} for name in ("two", "three")]
    written = files.write_files(several, user="root", metadata={"c": "d"}, gzip=True, use_octet_stream=True)
    assert [entry.metadata for entry in written] == [{"c": "d"}] * 2
    info = files.get_info(f"{root}/one", user="root")
    assert (info.owner, info.metadata) == ("root", {"a": "b"})
    with pytest.raises(Exception):
        files.read(f"{root}/one")
    stream = files.read(f"{root}/one", user="root", format="stream", gzip=True, **idle(files))
    assert b"".join(stream) == b"1"
    assert files.rename(f"{root}/one", f"{root}/sub/four", user="root").name == "four"
    deep = files.list(root, depth=2, user="root")
    assert [entry.path.removeprefix(root) for entry in deep] == ["/sub", "/sub/four", "/three", "/two"]
    assert files.exists(root, user="root")
    handle, events = watched(files, root, user="root", recursive=True, include_entry=True)
    files.write(f"{root}/sub/five", io.BytesIO(b"12345"), user="root")
    sizes = lambda: [event.entry.size for event in events() if event.type == FilesystemEventType.WRITE and event.entry]
    assert eventually(sizes)[-1] == 5
    handle.stop()
    files.remove(root, user="root")
    assert not files.exists(root, user="root")


def idle(files):
    return {"stream_idle_timeout": 60} if takes(files.read, "stream_idle_timeout") else {}


def watched(files, path, **options):
    """A watch, and what it has seen so far."""
    if takes(files.watch_dir, "allow_network_mounts"):
        options["allow_network_mounts"] = True
    seen = []
    if takes(files.watch_dir, "on_event"):
        return files.watch_dir(path, on_event=seen.append, timeout=70, **options), lambda: seen
    handle = files.watch_dir(path, **options)
    return handle, lambda: seen.extend(handle.get_new_events()) or seen


def test_the_asynchronous_client_is_told_that_a_watch_is_over(either):
    if not takes(either.files.watch_dir, "on_exit"):
        pytest.skip("only the asynchronous client has it")
    path, over = f"/tmp/watched-{uuid.uuid4().hex}", []
    either.files.make_dir(path)
    either.files.watch_dir(path, on_event=lambda event: None, on_exit=over.append, timeout=1)
    assert eventually(lambda: over)
    either.files.remove(path)


@pytest.mark.machine
def test_addresses_are_a_users(either, edge):
    either.files.write("/root/secret", "s", user="root")
    assert edge.get_url(either.download_url("/root/secret", user="root", use_signature_expiration=60)).text == "s"
    assert edge.get_url(either.download_url("/root/secret", use_signature_expiration=60)).status_code != 200
    host, _, path = either.upload_url("/root/up", user="root", use_signature_expiration=60).removeprefix("https://").partition("/")
    assert edge.request("POST", host, f"/{path}", files={"file": ("up", b"by url")}).status_code == 200
    assert either.files.get_info("/root/up", user="root").owner == "root"


def test_a_client_of_its_own_has_its_own_key(server, sdk):
    import os

    import e2b

    if not hasattr(e2b, "E2B"):
        pytest.skip("this release does not have it")
    client = e2b.E2B(api_key=os.environ["E2B_API_KEY"], domain=os.environ["E2B_DOMAIN"], request_timeout=70)
    stranger = e2b.E2B(api_key="e2b_" + "0" * 40)
    assert isinstance(client.Sandbox.list(limit=1).next_items(), list)
    with pytest.raises(e2b.AuthenticationException):
        stranger.Sandbox.list().next_items()
