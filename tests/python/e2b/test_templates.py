"""Building templates: `Template()` and what can be done with the result."""

import time
import uuid

import pytest
from e2b import Sandbox, Template, wait_for_port

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
    return root


def steps(context):
    return (
        Template(file_context_path=context)
        .from_template("base")
        .run_cmd("echo built > /home/user/made.txt")
        .copy("one.txt", "/opt/data/", user="root", mode=0o640)
        .copy("app", "/home/user/app")
        .set_envs({"FLAVOUR": "salt", "TASTE": "${FLAVOUR}y:$HOME"})
        .set_workdir("/home/user/work")
        .set_start_cmd("python3 -m http.server 8000 --directory /home/user/app", wait_for_port(8000))
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


def test_registry_images_are_refused_by_name(server):
    from e2b.exceptions import BuildException

    with pytest.raises(BuildException, match="registry image 'ubuntu:24.04'"):
        Template.build(Template().from_image("ubuntu:24.04"), fresh())


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
    Template.build(Template().from_template("base").run_cmd("echo 1 > ~/v"), f"{name}:v1")
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
    assert {tag.tag for tag in Template.get_tags(name)} == {"v1", "default", "stable", "old"}
    Template.remove_tags(name, ["old"])
    assert "old" not in {tag.tag for tag in Template.get_tags(name)}
    with pytest.raises(Exception, match="tag 'old' does not exist"):
        Sandbox.create(f"{name}:old")


def test_a_template_is_deleted_once_nobody_needs_it(server, edge):
    import os

    key = os.environ["E2B_API_KEY"]
    name = fresh()
    Template.build(Template().from_template("base").run_cmd("true"), name)
    box = Sandbox.create(name, timeout=300)
    assert edge.api("DELETE", f"/templates/{name}", key).status_code == 400
    box.kill()
    assert edge.api("DELETE", f"/templates/{name}", key).status_code == 204
    assert edge.api("DELETE", f"/templates/{name}", key).status_code == 404
    assert not Template.alias_exists(name)
