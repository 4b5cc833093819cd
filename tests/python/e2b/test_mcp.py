"""Sandbox.create(mcp=...): the client starts a gateway, from a template that whoever runs the server has built.

What is said while there is none: test_refused.py."""

import importlib.util
import pathlib
import uuid

import pytest
from e2b import Sandbox, Template
from e2b.exceptions import BuildException, SandboxException

EXAMPLE = pathlib.Path(__file__).parents[3] / "examples/e2b/mcp"
CLOCK = {"clock": {"runCmd": "python3 /opt/clock.py", "envs": {"TZ": "JST-9"}}}


@pytest.mark.machine
def test_a_template_without_a_gateway_is_refused_by_the_client(sdk):
    with pytest.raises(SandboxException, match="mcp-gateway: command not found"):
        sdk.Sandbox.create("base", mcp=CLOCK)


@pytest.fixture(scope="module")
def template(server):
    """The example's template. It stays: what is built from it is kept for later builds."""
    Template.build(example().TEMPLATE, "mcp-gateway")


def example():
    spec = importlib.util.spec_from_file_location("mcp_example", EXAMPLE / "main.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def asked(sandbox, edge, method, token=None, **parameters):
    """What the gateway answers, from outside."""
    host, _, path = sandbox.get_mcp_url().removeprefix("https://").partition("/")
    headers = {"Authorization": f"Bearer {token or sandbox.get_mcp_token()}"}
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": parameters}
    return edge.request("POST", host, f"/{path}", json=body, headers=headers)


@pytest.mark.machine
def test_servers_that_the_client_names_are_there_under_its_address(template, sdk, edge):
    sandbox = sdk.Sandbox.create(mcp=CLOCK, timeout=300)
    try:
        assert asked(sandbox, edge, "initialize").json()["result"]["serverInfo"]["name"] == "mcp-gateway"
        assert [tool["name"] for tool in asked(sandbox, edge, "tools/list").json()["result"]["tools"]] == ["today"]
        today = asked(sandbox, edge, "tools/call", name="today", arguments={}).json()["result"]
        assert today["content"][0]["text"].endswith(" JST")
        assert asked(sandbox, edge, "tools/list", token="wrong").status_code == 401
        # Whoever connects later reads the token in the sandbox.
        other = sdk.Sandbox.connect(sandbox.sandbox_id)
        assert other.get_mcp_token() == sandbox.get_mcp_token()
    finally:
        sandbox.kill()


@pytest.mark.machine
def test_a_server_that_does_not_start_fails_the_create(template, sdk):
    broken = ({"broken": {"runCmd": "exit 3"}}, "broken: the server ended with 3")
    unknown = ({"exa": {"apiKey": "k"}}, "exa: the catalogue has no such server, only clock")
    incomplete = ({"clock": {}}, "clock: the setting 'zone' is missing")
    for servers, words in (broken, unknown, incomplete):
        with pytest.raises(SandboxException, match=f"Failed to start MCP gateway: {words}"):
            sdk.Sandbox.create(mcp=servers, timeout=300)


@pytest.mark.machine
def test_servers_of_the_gateways_catalogue_are_put_into_templates_by_name(template, edge):
    name, log = f"with-clock-{uuid.uuid4().hex[:12]}", []
    steps = Template().from_template("mcp-gateway").add_mcp_server(["clock"])
    Template.build(steps, name, on_build_logs=lambda entry: log.append(entry.message))
    assert any("RUN mcp-gateway pull clock" in line for line in log), log
    sandbox = Sandbox.create(name, mcp={"clock": {"zone": "JST-9"}}, timeout=300)
    try:
        assert sandbox.files.read("/etc/mcp-gateway/installed") == "clock"
        today = asked(sandbox, edge, "tools/call", name="today", arguments={}).json()["result"]
        assert today["content"][0]["text"].endswith(" JST")
    finally:
        sandbox.kill()


@pytest.mark.machine
def test_servers_that_the_catalogue_does_not_have_are_named(template):
    steps, log = Template().from_template("mcp-gateway").add_mcp_server("exa"), []
    with pytest.raises(BuildException, match="failed to run command 'mcp-gateway pull exa'"):
        Template.build(steps, f"refused-{uuid.uuid4().hex[:12]}", on_build_logs=lambda entry: log.append(entry.message))
    assert any("exa: the catalogue has no such server, only clock" in line for line in log), log
    with pytest.raises(BuildException, match="can only be added to mcp-gateway template"):
        Template().from_template("base").add_mcp_server("clock")
