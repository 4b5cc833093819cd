"""sandbox.get_host: servers in the guest, from outside."""

import socket

import pytest

from conftest import eventually

PORT = 18_931
SERVER = f"""
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = (self.path + "|" + self.headers["Host"]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Mine", "yes")
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        left = int(self.headers["Content-Length"])
        total = 0
        while left:
            part = self.rfile.read(min(left, 65536))
            left -= len(part)
            total += sum(part)
        body = str(total).encode()
        self.send_response(201)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", {PORT}), Handler).serve_forever()
"""

# Answers any handshake by the book and then echoes the payload of short masked frames.
WEB_SOCKET = f"""
import base64, hashlib, socket
server = socket.create_server(("127.0.0.1", {PORT + 1}))
client, _ = server.accept()
head = b""
while b"\\r\\n\\r\\n" not in head:
    head += client.recv(4096)
key = [l.split(b": ")[1] for l in head.split(b"\\r\\n") if l.lower().startswith(b"sec-websocket-key")][0]
accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
client.sendall(b"HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\n"
    b"Sec-WebSocket-Accept: " + accept + b"\\r\\n\\r\\n")
while True:
    two = client.recv(2)
    if len(two) < 2 or two[0] & 15 == 8:
        break
    size = two[1] & 127
    rest = b""
    while len(rest) < 4 + size:
        rest += client.recv(4 + size - len(rest))
    data = bytes(b ^ rest[i % 4] for i, b in enumerate(rest[4:]))
    client.sendall(bytes([0x81, size]) + data)
"""


@pytest.fixture(scope="module")
def served(box):
    box.files.write("/tmp/e2b-suite-server.py", SERVER)
    handle = box.commands.run("exec python3 /tmp/e2b-suite-server.py", background=True, timeout=0)
    yield box.get_host(PORT)
    handle.kill()


def test_a_server_in_the_guest_is_reached_even_while_it_starts(served, edge):
    answer = eventually(lambda: (a := edge.request("GET", served, "/some/path?q=1")).status_code == 200 and a)
    assert answer.text == f"/some/path?q=1|{served}"
    assert answer.headers["x-mine"] == "yes"


def test_without_public_traffic_a_port_takes_the_token_and_its_server_sees_the_masked_host(make, edge):
    box = make(network={"allow_public_traffic": False, "mask_request_host": "localhost:${PORT}"})
    box.files.write("/tmp/e2b-suite-server.py", SERVER)
    box.commands.run("exec python3 /tmp/e2b-suite-server.py", background=True, timeout=0)
    host, headers = box.get_host(PORT), {"e2b-traffic-access-token": box.traffic_access_token}
    answer = eventually(lambda: (a := edge.request("GET", host, "/x", headers=headers)).status_code == 200 and a)
    assert answer.text == f"/x|localhost:{PORT}"
    assert edge.request("GET", host).status_code == 403
    assert edge.request("GET", host, headers={"e2b-traffic-access-token": "wrong"}).status_code == 403


def test_bodies_stream_in(served, edge):
    eventually(lambda: edge.request("GET", served).status_code == 200)
    data = bytes(range(256)) * 20_000
    answer = edge.request("POST", served, "/", content=data)
    assert (answer.status_code, answer.text) == (201, str(sum(data)))


def test_a_closed_port_and_a_dead_sandbox_are_told_apart(box, make, edge):
    closed = edge.request("GET", box.get_host(9))
    assert closed.status_code == 502
    assert closed.json() == {
        "sandboxId": box.sandbox_id,
        "message": "The sandbox is running but port is not open",
        "port": 9,
        "code": 502,
    }
    dead = make()
    dead.kill()
    gone = edge.request("GET", dead.get_host(9))
    assert (gone.status_code, gone.json()["message"]) == (502, "The sandbox was not found")
    page = edge.request("GET", dead.get_host(9), headers={"User-Agent": "Mozilla/5.0", "Accept": "text/html"})
    assert page.headers["content-type"].startswith("text/html")
    assert "was not found" in page.text
    never = edge.request("GET", f"80-nosuchsandbox.{edge.domain}")
    assert never.json()["message"] == "The sandbox was not found"


def test_web_sockets(box, edge):
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    box.files.write("/tmp/e2b-suite-ws.py", WEB_SOCKET)
    handle = box.commands.run("exec python3 /tmp/e2b-suite-ws.py", background=True, timeout=0)
    host = box.get_host(PORT + 1)

    def open_it():
        raw = socket.create_connection(("127.0.0.1", edge.port))
        try:
            return connect(f"wss://{host}/", sock=raw, ssl=edge.context, open_timeout=60)
        except InvalidStatus:
            return None

    with eventually(open_it) as web_socket:
        for text in ("hello", "again"):
            web_socket.send(text)
            assert web_socket.recv(timeout=60) == text
    handle.kill()


def test_browsers_may_call_from_anywhere(box, edge):
    headers = {
        "Origin": "https://somewhere.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "x-access-token",
    }
    answer = edge.request("OPTIONS", box.get_host(49983), "/files", headers=headers)
    assert answer.headers["access-control-allow-origin"] == "*"
