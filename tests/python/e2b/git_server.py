"""Repositories over HTTP, behind a name and a password: what git itself brings for that, and a guard before it.

    python3 git_server.py PORT DIRECTORY NAME:PASSWORD
"""

import base64
import http.server
import subprocess
import sys

PORT, DIRECTORY, KNOWN = sys.argv[1:]
TOLD = "Basic " + base64.b64encode(KNOWN.encode()).decode()


class Guarded(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(b"")

    def do_POST(self):
        self.answer(self.rfile.read(int(self.headers["Content-Length"])))

    def answer(self, body):
        if self.headers.get("Authorization") != TOLD:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="repositories"')
            self.end_headers()
            return
        path, _, query = self.path.partition("?")
        environment = {
            "GIT_PROJECT_ROOT": DIRECTORY,
            "GIT_HTTP_EXPORT_ALL": "1",
            "REMOTE_USER": KNOWN.partition(":")[0],
            "REQUEST_METHOD": self.command,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
        }
        ended = subprocess.run(["git", "http-backend"], input=body, env=environment, capture_output=True, check=True)
        head, _, rest = ended.stdout.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().splitlines())
        self.send_response(int(headers.pop("Status", "200").split()[0]))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(rest)


http.server.ThreadingHTTPServer(("", int(PORT)), Guarded).serve_forever()
