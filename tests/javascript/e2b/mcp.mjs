// Sandbox.create({ mcp }): the client starts a gateway, from a template that whoever runs the server has built.
import assert from "node:assert/strict";
import { fileURLToPath } from "node:url";
import { NotFoundError, Sandbox, Template } from "e2b";
import { test } from "./compat.mjs";

// From here, and from where `make test` copies this.
const EXAMPLE = fileURLToPath(new URL("../../../examples/e2b/mcp", import.meta.url));
const user = "root";

export default function mcp(box) {
  test("without a template that has a gateway it is said what to do", async () => {
    const servers = { exa: { apiKey: "k" } };
    await assert.rejects(Sandbox.create({ mcp: servers }), /template 'mcp-gateway' not found: build one/);
    await assert.rejects(Sandbox.create("base", { mcp: servers }), /mcp-gateway: command not found/);
    assert.equal(box().getMcpUrl(), `https://${box().getHost(50005)}/mcp`);
    await assert.rejects(box().getMcpToken(), NotFoundError);
  });

  test("MCP servers that the client names are there under its address", async () => {
    const template = Template({ fileContextPath: EXAMPLE })
      .fromTemplate("base")
      .copy("gateway.py", "/usr/local/bin/mcp-gateway", { user, mode: 0o755 })
      .copy("clock.py", "/opt/clock.py", { user });
    await Template.build(template, "mcp-gateway");
    const clock = { runCmd: "python3 /opt/clock.py", envs: { TZ: "JST-9" } };
    const sandbox = await Sandbox.create({ mcp: { clock } });
    const body = { jsonrpc: "2.0", id: 1, method: "tools/call", params: { name: "today", arguments: {} } };
    const ask = (token) =>
      fetch(sandbox.getMcpUrl(), { method: "POST", body: JSON.stringify(body), headers: { Authorization: `Bearer ${token}` } });
    const { result } = await (await ask(await sandbox.getMcpToken())).json();
    assert.match(result.content[0].text, / JST$/);
    assert.equal((await ask("wrong")).status, 401);
    const other = await Sandbox.connect(sandbox.sandboxId);
    assert.equal(await other.getMcpToken(), await sandbox.getMcpToken());
    await sandbox.kill();
    await assert.rejects(Sandbox.create({ mcp: { exa: { apiKey: "k" } } }), /exa: there is no catalogue of servers/);
  });
}
