"""A server for the suite, and sandboxes on it."""

import json
import os
import pathlib
import subprocess
import time
import types
import uuid

import pytest

START_PATIENCE_S = 900  # a first start builds the base template


def _wait_ready(process, ready, log):
    deadline = time.monotonic() + START_PATIENCE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.exit(f"the server ended with {process.returncode}; its log is {log}")
        if ready.exists():
            return json.loads(ready.read_text())
        time.sleep(0.05)
    pytest.exit(f"the server was not ready after {START_PATIENCE_S} s; its log is {log}")


def _start(command, data_dir):
    data_dir.mkdir(parents=True, exist_ok=True)
    ready = data_dir / "ready.json"
    ready.unlink(missing_ok=True)
    log = data_dir / "test-server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    return process, _wait_ready(process, ready, log)


@pytest.fixture(scope="session", autouse=True)
def server(tmp_path_factory):
    """The environment of the SDK, set for the whole session."""
    if os.environ.get("E2B_DOMAIN"):
        yield {}
        return
    data_dir = pathlib.Path(os.environ.get("STOCKADE_DATA_DIR") or tmp_path_factory.mktemp("data"))
    if binary := os.environ.get("STOCKADE_BIN"):
        command = [binary, "up", "--data-dir", data_dir, "--http", "127.0.0.1:0", "--https", "127.0.0.1:0"]
        command += ["--base-domain", "stockade.localhost"]
    elif binary := os.environ.get("STOCKADE_FAKE_SERVER"):
        command = [binary, data_dir]
    else:
        pytest.exit("name a server: E2B_DOMAIN and E2B_API_KEY, STOCKADE_BIN, or STOCKADE_FAKE_SERVER")
    process, facts = _start([str(part) for part in command], data_dir)
    port = facts["https_url"].rsplit(":", 1)[1].strip("/")
    os.environ["E2B_DOMAIN"] = f"e2b.{facts['base_domain']}:{port}"
    os.environ["E2B_API_KEY"] = pathlib.Path(facts["api_key_file"]).read_text().strip()
    os.environ["SSL_CERT_FILE"] = str(facts["ca_file"])
    yield facts
    process.terminate()
    process.wait(timeout=60)


def is_fake():
    return bool(os.environ.get("STOCKADE_FAKE_SERVER")) and not os.environ.get("STOCKADE_BIN")


def is_current():
    import importlib.metadata

    major, minor, *_ = importlib.metadata.version("e2b").split(".")
    return (int(major), int(minor)) > (2, 45)


def pytest_collection_modifyitems(items):
    # Others see that there is no template for MCP servers, which these build.
    items.sort(key=lambda item: item.path.name == "test_mcp.py")
    for item in items:
        if is_fake() and item.get_closest_marker("machine"):
            item.add_marker(pytest.mark.skip(reason="there is no machine behind the fake server"))
        if not is_current() and item.get_closest_marker("current"):
            item.add_marker(pytest.mark.skip(reason="this SDK release does not have it"))


@pytest.fixture(scope="module")
def box(server):
    """A sandbox that the tests of a module share."""
    from e2b import Sandbox

    sandbox = Sandbox.create(timeout=600)
    yield sandbox
    sandbox.kill()


@pytest.fixture(scope="module", params=["sync", "async"])
def sdk(server, request):
    """The SDK's classes, by their synchronous names; a test that takes them runs with either client."""
    import e2b
    from blocking import Blocking

    names = [name for name in ("Sandbox", "Template", "Volume", "Secret") if hasattr(e2b, name)]
    if request.param == "sync":
        return types.SimpleNamespace(**{name: getattr(e2b, name) for name in names})
    return types.SimpleNamespace(**{name: Blocking(getattr(e2b, f"Async{name}")) for name in names})


@pytest.fixture(scope="module")
def either(sdk):
    """A sandbox that the tests of a module share, of the client it is looked at with."""
    sandbox = sdk.Sandbox.create(timeout=600)
    yield sandbox
    sandbox.kill()


@pytest.fixture
def make(server):
    """Makes sandboxes of the test's own."""
    from e2b import Sandbox

    made = []

    def create(*args, **kwargs):
        made.append(Sandbox.create(*args, **{"timeout": 300, **kwargs}))
        return made[-1]

    yield create
    for sandbox in made:
        sandbox.kill()


@pytest.fixture
def place(box):
    """A directory in the shared sandbox that nobody else uses."""
    path = f"/tmp/e2b-suite/{uuid.uuid4().hex}"
    box.files.make_dir(path)
    yield path
    box.files.remove(path)


@pytest.fixture(scope="session")
def edge(server):
    """Plain HTTPS to a host name of the server, whatever the system's resolver says."""
    return Edge(os.environ["E2B_DOMAIN"], os.environ.get("SSL_CERT_FILE"))


class Edge:
    def __init__(self, domain, ca_file):
        import ssl

        self.domain = domain
        self.port = int(domain.rsplit(":", 1)[1]) if ":" in domain else 443
        self.context = ssl.create_default_context(cafile=ca_file)

    def request(self, method, host, path="/", **kwargs):
        import httpx

        name = host.rsplit(":", 1)[0]
        headers = {"Host": host, **kwargs.pop("headers", {})}
        with httpx.Client(verify=self.context, timeout=60) as client:
            url = f"https://127.0.0.1:{self.port}{path}"
            return client.request(method, url, headers=headers, extensions={"sni_hostname": name}, **kwargs)

    def api(self, method, path, key=None, **kwargs):
        headers = {"X-API-Key": key} if key else {}
        headers.update(kwargs.pop("headers", {}))
        return self.request(method, f"api.{self.domain}", path, headers=headers, **kwargs)

    def get_url(self, url):
        """GETs a whole URL, as a signed one is."""
        host, _, path = url.removeprefix("https://").partition("/")
        return self.request("GET", host, f"/{path}")


def eventually(condition, patience_s=60):
    """Waits for a condition and returns what it gave."""
    deadline = time.monotonic() + patience_s
    while True:
        if result := condition():
            return result
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {patience_s} s")
        time.sleep(0.05)
