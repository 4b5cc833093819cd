"""What this server does not have is refused by name, through the calls that ask for it."""

import os
import uuid

import pytest
from e2b import Sandbox
from e2b.exceptions import BuildException, NotFoundException

# Everything a volume can be asked, its class and one that a client believes to have.
OF_VOLUMES = {
    "create": lambda kind: kind.create("mine"),
    "connect": lambda kind: kind.connect("vol_1"),
    "list": lambda kind: kind.list(),
    "get_info": lambda kind: kind.get_info("vol_1"),
    "destroy": lambda kind: kind.destroy("vol_1"),
}
OF_A_VOLUME = {
    "list": lambda volume: volume.list("/", depth=2),
    "make_dir": lambda volume: volume.make_dir("/a", uid=1, gid=1, mode=0o700, force=True),
    "exists": lambda volume: volume.exists("/a"),
    "get_info": lambda volume: volume.get_info("/a"),
    "update_metadata": lambda volume: volume.update_metadata("/a", uid=1, gid=1, mode=0o700),
    "read_file": lambda volume: volume.read_file("/a"),
    "read_file as bytes": lambda volume: volume.read_file("/a", format="bytes"),
    "read_file as a stream": lambda volume: b"".join(volume.read_file("/a", format="stream", stream_idle_timeout=70)),
    "write_file": lambda volume: volume.write_file("/a", b"x", uid=1, gid=1, mode=0o600, force=True),
    "remove": lambda volume: volume.remove("/a"),
}


@pytest.mark.parametrize("call", OF_VOLUMES.values(), ids=OF_VOLUMES)
def test_volumes_are_refused(sdk, call):
    with pytest.raises(Exception, match="volumes: not supported"):
        call(sdk.Volume)


@pytest.mark.parametrize("call", OF_A_VOLUME.values(), ids=OF_A_VOLUME)
def test_what_is_in_a_volume_is_refused(sdk, call):
    with pytest.raises(Exception, match="volumes: not supported"):
        call(sdk.Volume("vol_1", "mine", token=os.environ["E2B_API_KEY"]))


REGISTRY_IMAGES = {
    "debian": (lambda new: new.from_debian_image("12"), "debian:12"),
    "ubuntu": (lambda new: new.from_ubuntu_image("24.04"), "ubuntu:24.04"),
    "fedora": (lambda new: new.from_fedora_image("42"), "fedora:42"),
    "alpine": (lambda new: new.from_alpine_image("3.20"), "alpine:3.20"),
    "arch": (lambda new: new.from_arch_image("base"), "archlinux:base"),
    "python": (lambda new: new.from_python_image("3.12"), "python:3.12"),
    "node": (lambda new: new.from_node_image("24"), "node:24"),
    "bun": (lambda new: new.from_bun_image("1"), "oven/bun:1"),
    "any": (lambda new: new.from_image("ubuntu:24.04"), "ubuntu:24.04"),
    "any, with a password": (lambda new: new.from_image("r.example/a", username="u", password="p"), "r.example/a"),
    # Even what would be ours: a registry to take it from was named.
    "base, with a password": (lambda new: new.from_image("e2bdev/base", username="u", password="p"), "e2bdev/base"),
    "aws": (lambda new: new.from_aws_registry("1.dkr.ecr.example/a", "id", "secret", "us-west-2"), "1.dkr.ecr.example/a"),
    "gcp": (lambda new: new.from_gcp_registry("gcr.io/p/a", {"type": "service_account"}), "gcr.io/p/a"),
    "a Dockerfile": (lambda new: new.from_dockerfile("FROM ubuntu:22.04\nRUN true\n"), "ubuntu:22.04"),
}


@pytest.mark.parametrize(("steps", "image"), REGISTRY_IMAGES.values(), ids=REGISTRY_IMAGES)
def test_registry_images_are_refused_by_name(sdk, steps, image):
    with pytest.raises(BuildException, match=f"registry image '{image}' is not supported"):
        sdk.Template.build(steps(sdk.Template()), f"refused-{uuid.uuid4().hex[:12]}")


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        pytest.param({"cpu_count": 8}, "cpuCount 8", id="processors"),
        pytest.param({"memory_mb": 4096}, "memoryMB 4096", id="memory"),
        pytest.param({"min_free_disk_mb": 10}, "minFreeDiskMb 10", id="disk", marks=pytest.mark.current),
    ],
)
@pytest.mark.parametrize("build", ["build", "build_in_background"])
def test_another_shape_for_a_template_is_refused(sdk, build, shape, name):
    with pytest.raises(BuildException, match=f"{name} is not supported"):
        getattr(sdk.Template, build)(sdk.Template().from_template("base"), f"refused-{uuid.uuid4().hex[:12]}", **shape)


@pytest.mark.machine
@pytest.mark.parametrize(
    ("parent", "steps"),
    [
        ("mcp-gateway", lambda new: new.add_mcp_server("exa")),
        ("devcontainer", lambda new: new.beta_dev_container_prebuild("/a")),
        ("devcontainer", lambda new: new.beta_set_dev_container_start("/a")),
    ],
    ids=["MCP servers", "a dev container's build", "a dev container's start"],
)
def test_templates_that_do_not_exist_here_are_named(sdk, parent, steps):
    with pytest.raises(BuildException, match=f"template '{parent}' not found"):
        sdk.Template.build(steps(sdk.Template().from_template(parent)), f"refused-{uuid.uuid4().hex[:12]}")


def test_without_a_template_that_has_a_gateway_it_is_said_what_to_do(sdk, either):
    with pytest.raises(Exception, match="template 'mcp-gateway' not found: build one"):
        sdk.Sandbox.create(mcp={"exa": {"apiKey": "k"}})
    assert either.get_mcp_url() == f"https://{either.get_host(50005)}/mcp"
    with pytest.raises(NotFoundException, match="/etc/mcp-gateway/.token"):
        either.get_mcp_token()


def test_identity_is_refused(sdk):
    token = sdk.Secret.iam_token(audience="sts.example", token_type="JWT-SVID")
    with pytest.raises(Exception, match="iam is not supported"):
        sdk.Sandbox.create(iam={"tokens": {"aws": token}})


def test_identity_tokens_are_refused(sdk):
    rules = {"a.example": [{"transform": {"headers": {"X": "${e2b.identity.tokens.aws}"}}}]}
    with pytest.raises(Exception, match="identity.tokens.aws} is not supported"):
        sdk.Sandbox.create(network={"rules": rules})


def test_volumes_are_not_mounted(sdk):
    with pytest.raises(Exception, match="volumeMounts is not supported"):
        sdk.Sandbox.create(volume_mounts={"/data": "mine"})


def test_what_a_sandbox_cannot_have_is_refused_at_create(edge):
    key = os.environ["E2B_API_KEY"]
    for field, value in [("iam", {"tokens": {}}), ("volumeMounts", [{"name": "v", "path": "/v"}])]:
        answer = edge.api("POST", "/v2/sandboxes", key, json={"templateID": "base", field: value})
        assert answer.status_code == 400
        assert field in answer.json()["message"]


NETWORKS = {
    "egressProxy.tls": {"egress_proxy": {"address": "proxy.example:1080", "tls": True}},
    "dnsServers": {"dns_servers": ["8.8.8.8"]},
    "httpsPorts": {"https_ports": [8443]},
}


@pytest.mark.current
@pytest.mark.parametrize(("field", "network"), NETWORKS.items(), ids=NETWORKS)
def test_what_a_network_cannot_have_is_refused_at_create(sdk, field, network):
    with pytest.raises(Exception, match=f"network.{field} is not supported"):
        sdk.Sandbox.create(network=network)


def test_what_a_network_cannot_have_is_refused_whatever_the_client(edge):
    key = os.environ["E2B_API_KEY"]
    for field, value in [
        ("egressProxy.tls", {"address": "proxy.example:1080", "tls": {"enabled": True}}),
        ("dnsServers", ["8.8.8.8"]),
        ("httpsPorts", [8443]),
    ]:
        answer = edge.api("POST", "/v2/sandboxes", key, json={"templateID": "base", "network": {field.split(".")[0]: value}})
        assert answer.status_code == 400
        assert f"network.{field} is not supported" in answer.json()["message"]
