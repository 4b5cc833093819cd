"""sandbox.git: the SDK's own words for commands, which need git in the guest and its messages in English."""

import pytest

pytestmark = pytest.mark.machine


def test_a_repository_lives_its_life(box, place):
    git = box.git
    work, remote, copy = f"{place}/work", f"{place}/remote.git", f"{place}/copy"
    git.init(work, initial_branch="main")
    git.init(remote, bare=True, initial_branch="main")
    git.configure_user("A Name", "a@example.com", scope="local", path=work)
    assert git.get_config("user.email", scope="local", path=work) == "a@example.com"
    git.set_config("core.filemode", "false", scope="local", path=work)

    box.files.write(f"{work}/one.txt", "one")
    assert not git.status(work).is_clean
    git.add(work)
    git.commit(work, "first")
    assert git.status(work).is_clean

    git.remote_add(work, "origin", remote)
    assert git.remote_get(work, "origin") == remote
    git.push(work, remote="origin", branch="main", set_upstream=True)
    git.clone(remote, path=copy)
    assert box.files.read(f"{copy}/one.txt") == "one"

    git.create_branch(work, "side")
    assert git.branches(work).current_branch == "side"
    git.checkout_branch(work, "main")
    git.delete_branch(work, "side", force=True)
    assert git.branches(work).branches == ["main"]

    box.files.write(f"{work}/one.txt", "two")
    git.add(work)
    git.reset(work)
    git.restore(work, ["one.txt"])
    assert box.files.read(f"{work}/one.txt") == "one"

    box.files.write(f"{work}/two.txt", "two")
    git.add(work)
    git.commit(work, "second")
    git.push(work, remote="origin", branch="main")
    git.pull(copy)
    assert box.files.read(f"{copy}/two.txt") == "two"
