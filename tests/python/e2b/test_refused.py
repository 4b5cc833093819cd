"""What this server does not have is refused by name, through the calls that ask for it."""

import pytest
from e2b import Sandbox


@pytest.mark.current
def test_volumes_are_refused(server):
    from e2b import Volume

    with pytest.raises(Exception, match="volumes: not supported"):
        Volume.create("mine")
    with pytest.raises(Exception, match="volumes: not supported"):
        Volume.list()


def test_identity_tokens_are_refused(server):
    rules = {"a.example": [{"transform": {"headers": {"X": "${e2b.identity.tokens.aws}"}}}]}
    with pytest.raises(Exception, match="identity.tokens.aws} is not supported"):
        Sandbox.create(network={"rules": rules})


def test_what_a_sandbox_cannot_have_is_refused_at_create(edge):
    import os

    key = os.environ["E2B_API_KEY"]
    for field, value in [("mcp", {"server": {}}), ("iam", {"tokens": {}}), ("volumeMounts", [{"name": "v", "path": "/v"}])]:
        answer = edge.api("POST", "/v2/sandboxes", key, json={"templateID": "base", field: value})
        assert answer.status_code == 400
        assert field in answer.json()["message"]


def test_what_a_network_cannot_have_is_refused_at_create(edge):
    import os

    key = os.environ["E2B_API_KEY"]
    for field, value in [
        ("egressProxy.tls", {"address": "proxy.example:1080", "tls": {"enabled": True}}),
        ("dnsServers", ["8.8.8.8"]),
        ("httpsPorts", [8443]),
    ]:
        answer = edge.api("POST", "/v2/sandboxes", key, json={"templateID": "base", "network": {field.split(".")[0]: value}})
        assert answer.status_code == 400
        assert f"network.{field} is not supported" in answer.json()["message"]


def test_snapshots_of_one_sandbox_are_listed(box):
    snapshot = box.create_snapshot()
    assert snapshot.snapshot_id in [known.snapshot_id for known in box.list_snapshots().next_items()]
    assert Sandbox.delete_snapshot(snapshot.snapshot_id)
