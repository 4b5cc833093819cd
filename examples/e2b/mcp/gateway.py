#!/usr/bin/env python3
"""The tools of MCP servers behind one address and one token: what `Sandbox.create(mcp=...)` starts in a sandbox.

    GATEWAY_ACCESS_TOKEN=... mcp-gateway --config '{"clock": {"zone": "JST-9"}, "mine": {"runCmd": "python3 mine.py"}}'
    mcp-gateway pull clock

Each server speaks MCP over its standard input and output. It is asked for its tools before the first command ends, so
that a server that does not start is an error of `create`. The gateway stays behind on port 50005 and answers `POST /mcp`.

A server is started as its settings say, or as the catalogue does, a file of the template: by name `runCmd`, `installCmd`
and `envs`, in whose values `${zone}` stands for the setting `zone`. The second command, which
`Template().add_mcp_server("clock")` runs in a build, installs servers of the catalogue beforehand.
"""

import argparse
import hmac
import http.server
import json
import os
import pathlib
import string
import subprocess
import sys
import threading

PORT = 50005
TOKEN_FILE = pathlib.Path("/etc/mcp-gateway/.token")
CATALOGUE_FILE = pathlib.Path("/etc/mcp-gateway/catalogue.json")
INSTALLED_FILE = pathlib.Path("/etc/mcp-gateway/installed")
LOG_FILE = "/var/log/mcp-gateway.log"
VERSION = "2025-06-18"
ABOUT = {"protocolVersion": VERSION, "capabilities": {"tools": {}}, "serverInfo": {"name": "mcp-gateway", "version": "1"}}


def lines_of(file):
    return file.read_text().splitlines() if file.exists() else []


def from_catalogue(name):
    """How a server is started that the client only names."""
    catalogue = json.loads(CATALOGUE_FILE.read_text()) if CATALOGUE_FILE.exists() else {}
    if name not in catalogue:
        known = ", ".join(catalogue) or "nothing"
        sys.exit(f"{name}: the catalogue has no such server, only {known}; say how it is started (runCmd) at create")
    return catalogue[name]


def install(name, command):
    if command and subprocess.run(command, shell=True, stdout=subprocess.DEVNULL).returncode != 0:
        sys.exit(f"{name}: could not be installed: {command}")


def pull(names):
    """Installs servers of the catalogue; a sandbox made from here on need not."""
    for name in names:
        install(name, from_catalogue(name).get("installCmd"))
    INSTALLED_FILE.write_text("\n".join(sorted({*lines_of(INSTALLED_FILE), *names})))


class Server:
    """One MCP server of the configuration."""

    def __init__(self, name, settings):
        environment = {**os.environ, **settings.get("envs", {})}
        command = settings.get("runCmd") or settings.get("run_cmd")
        if command:
            install(name, settings.get("installCmd") or settings.get("install_cmd"))
        else:
            known = from_catalogue(name)
            command = known["runCmd"]
            if name not in lines_of(INSTALLED_FILE):
                install(name, known.get("installCmd"))
            try:
                environment |= {key: string.Template(value).substitute(settings) for key, value in known.get("envs", {}).items()}
            except KeyError as missing:
                sys.exit(f"{name}: the setting {missing} is missing")
        self.name, self.lock, self.count = name, threading.Lock(), 0
        del environment["GATEWAY_ACCESS_TOKEN"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": open(LOG_FILE, "a")}
        self.process = subprocess.Popen(command, shell=True, text=True, env=environment, start_new_session=True, **pipes)
        client = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": ABOUT["serverInfo"]}
        self.ask("initialize", client)
        self.send({"method": "notifications/initialized"})
        self.tools = {tool["name"]: tool for tool in self.ask("tools/list", {})["result"]["tools"]}

    def send(self, message):
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        self.process.stdin.flush()

    def ask(self, method, parameters):
        with self.lock:
            self.count += 1
            try:
                self.send({"id": self.count, "method": method, "params": parameters})
            except BrokenPipeError:
                pass
            for line in self.process.stdout:
                answer = json.loads(line)
                if answer.get("id") == self.count and "method" not in answer:
                    return answer
            raise EOFError(f"{self.name}: the server ended with {self.process.wait()}; its words are in {LOG_FILE}")


def answer_to(servers, method, parameters):
    """The result of a request, or its error."""
    owners = {tool: server for server in servers for tool in server.tools}
    if method == "initialize":
        return {"result": ABOUT}
    if method == "ping":
        return {"result": {}}
    if method == "tools/list":
        return {"result": {"tools": [server.tools[tool] for tool, server in owners.items()]}}
    if method == "tools/call" and parameters.get("name") in owners:
        answer = owners[parameters["name"]].ask(method, parameters)
        return {key: answer[key] for key in ("result", "error") if key in answer}
    if method == "tools/call":
        return {"error": {"code": -32602, "message": f"no tool {parameters.get('name')!r}"}}
    return {"error": {"code": -32601, "message": f"no method {method!r}"}}


def handler(servers, token):
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            given = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), token.encode()):
                return self.reply(401, {"error": "the token is missing or wrong"})
            if self.path != "/mcp":
                return self.reply(404, {"error": "the gateway is at /mcp"})
            request = json.loads(body)
            if "id" not in request:
                return self.reply(202, None)
            try:
                answer = answer_to(servers, request["method"], request.get("params", {}))
            except EOFError as error:
                answer = {"error": {"code": -32603, "message": str(error)}}
            self.reply(200, {"jsonrpc": "2.0", "id": request["id"], **answer})

        def reply(self, status, value):
            body = b"" if value is None else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def stay_behind():
    """The command ends here; what follows it serves."""
    if os.fork():
        os._exit(0)
    os.setsid()
    nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(LOG_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for number, file in enumerate([nothing, log, log]):
        os.dup2(file, number)


def main():
    if sys.argv[1:2] == ["pull"]:
        return pull(sys.argv[2:])
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True, type=json.loads)
    token = os.environ["GATEWAY_ACCESS_TOKEN"]
    try:
        servers = [Server(name, settings) for name, settings in parser.parse_args().config.items()]
    except EOFError as error:
        sys.exit(str(error))
    TOKEN_FILE.parent.mkdir(exist_ok=True)
    TOKEN_FILE.touch(0o600)
    TOKEN_FILE.write_text(token)
    # Bound before the command ends: who is told that it has, finds it.
    with http.server.ThreadingHTTPServer(("", PORT), handler(servers, token)) as gateway:
        stay_behind()
        gateway.serve_forever()


main()
