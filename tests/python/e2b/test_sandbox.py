"""Sandbox: life, lists, access."""

import concurrent.futures
import datetime
import os
import uuid

import pytest
from e2b import (
    AuthenticationException,
    InvalidArgumentException,
    NotFoundException,
    Sandbox,
    SandboxQuery,
    SandboxState,
    TimeoutException,
)
from e2b.exceptions import SandboxException

from conftest import eventually


def all_of(paginator):
    items = []
    while paginator.has_next:
        items.extend(paginator.next_items())
    return items


def test_create_run_kill(make):
    sandbox = make()
    assert sandbox.commands.run("echo $((6*7))").stdout == "42\n"
    assert sandbox.is_running()
    assert sandbox.kill() is True
    assert sandbox.kill() is False
    assert not sandbox.is_running()


def test_after_a_kill_every_call_says_so(make):
    sandbox = make()
    sandbox.kill()
    with pytest.raises(TimeoutException):
        sandbox.commands.run("true")
    with pytest.raises(TimeoutException):
        sandbox.files.read("/etc/hostname")
    with pytest.raises(NotFoundException):
        sandbox.get_info()
    with pytest.raises(NotFoundException):
        sandbox.set_timeout(60)
    with pytest.raises(NotFoundException):
        Sandbox.connect(sandbox.sandbox_id)
    with pytest.raises(NotFoundException):
        sandbox.get_metrics()


def test_a_kill_cuts_a_running_command(make):
    sandbox = make()
    handle = sandbox.commands.run("echo on; sleep 1000", background=True, timeout=0)
    assert next(iter(handle)) == ("on\n", None, None)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(handle.wait)
        sandbox.kill()
        with pytest.raises(TimeoutException):
            waiting.result(timeout=60)


def test_info(make):
    before = datetime.datetime.now(datetime.timezone.utc)
    sandbox = make(metadata={"purpose": "info"}, timeout=120)
    info = sandbox.get_info()
    assert info.sandbox_id == sandbox.sandbox_id
    assert info.metadata == {"purpose": "info"}
    assert info.name == "base"
    assert info.state == SandboxState.RUNNING
    assert before - datetime.timedelta(seconds=5) < info.started_at < info.end_at
    assert 60 < (info.end_at - before).total_seconds() < 180
    assert info.cpu_count >= 1 and info.memory_mb >= 128
    assert Sandbox.get_info(sandbox.sandbox_id).template_id == info.template_id


def test_set_timeout_moves_the_end_either_way(make):
    sandbox = make(timeout=300)
    end = lambda: (sandbox.get_info().end_at - datetime.datetime.now(datetime.timezone.utc)).total_seconds()
    sandbox.set_timeout(1000)
    assert 900 < end() < 1010
    sandbox.set_timeout(100)
    assert 50 < end() < 110
    Sandbox.set_timeout(sandbox.sandbox_id, 500)
    assert 400 < end() < 510


def test_connect_only_ever_extends(make):
    sandbox = make(timeout=1000)
    end = sandbox.get_info().end_at
    again = Sandbox.connect(sandbox.sandbox_id, timeout=10)
    assert again.commands.run("echo same").stdout == "same\n"
    assert again.get_info().end_at == end
    sandbox.connect(timeout=2000)
    assert sandbox.get_info().end_at > end


def test_the_deadline_ends_a_sandbox(make):
    sandbox = make(timeout=1)
    eventually(lambda: not sandbox.is_running())
    with pytest.raises(TimeoutException, match="was not found|timeout"):
        sandbox.commands.run("true")


def test_a_timeout_of_zero_ends_it_at_once(make):
    sandbox = make()
    sandbox.set_timeout(0)
    eventually(lambda: not sandbox.is_running())


def test_environment_of_a_sandbox(make):
    sandbox = make(envs={"ONE": "1", "TWO": "two words"})
    assert sandbox.commands.run("echo $ONE $TWO").stdout == "1 two words\n"
    assert sandbox.commands.run("echo $ONE", envs={"ONE": "other"}).stdout == "other\n"


def test_a_process_knows_its_sandbox(box):
    known = box.commands.run("echo $E2B_SANDBOX $E2B_SANDBOX_ID $E2B_TEMPLATE_ID").stdout.split()
    assert known == ["true", box.sandbox_id, box.get_info().template_id]


@pytest.mark.machine
def test_a_program_finds_its_sandbox_without_an_environment(make):
    sandbox = make()
    names = ("E2B_SANDBOX", "E2B_SANDBOX_ID", "E2B_TEMPLATE_ID")
    read = "env -i cat " + " ".join(f"/run/e2b/.{name}" for name in names)
    expected = "true" + sandbox.sandbox_id + sandbox.get_info().template_id
    assert sandbox.commands.run(read).stdout == expected
    # A copy is another one.
    (child,) = sandbox.fork(count=1)
    assert child.sandbox_id in child.commands.run(read).stdout
    child.kill()


def test_context_manager_ends_the_sandbox(server):
    with Sandbox.create() as sandbox:
        assert sandbox.is_running()
    assert not sandbox.is_running()


def test_list_by_metadata_and_state(make):
    mark = uuid.uuid4().hex
    odd = {"mark": mark, "a b&c=d": "100% é+1 / ?", "plain": "x"}
    sandbox = make(metadata=odd)
    make(metadata={"mark": mark})
    find = lambda **query: {item.sandbox_id for item in all_of(Sandbox.list(query=SandboxQuery(**query)))}
    assert find(metadata=odd) == {sandbox.sandbox_id}
    assert len(find(metadata={"mark": mark})) == 2
    assert find(metadata={"mark": mark, "plain": "y"}) == set()
    assert find(metadata=odd, state=[SandboxState.RUNNING]) == {sandbox.sandbox_id}
    assert find(metadata=odd, state=[SandboxState.PAUSED]) == set()
    [listed] = all_of(Sandbox.list(query=SandboxQuery(metadata=odd)))
    assert listed.metadata == odd


def test_list_in_pages(make):
    mark = {"pages": uuid.uuid4().hex}
    made = [make(metadata=mark).sandbox_id for _ in range(5)]
    paginator = Sandbox.list(query=SandboxQuery(metadata=mark), limit=2)
    pages = []
    while paginator.has_next:
        pages.append([item.sandbox_id for item in paginator.next_items()])
    assert [len(page) for page in pages] == [2, 2, 1]
    assert [id for page in pages for id in page] == made[::-1]


@pytest.mark.current
def test_list_by_order_template_and_start(make):
    mark = {"order": uuid.uuid4().hex}
    first, second = make(metadata=mark), make(metadata=mark)
    ids = lambda **options: [item.sandbox_id for item in all_of(Sandbox.list(**options))]
    query = SandboxQuery(metadata=mark)
    assert ids(query=query, order="asc") == [first.sandbox_id, second.sandbox_id]
    assert ids(query=query, order="desc") == [second.sandbox_id, first.sandbox_id]
    assert len(ids(query=SandboxQuery(metadata=mark, template="base"))) == 2
    assert ids(query=SandboxQuery(metadata=mark, template="no-such")) == []
    started = first.get_info().started_at
    assert ids(query=SandboxQuery(metadata=mark, started_after=started)) == [second.sandbox_id]


def test_metrics(box):
    [*_, latest] = box.get_metrics()
    assert latest.cpu_count >= 1
    assert 0 < latest.mem_used < latest.mem_total
    assert 0 < latest.disk_used < latest.disk_total
    age = datetime.datetime.now(datetime.timezone.utc) - latest.timestamp
    assert age < datetime.timedelta(seconds=30)
    past = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)
    assert box.get_metrics(start=past, end=past + datetime.timedelta(hours=1)) == []


def test_unknown_template(server):
    with pytest.raises(Exception, match="template 'no-such-template' not found"):
        Sandbox.create("no-such-template")
    with pytest.raises(Exception, match="tag 'v9' does not exist"):
        Sandbox.create("base:v9")


def test_a_template_by_id_and_with_the_default_tag(make):
    by_name = make("base:default").get_info()
    assert make(by_name.template_id).get_info().template_id == by_name.template_id


def test_a_wrong_key_is_refused(server):
    with pytest.raises(AuthenticationException):
        Sandbox.create(api_key="e2b_" + "0" * 40)


def test_internet_access_is_reported_as_it_is(make):
    assert make(allow_internet_access=False).get_info().allow_internet_access is False
    assert make(allow_internet_access=True).get_info().allow_internet_access is True


def test_network_rules_have_the_precedence_they_have_there(make):
    with pytest.raises(SandboxException, match="0.0.0.0/0 in denyOut"):
        make(network={"allow_out": ["a.example"]})
    with pytest.raises(SandboxException, match="invalid denied CIDR a.example"):
        make(network={"deny_out": ["a.example"]})
    info = make(network={"allow_out": ["1.1.1.1", "*.a.example"], "deny_out": ["0.0.0.0/0"]}).get_info()
    assert info.allow_internet_access is True


def note(box):
    """A file; on the fake server it is in this host's own /tmp."""
    path = f"/tmp/e2b-suite-{uuid.uuid4().hex}"
    box.files.write(path, "text")
    return path


def test_pause_and_connect(make):
    mark = {"pause": uuid.uuid4().hex}
    box = make(metadata=mark, timeout=100)
    query = lambda state: SandboxQuery(metadata=mark, state=[state])
    find = lambda state: [item.sandbox_id for item in all_of(Sandbox.list(query=query(state)))]
    path = note(box)
    assert box.pause() is True
    assert find(SandboxState.PAUSED) == [box.sandbox_id] and find(SandboxState.RUNNING) == []
    assert not box.is_running()
    assert box.get_info().state == SandboxState.PAUSED
    assert Sandbox.pause(box.sandbox_id) is False
    again = Sandbox.connect(box.sandbox_id, timeout=200)
    assert again.sandbox_id == box.sandbox_id
    assert again.files.read(path) == "text"
    again.files.remove(path)
    assert find(SandboxState.RUNNING) == [box.sandbox_id]


def test_pause_at_the_timeout(make):
    box = make(lifecycle={"on_timeout": "pause"})
    box.set_timeout(0)
    assert box.get_info().state == SandboxState.PAUSED
    box.connect(timeout=100)
    assert box.is_running()


def test_fork(make):
    box = make()
    path = note(box)
    children = box.fork(count=2)
    try:
        assert len({child.sandbox_id for child in children} | {box.sandbox_id}) == 3
        for child in children:
            assert child.files.read(path) == "text"
    finally:
        for child in children:
            child.kill()
    assert box.is_running()
    box.files.remove(path)


def test_snapshot(make):
    box = make()
    path = note(box)
    snapshot = box.create_snapshot()
    assert box.is_running()
    other = make(snapshot.snapshot_id)
    assert other.files.read(path) == "text"
    box.files.remove(path)
    with pytest.raises(Exception, match=f"400: .*sandbox {other.sandbox_id}, which lives, was made from it"):
        Sandbox.delete_snapshot(snapshot.snapshot_id)
    other.kill()
    assert Sandbox.delete_snapshot(snapshot.snapshot_id)
    assert not Sandbox.delete_snapshot(snapshot.snapshot_id)


def test_a_snapshot_has_a_name_of_its_own(box):
    for name, why in (("base", "409: .*'base' is a template's"), ("Bad Name!", "400: .*lower-case letters")):
        with pytest.raises(Exception, match=why):
            box.create_snapshot(name=name)


def test_files_are_composed_also_into_one_of_them(box, edge):
    box.files.write("one.txt", "1")
    box.files.write("two.txt", "2")
    body = {"source_paths": ["one.txt", "two.txt"], "destination": "./one.txt"}
    headers = {"X-Access-Token": box._envd_access_token}
    answer = edge.request("POST", box.get_host(49983), "/files/compose", headers=headers, json=body)
    assert answer.json()["path"] == "/home/user/one.txt"
    assert box.files.read("one.txt") == "12"
    assert not box.files.exists("two.txt")


def test_a_token_is_needed_inside(box, edge):
    host = box.get_host(49983)
    call = lambda headers: edge.request("POST", host, "/process.Process/List", headers=headers, json={}).status_code
    assert call({}) == 401
    assert call({"X-Access-Token": "wrong"}) == 401
    assert call({"X-Access-Token": box._envd_access_token}) == 200
    assert edge.request("GET", host, "/files?path=/etc/hostname").status_code == 401
    assert edge.request("GET", host, "/health").status_code == 204
    for inner in ("/init", "/freeze", "/fsfreeze"):
        assert edge.request("POST", host, inner).status_code == 404


def test_one_sandbox_token_does_not_open_another(box, make, edge):
    other = make()
    headers = {"X-Access-Token": other._envd_access_token}
    answer = edge.request("POST", box.get_host(49983), "/process.Process/List", headers=headers, json={})
    assert answer.status_code == 401


def test_signed_urls(box, place, edge):
    box.files.write(f"{place}/signed file", "for you")
    url = box.download_url(f"{place}/signed file")
    assert edge.get_url(url).text == "for you"
    assert edge.get_url(url.replace("signature=v1_", "signature=v1_x")).status_code == 401
    later = box.download_url(f"{place}/signed file", use_signature_expiration=60)
    assert edge.get_url(later).text == "for you"
    assert edge.get_url(url.replace("signed", "other")).status_code == 401
    upload = box.upload_url(f"{place}/uploaded", use_signature_expiration=60)
    host, _, path = upload.removeprefix("https://").partition("/")
    answer = edge.request("POST", host, f"/{path}", files={"file": ("uploaded", b"by url")})
    assert answer.status_code == 200, answer.text
    assert box.files.read(f"{place}/uploaded") == "by url"
    assert edge.get_url(upload).status_code == 401, "a signature to write does not read"


def test_an_expired_signature_says_so(box, place, edge):
    box.files.write(f"{place}/f", "x")
    url = box.download_url(f"{place}/f", use_signature_expiration=-10)
    answer = edge.get_url(url)
    assert (answer.status_code, answer.json()["message"]) == (401, "signature is already expired")


def test_the_first_create_call_is_open_unless_secured(edge, server):
    key = os.environ["E2B_API_KEY"]
    answer = edge.api("POST", "/sandboxes", key, json={"templateID": "base", "timeout": 60})
    assert answer.status_code == 201, answer.text
    sandbox = answer.json()
    assert "envdAccessToken" not in sandbox
    host = f"49983-{sandbox['sandboxID']}.{edge.domain}"
    assert edge.request("POST", host, "/process.Process/List", json={}).status_code == 200
    assert edge.api("GET", f"/sandboxes/{sandbox['sandboxID']}", key).json().get("metadata") == {}
    again = edge.api("POST", f"/sandboxes/{sandbox['sandboxID']}-client/connect", key, json={"timeout": 60})
    assert again.status_code == 200
    assert edge.api("DELETE", f"/sandboxes/{sandbox['sandboxID']}", key).status_code == 204
    secured = edge.api("POST", "/sandboxes", key, json={"templateID": "base", "timeout": 60, "secure": True})
    assert secured.json()["envdAccessToken"]
    edge.api("DELETE", f"/sandboxes/{secured.json()['sandboxID']}", key)


def test_without_a_key_nothing_is_told(edge, box):
    routes = [
        ("POST", "/sandboxes"),
        ("GET", "/v2/sandboxes"),
        ("GET", f"/sandboxes/{box.sandbox_id}"),
        ("DELETE", f"/sandboxes/{box.sandbox_id}"),
        ("GET", "/templates"),
        ("GET", "/no/such/route"),
    ]
    for method, path in routes:
        answer = edge.api(method, path)
        assert (answer.status_code, answer.json()["code"]) == (401, 401), path
    assert edge.api("GET", "/health").status_code == 204


def test_a_repeated_create_makes_one_sandbox(edge, server):
    key = os.environ["E2B_API_KEY"]
    headers = {"Idempotency-Key": uuid.uuid4().hex}
    create = lambda body: edge.api("POST", "/v2/sandboxes", key, headers=headers, json=body)
    first, again = create({"templateID": "base"}), create({"templateID": "base"})
    assert first.json()["sandboxID"] == again.json()["sandboxID"]
    assert create({"templateID": "base", "timeout": 7}).status_code == 422
    edge.api("DELETE", f"/sandboxes/{first.json()['sandboxID']}", key)


def test_bad_bodies_are_refused_by_name(edge, server):
    key = os.environ["E2B_API_KEY"]
    create = lambda **body: edge.api("POST", "/v2/sandboxes", key, json=body)
    for body, word in [
        ({"templateID": "base", "timeout": 0}, "timeout"),
        ({"templateID": "base", "timeout": 10**9}, "lifetime"),
        ({"templateID": "base", "brandNew": 1}, "brandNew"),
        ({"templateID": 7}, "string"),
        ({}, "templateID"),
    ]:
        answer = create(**body)
        assert answer.status_code == 400, body
        assert word in answer.json()["message"], body


def test_twenty_sandboxes_at_once(server):
    def one(number):
        with Sandbox.create(timeout=300, request_timeout=300) as sandbox:
            return sandbox.commands.run(f"echo {number}").stdout

    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        assert list(pool.map(one, range(20))) == [f"{number}\n" for number in range(20)]


def test_a_list_says_how_many_run(box, edge):
    import os

    answer = edge.api("GET", "/v2/sandboxes?limit=1", os.environ["E2B_API_KEY"])
    assert len(answer.json()) == 1
    assert int(answer.headers["x-total-running"]) >= 1
