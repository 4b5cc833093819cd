"""sandbox.git: the SDK's own words for commands, which need git in the guest and its messages in English."""

import pathlib

import pytest
from e2b import GitAuthException

from conftest import eventually

pytestmark = pytest.mark.machine

# What every method takes: another user, who has the environment, and a directory that is not the repository.
HOW = {"user": "root", "envs": {"GIT_AUTHOR_DATE": "2020-01-02T03:04:05Z"}, "cwd": "/tmp", "timeout": 120}


class Repositories:
    """git with those options, and files of that user."""

    def __init__(self, sandbox):
        self.sandbox = sandbox

    def __getattr__(self, name):
        method = getattr(self.sandbox.git, name)
        return lambda *arguments, **options: method(*arguments, **options, **HOW)

    def write(self, path, text):
        self.sandbox.files.write(path, text, user="root")

    def read(self, path):
        return self.sandbox.files.read(path, user="root")

    def shell(self, command):
        return self.sandbox.commands.run(command, user="root").stdout.strip()


@pytest.fixture(scope="module")
def git(either):
    return Repositories(either)


def test_a_repository_lives_its_life(git):
    work, remote, copy = "/root/git/work", "/root/git/remote.git", "/root/git/copy"
    git.init(work, initial_branch="main")
    git.init(remote, bare=True, initial_branch="main")
    git.configure_user("A Name", "a@example.com", scope="local", path=work)
    assert git.get_config("user.email", scope="local", path=work) == "a@example.com"
    git.set_config("core.filemode", "false", scope="local", path=work)

    git.write(f"{work}/one.txt", "one")
    git.write(f"{work}/later.txt", "later")
    git.add(work, files=["one.txt"], all=False)
    status = git.status(work)
    assert [(file.name, file.staged) for file in status.file_status if file.staged] == [("one.txt", True)]
    git.commit(work, "first", author_name="B Name", author_email="b@example.com")
    git.add(work, all=True)
    git.commit(work, "second")
    git.commit(work, "nothing", allow_empty=True)
    assert git.status(work).is_clean
    told = git.shell(f"git -C {work} log --reverse --format='%s %an %as'").splitlines()
    assert told == ["first B Name 2020-01-02", "second A Name 2020-01-02", "nothing A Name 2020-01-02"]

    git.remote_add(work, "origin", "/root/git/elsewhere.git")
    git.remote_add(work, "origin", remote, overwrite=True)
    assert git.remote_get(work, "origin") == remote
    git.push(work, remote="origin", branch="main")
    git.remote_add(work, "other", remote, fetch=True)
    git.clone(f"file://{remote}", path=copy, branch="main", depth=1)
    assert git.read(f"{copy}/one.txt") == "one"
    assert git.shell(f"git -C {copy} rev-list --count HEAD") == "1"

    git.create_branch(work, "side")
    assert git.branches(work).current_branch == "side"
    git.checkout_branch(work, "main")
    git.delete_branch(work, "side", force=True)
    assert git.branches(work).branches == ["main"]

    git.write(f"{work}/one.txt", "two")
    git.add(work)
    git.reset(work, paths=["one.txt"])
    git.restore(work, ["one.txt"], worktree=True)
    assert git.read(f"{work}/one.txt") == "one"
    git.write(f"{work}/one.txt", "three")
    git.add(work)
    git.restore(work, ["one.txt"], staged=True, worktree=True, source="HEAD")
    git.reset(work, mode="hard", target="HEAD~1")
    assert git.shell(f"git -C {work} log -1 --format=%s") == "second"

    git.write(f"{work}/two.txt", "two")
    git.add(work)
    git.commit(work, "third")
    git.push(work, remote="other", branch="main:side", set_upstream=False)
    git.pull(work, remote="origin", branch="side")

    git.dangerously_authenticate("me", "pass-word", host="git.example:8123", protocol="http")
    assert git.shell("cat ~/.git-credentials") == "http://me:pass-word@git.example%3a8123"


@pytest.fixture(scope="module")
def behind_a_password(git):
    """The address of a repository with one commit, for those who know the password."""
    # A helper would keep the password for whoever asks next.
    git.shell("git config --global --unset credential.helper; rm -f ~/.git-credentials")
    git.write("/root/git_server.py", (pathlib.Path(__file__).parent / "git_server.py").read_text())
    git.shell(
        "git init -q --bare -b main /root/served/r.git; git clone -q /root/served/r.git /root/first; cd /root/first; "
        "git -c user.name=a -c user.email=a@a commit -qm first --allow-empty; git push -q origin main"
    )
    serve = "exec python3 /root/git_server.py 8123 /root/served me:pass-word"
    handle = git.sandbox.commands.run(serve, background=True, user="root", timeout=0)
    eventually(lambda: git.shell("curl -s -o /dev/null -w '%{http_code}' localhost:8123/ || true") == "401")
    yield "http://localhost:8123/r.git"
    handle.kill()


def test_a_repository_behind_a_password(git, behind_a_password):
    url, known = behind_a_password, {"username": "me", "password": "pass-word"}
    for wrong in ({}, {"username": "me", "password": "wrong"}):
        with pytest.raises(GitAuthException):
            git.clone(url, path="/root/refused", **wrong)
    git.clone(url, path="/root/behind", **known)
    assert git.remote_get("/root/behind", "origin") == url
    git.clone(url, path="/root/kept", dangerously_store_credentials=True, **known)
    assert "me:pass-word@" in git.remote_get("/root/kept", "origin")

    git.write("/root/behind/one.txt", "one")
    git.add("/root/behind")
    git.commit("/root/behind", "second", author_name="B Name", author_email="b@example.com")
    with pytest.raises(GitAuthException):
        git.push("/root/behind", remote="origin", branch="main")
    git.push("/root/behind", remote="origin", branch="main", **known)
    assert git.shell("git -C /root/served/r.git log -1 --format=%s main") == "second"

    git.shell("git clone -q /root/served/r.git /root/later; git -C /root/later remote set-url origin " + url)
    git.shell("git -C /root/later reset -q --hard HEAD~1")
    with pytest.raises(GitAuthException):
        git.pull("/root/later", remote="origin", branch="main")
    git.pull("/root/later", remote="origin", branch="main", **known)
    assert git.read("/root/later/one.txt") == "one"
    # Used once, kept nowhere.
    for path in ("/root/behind", "/root/later"):
        assert git.remote_get(path, "origin") == url
