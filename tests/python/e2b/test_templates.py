"""Building templates: `Template()` and what can be done with the result."""

import os
import time
import uuid

import pytest
from e2b import (
    Sandbox,
    Template,
    wait_for_file,
    wait_for_port,
    wait_for_process,
    wait_for_timeout,
    wait_for_url,
)

pytestmark = pytest.mark.machine

BUILD_PATIENCE_S = 300


def fresh(prefix="suite"):
    return f"{prefix}-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    """Files to copy."""
    root = tmp_path_factory.mktemp("context")
    (root / "app").mkdir()
    (root / "app/main.txt").write_text("main")
    (root / "app/deep").mkdir()
    (root / "app/deep/er.txt").write_text("deeper")
    (root / "one.txt").write_text("one")
    (root / "link.txt").symlink_to("one.txt")
    (root / "app/left.out").write_text("x")
    return root


START = "touch /tmp/started; exec python3 -m http.server 8000 --directory /home/user/app"
# Every way to wait for it.
READY = [
    wait_for_port(8000),
    wait_for_url("http://localhost:8000/main.txt", 200),
    wait_for_process("python3"),
    wait_for_file("/tmp/started"),
]


def steps(context):
    return (
        Template(file_context_path=context)
        .from_template("base")
        .run_cmd("echo built > /home/user/made.txt")
        .copy("one.txt", "/opt/data/", user="root", mode=0o640)
        .copy("app", "/home/user/app")
        .set_envs({"FLAVOUR": "salt", "TASTE": "${FLAVOUR}y:$HOME"})
        .set_workdir("/home/user/work")
        .set_start_cmd(START, " && ".join(way.get_cmd() for way in READY))
    )


@pytest.fixture(scope="module")
def built(server, context):
    """A template with all kinds of steps, and the log of its build."""
    name, log = fresh(), []
    info = Template.build(steps(context), name, on_build_logs=lambda entry: log.append(entry.message))
    return name, info, log


def test_a_template_starts_as_its_build_left_it(built, edge):
    name, info, log = built
    box = Sandbox.create(name, timeout=300)
    try:
        assert box.files.read("/home/user/made.txt") == "built\n"
        assert box.files.read("/home/user/app/deep/er.txt") == "deeper"
        told = box.commands.run("stat -c '%U %a' /opt/data/one.txt; pwd; echo $FLAVOUR; echo $TASTE", user="root")
        owner, where, flavour, taste = told.stdout.splitlines()
        assert owner == "root 640"
        assert (where, flavour) == ("/home/user/work", "salt")
        assert taste == "salty:/home/user"
        assert box.commands.run("stat -c %U /home/user/app/main.txt").stdout == "user\n"
        # The started process is part of the template's memory.
        assert edge.request("GET", box.get_host(8000), "/main.txt").text == "main"
    finally:
        box.kill()


# Stands for a program that the image lacks or that needs a network: it notes what it was asked for.
NOTES = """cd /usr/local/bin
printf '#!/bin/sh\\necho "$(id -un) ${0##*/} $*" >> /asked\\n' | tee apt-get bun npm pip > /dev/null
touch /asked; chmod 666 /asked; chmod 755 apt-get bun npm pip"""


def every_step(context):
    """Each method of a builder, with each of its options, in one build."""
    return (
        Template(file_context_path=context, file_ignore_patterns=["**/*.out"])
        .from_dockerfile("FROM e2bdev/base\nENV FROM_DOCKERFILE=seen\n")
        .copy("link.txt", "/opt/one.txt", force_upload=True, user="root", mode=0o640, resolve_symlinks=True, gzip=True)
        .copy_items([{"src": "app", "dest": "/opt/app"}, {"src": "one.txt", "dest": "/opt/plain.txt", "user": "user"}])
        .make_dir(["/opt/made", "/opt/gone"], mode=0o700, user="root")
        .rename("/opt/one.txt", "/opt/made/two.txt", force=True, user="root")
        .remove("/opt/gone", force=True, recursive=True, user="root")
        .make_symlink("/opt/made/two.txt", "/opt/link", user="root", force=True)
        .run_cmd(["git init -q -b main /tmp/r", "git -C /tmp/r -c user.name=a -c user.email=a@a commit -qm 1 --allow-empty"])
        .git_clone("file:///tmp/r", "/home/user/clone", branch="main", depth=1, user="user")
        .run_cmd(NOTES, user="root")
        .apt_install(["hello", "jq"], no_install_recommends=True, fix_missing=True)
        .bun_install("left-pad", g=True, dev=True)
        .pip_install("numpy", g=False)
        .npm_install(["left-pad", "is-odd"], g=True, dev=True)
        .set_workdir("/home/user/clone")
        .set_envs({"LAST": "1"})
        .skip_cache()
        .run_cmd("date +%N > /home/user/when")
        .set_user("user")
        .set_ready_cmd(wait_for_timeout(1000))
    )


def test_every_step_is_carried_out_with_its_options(context):
    name, log = fresh(), []
    shape = {"cpu_count": 2, "memory_mb": 1024}
    told = {"on_build_logs": log.append, "skip_cache": True}
    info = Template.build(every_step(context), alias=name, tags=["one"], **shape, **told)
    assert log
    assert {"one"} <= {tag.tag for tag in Template.get_tags(info.template_id)}
    assert Template.exists(name)
    box = Sandbox.create(f"{name}:one", timeout=300)
    try:
        seen = box.commands.run(LOOK, user="root").stdout.splitlines()
    finally:
        box.kill()
    assert seen == [
        "root 700 /opt/made",
        "root 640 /opt/made/two.txt",
        "user 644 /opt/plain.txt",
        "user 755 /home/user/clone",
        "/opt/made/two.txt one",
        "/opt/app: deep main.txt",
        "root apt-get update",
        "root apt-get install -y --no-install-recommends --fix-missing hello jq",
        "root bun install -g --dev left-pad",
        "user pip install --user numpy",
        "root npm install -g --save-dev left-pad is-odd",
        "/home/user/clone seen1 gone",
    ]


LOOK = """stat -c '%U %a %n' /opt/made /opt/made/two.txt /opt/plain.txt /home/user/clone
echo $(readlink /opt/link) $(cat /opt/link)
echo /opt/app: $(ls /opt/app)
cat /asked
echo $(pwd) $FROM_DOCKERFILE$LAST $(ls -d /opt/gone 2> /dev/null || echo gone)"""


def test_what_is_not_to_be_cached_is_carried_out_again(server):
    name, mark = fresh(), uuid.uuid4().hex
    steps = lambda new: new.from_base_image().run_cmd(f"echo {mark}")
    shape = {"alias": name, "tags": ["t"], "cpu_count": 2, "memory_mb": 1024, "on_build_logs": lambda entry: None}
    is_known = lambda template, **options: any(
        line.startswith("CACHED") for line in whole_log(Template.build_in_background(template, **shape, **options))
    )
    assert not is_known(steps(Template()))
    assert is_known(steps(Template()))
    assert not is_known(steps(Template()), skip_cache=True)
    assert not is_known(steps(Template().skip_cache()))


def whole_log(info):
    """Line by line, from where the last answer ended."""
    lines, deadline = [], time.monotonic() + BUILD_PATIENCE_S
    while time.monotonic() < deadline:
        status = Template.get_build_status(info, logs_offset=len(lines))
        lines += [entry.message for entry in status.log_entries]
        if status.status.value != "building" and not status.log_entries:
            assert status.status.value == "ready"
            return lines
        time.sleep(0.1)
    raise AssertionError(f"not built within {BUILD_PATIENCE_S} s")


def test_the_log_tells_each_step(built):
    _, info, log = built
    text = "\n".join(log)
    assert "[base] FROM base" in text
    assert "[builder 1/5] RUN echo built > /home/user/made.txt" in text
    assert "[builder 3/5] COPY app /home/user/app" in text
    assert "[finalize]" in text
    assert "salt" not in text, "values may be secrets"


def test_known_steps_are_not_carried_out_again(built, context):
    name, log = fresh(), []
    Template.build(steps(context), name, on_build_logs=lambda entry: log.append(entry.message))
    assert any(line.startswith("CACHED [builder 3/5] COPY") for line in log), log
    box = Sandbox.create(name, timeout=300)
    try:
        assert box.commands.run("cat /home/user/made.txt; echo $FLAVOUR").stdout == "built\nsalt\n"
    finally:
        box.kill()


def test_a_changed_step_is_carried_out_with_all_after_it(built, context):
    log = []
    template = (
        Template(file_context_path=context)
        .from_template("base")
        .run_cmd("echo built > /home/user/made.txt")
        .run_cmd(f"echo {uuid.uuid4().hex} >> /home/user/made.txt")
    )
    name = fresh()
    Template.build(template, name, on_build_logs=lambda entry: log.append(entry.message))
    assert any(line.startswith("CACHED [builder 1/2]") for line in log)
    assert not any(line.startswith("CACHED [builder 2/2]") for line in log)


def test_a_failing_step_is_named(server):
    from e2b.exceptions import BuildException

    log = []
    template = Template().from_template("base").run_cmd("true").run_cmd("echo told >&2; exit 3")
    with pytest.raises(BuildException, match="failed to run command 'echo told >&2; exit 3': command failed: exit status 3"):
        Template.build(template, fresh(), on_build_logs=lambda entry: log.append(entry.message))
    assert any("[stderr]: told" in line for line in log)


def test_an_unknown_user_is_named(server):
    from e2b.exceptions import BuildException

    template = Template().from_template("base").run_cmd("whoami", user="nobody-here")
    message = "failed to run command 'whoami': command failed: unauthenticated: invalid username: 'nobody-here'"
    with pytest.raises(BuildException, match=message):
        Template.build(template, fresh())


def test_a_user_is_made_and_is_the_sandboxs(server):
    name = fresh()
    Template.build(Template().from_template("base").set_user("worker").run_cmd("whoami > ~/me"), name)
    box = Sandbox.create(name, timeout=300)
    try:
        assert box.commands.run("cat /home/worker/me", user="root").stdout == "worker\n"
    finally:
        box.kill()


def test_a_background_build_is_asked_for_its_state(server):
    info = Template.build_in_background(Template().from_template("base").run_cmd("sleep 2"), fresh())
    status = Template.get_build_status(info)
    assert status.status.value == "building"
    deadline = time.monotonic() + BUILD_PATIENCE_S
    while status.status.value == "building" and time.monotonic() < deadline:
        time.sleep(0.2)
        status = Template.get_build_status(info)
    assert status.status.value == "ready"


def test_tags_say_which_build_is_meant(server):
    name = fresh()
    assert not Template.alias_exists(name)
    Template.build(Template().from_template("base").run_cmd("echo 1 > ~/v"), f"{name}:V1", tags=["First"])
    Template.build(Template().from_template("base").run_cmd("echo 2 > ~/v"), name)
    assert Template.alias_exists(name)

    def version(template):
        box = Sandbox.create(template, timeout=300)
        try:
            return box.files.read("v").strip()
        finally:
            box.kill()

    assert (version(f"{name}:v1"), version(name)) == ("1", "2")
    Template.assign_tags(f"{name}:v1", ["stable", "old"])
    assert version(f"{name}:stable") == "1"
    assert {tag.tag for tag in Template.get_tags(name)} == {"v1", "first", "default", "stable", "old"}
    Template.remove_tags(name, ["old"])
    assert "old" not in {tag.tag for tag in Template.get_tags(name)}
    with pytest.raises(Exception, match="tag 'old' does not exist"):
        Sandbox.create(f"{name}:old")


def test_a_template_is_deleted_once_nobody_needs_it(server, edge):
    key = os.environ["E2B_API_KEY"]
    name = fresh()
    Template.build(Template().from_template("base").run_cmd("true"), name)
    box = Sandbox.create(name, timeout=300)
    assert edge.api("DELETE", f"/templates/{name}", key).status_code == 400
    box.kill()
    assert edge.api("DELETE", f"/templates/{name}", key).status_code == 204
    assert edge.api("DELETE", f"/templates/{name}", key).status_code == 404
    assert not Template.alias_exists(name)


def test_a_template_keeps_its_id_and_goes_with_all_its_builds(server, edge):
    key, name = os.environ["E2B_API_KEY"], fresh()
    first = Template.build(Template().from_template("base").run_cmd("true"), f"{name}:v1")
    second = Template.build(Template().from_template("base").run_cmd("true"), name)
    assert first.template_id == second.template_id and first.build_id != second.build_id
    box = Sandbox.create(second.template_id, timeout=300)
    assert box.get_info().template_id == second.template_id
    made = edge.api("GET", f"/v2/sandboxes?template={second.template_id}", key).json()
    assert [entry["sandboxID"] for entry in made] == [box.sandbox_id]

    listed = [entry for entry in edge.api("GET", "/templates", key).json() if name in entry["aliases"]]
    assert [(entry["templateID"], entry["buildID"]) for entry in listed] == [(second.template_id, second.build_id)]
    (entry,) = listed
    assert sorted(entry["names"]) == [name, f"{name}:v1"]
    assert (entry["buildCount"], entry["spawnCount"]) == (2, 1) and entry["lastSpawnedAt"]
    assert edge.api("GET", f"/templates/{name}", key).json() == entry

    # One of its builds is in use: nothing of it goes.
    assert edge.api("DELETE", f"/templates/{name}", key).status_code == 400
    assert Template.alias_exists(name)
    box.kill()
    assert edge.api("DELETE", f"/templates/{name}", key).status_code == 204
    for gone in (name, f"{name}:v1"):
        with pytest.raises(Exception, match="not found|does not exist"):
            Sandbox.create(gone)


def test_a_template_is_deleted_while_it_is_built(server, edge):
    key, name = os.environ["E2B_API_KEY"], fresh()
    info = Template.build_in_background(Template().from_template("base").run_cmd("sleep 250"), name)
    assert edge.api("DELETE", f"/templates/{info.template_id}", key).status_code == 204
    status = Template.get_build_status(info)
    assert (status.status.value, status.reason.message) == ("error", "the template was deleted")
    gone = edge.api("DELETE", f"/templates/{info.template_id}", key)
    assert gone.status_code == 404 and gone.json()["message"] == f"template '{name}' not found"


def test_a_template_whose_steps_are_known_is_deleted(server, edge):
    key, name, above = os.environ["E2B_API_KEY"], fresh(), fresh()
    Template.build(Template().from_template("base").run_cmd("true"), name)
    Template.build(Template().from_template(name).run_cmd("true"), above)
    assert edge.api("DELETE", f"/templates/{name}", key).status_code == 400, "another one is built on it"
    assert edge.api("DELETE", f"/templates/{above}", key).status_code == 204
    assert edge.api("DELETE", f"/templates/{name}", key).status_code == 204, "only known steps are"


def test_a_start_command_that_fails_fails_the_build(server):
    from e2b.exceptions import BuildException

    with pytest.raises(BuildException, match="start command 'exit 3': command failed: exit status 3"):
        Template.build(Template().from_template("base").set_start_cmd("exit 3", "true"), fresh())


def test_an_upload_that_is_no_archive_is_refused(server, edge):
    import httpx

    key = os.environ["E2B_API_KEY"]
    link = edge.api("GET", f"/templates/x/files/{uuid.uuid4().hex * 2}", key).json()
    assert not link["present"]
    refused = httpx.put(link["url"], content=b"not an archive")
    assert refused.status_code == 400 and "tar file" in refused.json()["message"]


def test_bad_requests_are_told_in_json(server, edge):
    key = os.environ["E2B_API_KEY"]
    for method, path, body, status, word in (
        ("GET", "/v2/sandboxes?limit=many", None, 400, "limit"),
        ("GET", "/v2/sandboxes?nextToken=zzz", None, 400, "nextToken"),
        ("GET", "/v2/sandboxes?template=a&template=b", None, 400, "there twice"),
        ("POST", "/v2/sandboxes", {"templateID": "x" * (2 << 20)}, 413, "1048576 bytes"),
        ("POST", "/v3/templates", {"name": "../up"}, 400, "step in a path"),
        ("POST", "/v3/templates", {"name": "tags"}, 400, "take another"),
        ("GET", "/v2/sandboxes?bogus=1", None, 400, "bogus"),
        ("POST", "/v2/sandboxes", {"templateID": "base", "autoResume": {"enabled": True, "x": 1}}, 400, "`x`"),
        ("DELETE", "/templates/no-such", None, 404, "template 'no-such' not found"),
    ):
        answer = edge.api(method, path, key, json=body)
        told = answer.json()
        assert (answer.status_code, told["code"]) == (status, status), (path, told)
        assert word in told["message"], told


def test_a_template_whose_build_failed_exists_until_it_is_deleted(server, edge):
    from e2b.exceptions import BuildException

    key, name = os.environ["E2B_API_KEY"], fresh()
    with pytest.raises(BuildException):
        Template.build(Template().from_template("base").run_cmd("false"), name)
    assert Template.alias_exists(name)
    assert edge.api("DELETE", f"/templates/{name}", key).status_code == 204
    assert not Template.alias_exists(name)
    assert edge.api("DELETE", f"/templates/{name}", key).status_code == 404


def test_a_template_is_gone_with_the_last_of_its_tagged_builds(server, edge):
    key, name = os.environ["E2B_API_KEY"], fresh()
    Template.build(Template().from_template("base").run_cmd("true"), f"{name}:v1")
    assert edge.api("DELETE", f"/templates/{name}:v1", key).status_code == 204
    assert not Template.alias_exists(name)
    assert edge.api("DELETE", f"/templates/{name}", key).status_code == 404
