"""An MCP server over standard input and output, with one tool: the date, in the zone its environment names (TZ)."""

import json
import sys
import time

TOOL = {"name": "today", "description": "The date.", "inputSchema": {"type": "object", "properties": {}}}


def result(method):
    if method == "initialize":
        about = {"name": "clock", "version": "1"}
        return {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list":
        return {"tools": [TOOL]}
    return {"content": [{"type": "text", "text": time.strftime("%Y-%m-%d %Z")}]}


for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result(request["method"])}), flush=True)
