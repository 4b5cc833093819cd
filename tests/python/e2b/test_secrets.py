"""Secrets: written, never read back, and put into headers outside of the sandbox."""

import asyncio
import json
import os
import uuid

import pytest

WORLD = os.environ.get("STOCKADE_TEST_HOST")


@pytest.fixture
def name(server):
    from e2b import Secret

    name = f"suite-{uuid.uuid4().hex}"
    yield name
    Secret.destroy(name)


def test_a_secret_from_its_creation_to_its_end(name):
    from e2b import Secret

    made = Secret.create(name, "value-one", metadata={"team": "red"})
    assert made.secret_id.startswith("sec_") and len(made.secret_id) == 30
    assert (made.name, made.version, made.metadata) == (name, 1, {"team": "red"})
    assert Secret.get_info(name) == Secret.get_info(made.secret_id) == made
    assert Secret.exists(name) and Secret.exists(made.secret_id)

    second = Secret.update(name, "value-two")
    assert (second.secret_id, second.version, second.metadata) == (made.secret_id, 2, {"team": "red"})
    assert second.created_at == made.created_at and second.updated_at >= made.updated_at
    third = Secret.update(made.secret_id, "value-three", metadata={})
    assert (third.version, third.metadata) == (3, {})

    assert Secret.destroy(made.secret_id) is True
    assert Secret.destroy(made.secret_id) is False
    assert not Secret.exists(name)


def test_names_are_kept_in_lower_case_and_found_in_either(name):
    from e2b import Secret

    assert Secret.create(name.upper(), "value").name == name
    assert Secret.get_info(name.upper()).name == name


def test_what_is_wrong_with_a_secret_is_said(name):
    from e2b import Secret
    from e2b.exceptions import SecretException, SecretNotFoundException

    with pytest.raises(SecretNotFoundException):
        Secret.get_info(name)
    with pytest.raises(SecretNotFoundException):
        Secret.update(name, "value")
    Secret.create(name, "value-one")
    with pytest.raises(SecretException, match="409.*already"):
        Secret.create(name, "value-two")
    assert Secret.get_info(name).version == 1
    for bad in ("a.b", "a b", "sec_mine", "a" * 129):
        with pytest.raises(SecretException, match="400.*name"):
            Secret.create(bad, "value")
    with pytest.raises(SecretException, match="400.*value"):
        Secret.update(name, "two\nlines")
    with pytest.raises(SecretException, match="400.*metadata"):
        Secret.update(name, "value", metadata={"key": "x" * 1025})


def test_lists_come_page_by_page(server):
    from e2b import Secret

    names = sorted(f"suite-{uuid.uuid4().hex}" for _ in range(3))
    try:
        for name in names:
            Secret.create(name, "value")
        pages, listed = Secret.list(limit=2), []
        while pages.has_next:
            items = pages.next_items()
            assert len(items) <= 2
            listed += [secret.name for secret in items]
        assert [name for name in listed if name in names] == names
    finally:
        for name in names:
            Secret.destroy(name)


def test_the_async_client_does_the_same(name):
    from e2b import AsyncSecret

    async def story():
        made = await AsyncSecret.create(name, "value")
        assert (await AsyncSecret.update(name, "next")).version == 2
        assert (await AsyncSecret.get_info(made.secret_id)).name == name
        pages = AsyncSecret.list()
        assert name in [secret.name for secret in await pages.next_items()]
        assert await AsyncSecret.exists(name)
        assert await AsyncSecret.destroy(name)
        assert AsyncSecret.fill(name) == "${e2b.secrets." + name + "}"

    asyncio.run(story())


@pytest.mark.machine
@pytest.mark.skipif(not WORLD, reason="needs a host that shows requests: STOCKADE_TEST_HOST")
def test_a_placeholder_in_a_header_becomes_the_value_outside_of_the_sandbox(name, make):
    from e2b import Secret

    def headers(sandbox):
        answer = sandbox.commands.run(f"curl -sS --max-time 60 https://{WORLD}/echo").stdout
        return json.loads(answer)["headers"]

    Secret.create(name, "value-of-the-secret-1")
    # As it is spelled, or not.
    bearer = f"Bearer {Secret.fill(name.upper())}"
    rules = {WORLD: [{"transform": {"headers": {"Authorization": bearer, "X-Plain": "$5"}}}]}
    sandbox = make(network={"rules": rules})
    seen = headers(sandbox)
    assert (seen["authorization"], seen["x-plain"]) == ("Bearer value-of-the-secret-1", "$5")
    assert "value-of-the-secret" not in sandbox.commands.run("env; sudo cat /proc/[0-9]*/environ | tr '\\0' '\\n'").stdout

    # The next value is used at once, in a sandbox that is there already.
    Secret.update(name, "value-of-the-secret-2")
    assert headers(sandbox)["authorization"] == "Bearer value-of-the-secret-2"

    sandbox.update_network({"rules": {WORLD: [{"transform": {"headers": {"X-Key": Secret.fill(name)}}}]}})
    seen = headers(sandbox)
    assert seen["x-key"] == "value-of-the-secret-2" and "authorization" not in seen

    # Without its secret a request is not sent.
    Secret.destroy(name)
    answer = sandbox.commands.run(f"curl -sS --max-time 60 -w '%{{http_code}}' https://{WORLD}/echo").stdout
    assert answer.endswith("502") and "secret" in answer
