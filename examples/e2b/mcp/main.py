"""Makes the template `mcp-gateway`, then a sandbox with an MCP server, and asks it for the date."""

import json
import os
import ssl
import urllib.request

from e2b import Sandbox, Template

HERE = os.path.dirname(os.path.abspath(__file__))

TEMPLATE = (
    Template(file_context_path=HERE)
    .from_template("base")
    .copy("gateway.py", "/usr/local/bin/mcp-gateway", user="root", mode=0o755)
    .copy("catalogue.json", "/etc/mcp-gateway/catalogue.json", user="root")
    .copy("clock.py", "/opt/clock.py", user="root")
)


def ask(sandbox, method, **parameters):
    request = urllib.request.Request(
        sandbox.get_mcp_url(),
        json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": parameters}).encode(),
        {"Authorization": f"Bearer {sandbox.get_mcp_token()}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, context=ssl.create_default_context()) as answer:
        return json.load(answer)["result"]


if __name__ == "__main__":
    Template.build(TEMPLATE, "mcp-gateway")
    with Sandbox.create(mcp={"clock": {"zone": "JST-9"}}) as sandbox:
        for tool in ask(sandbox, "tools/list")["tools"]:
            print(tool["name"], ask(sandbox, "tools/call", name=tool["name"], arguments={})["content"][0]["text"])
