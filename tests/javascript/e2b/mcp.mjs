// Sandbox.create({ mcp }): the client starts a gateway, from a template that whoever runs the server has built.
import assert from "node:assert/strict";
import { fileURLToPath } from "node:url";
import { NotFoundError, Sandbox, Template } from "e2b";
import { test } from "./compat.mjs";

// From here, and from where `make test` copies this.
const EXAMPLE = fileURLToPath(new URL("../../../examples/e2b/mcp", import.meta.url));
const UNKNOWN = /exa: the catalogue has no such server, only clock/;

function gateway() {
  const user = "root";
  return Template({ fileContextPath: EXAMPLE })
    .fromTemplate("base")
    .copy("gateway.py", "/usr/local/bin/mcp-gateway", { user, mode: 0o755 })
    .copy("catalogue.json", "/etc/mcp-gateway/catalogue.json", { user })
    .copy("clock.py", "/opt/clock.py", { user });
}

function ask(sandbox, token) {
  const body = { jsonrpc: "2.0", id: 1, method: "tools/call", params: { name: "today", arguments: {} } };
  const headers = { Authorization: `Bearer ${token}` };
  return fetch(sandbox.getMcpUrl(), { method: "POST", body: JSON.stringify(body), headers });
}

async function today(sandbox) {
  const { result } = await (await ask(sandbox, await sandbox.getMcpToken())).json();
  return result.content[0].text;
}

export default function mcp(box) {
  test("without a template that has a gateway it is said what to do", async () => {
    const servers = { exa: { apiKey: "k" } };
    await assert.rejects(Sandbox.create({ mcp: servers }), /template 'mcp-gateway' not found: build one/);
    await assert.rejects(Sandbox.create("base", { mcp: servers }), /mcp-gateway: command not found/);
    assert.equal(box().getMcpUrl(), `https://${box().getHost(50005)}/mcp`);
    await assert.rejects(box().getMcpToken(), NotFoundError);
  });

  test("MCP servers that the client names are there under its address", async () => {
    await Template.build(gateway(), "mcp-gateway");
    const clock = { runCmd: "python3 /opt/clock.py", envs: { TZ: "JST-9" } };
    const sandbox = await Sandbox.create({ mcp: { clock } });
    assert.match(await today(sandbox), / JST$/);
    assert.equal((await ask(sandbox, "wrong")).status, 401);
    const other = await Sandbox.connect(sandbox.sandboxId);
    assert.equal(await other.getMcpToken(), await sandbox.getMcpToken());
    await sandbox.kill();
    await assert.rejects(Sandbox.create({ mcp: { exa: { apiKey: "k" } } }), UNKNOWN);
  });

  test("MCP servers of the gateway's catalogue are put into templates by name", async () => {
    const withClock = `js-mcp-${crypto.randomUUID()}`;
    await Template.build(Template().fromTemplate("mcp-gateway").addMcpServer(["clock"]), withClock);
    const sandbox = await Sandbox.create(withClock, { mcp: { clock: { zone: "JST-9" } } });
    assert.equal(await sandbox.files.read("/etc/mcp-gateway/installed"), "clock");
    assert.match(await today(sandbox), / JST$/);
    await sandbox.kill();
    const log = [];
    const unknown = Template.build(Template().fromTemplate("mcp-gateway").addMcpServer("exa"), `${withClock}-exa`, {
      onBuildLogs: (entry) => log.push(entry.message),
    });
    await assert.rejects(unknown, /failed to run command 'mcp-gateway pull exa'/);
    assert.match(log.join("\n"), UNKNOWN);
    assert.throws(() => Template().fromTemplate("base").addMcpServer("clock"), /only be added to mcp-gateway template/);
  });
}
