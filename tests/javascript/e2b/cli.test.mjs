// E2B's own command line, as it comes from npm.
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { existsSync } from "node:fs";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

const run = promisify(execFile);
const here = dirname(fileURLToPath(import.meta.url));
const program = join(here, "node_modules/.bin/e2b");
// It has releases of its own: the newest is tried, beside the newest SDK.
const where = { skip: existsSync(program) ? false : "the CLI is not installed here" };
let home;
before(async () => {
  home = await mkdtemp(join(tmpdir(), "e2b-cli-"));
});
after(() => rm(home, { recursive: true }));

/// What it prints; it fails where the command does.
async function e2b(...args) {
  const names = `--require ${join(here, "localhost.cjs")}`;
  const environment = { ...process.env, HOME: home, NODE_OPTIONS: names, NO_COLOR: "1" };
  const running = run(program, args, { env: environment, timeout: 300_000 });
  running.child.stdin.end();
  return (await running).stdout;
}

test("a sandbox from its creation to its end", where, async () => {
  const id = (await e2b("sandbox", "create", "base", "--detach", "--timeout", "300")).trim();
  const listed = JSON.parse(await e2b("sandbox", "list", "--format", "json"));
  assert.ok(listed.some((sandbox) => sandbox.sandboxId === id));
  assert.match(await e2b("sandbox", "info", id), new RegExp(id));
  assert.equal(await e2b("sandbox", "exec", "-e", "X=1 2", id, "--", "sh", "-c", "echo $X; id -un"), "1 2\nuser\n");
  await assert.rejects(e2b("sandbox", "exec", id, "--", "sh", "-c", "exit 3"), (error) => error.code === 3);
  await e2b("sandbox", "pause", id);
  await e2b("sandbox", "resume", id);
  assert.match(await e2b("sandbox", "metrics", id), /CPU/);
  const log = await e2b("sandbox", "logs", "--format", "json", id);
  const messages = log.split("\n").filter((line) => line.startsWith("{")).map((line) => JSON.parse(line).message);
  assert.equal(messages[0], "sandbox is creating");
  assert.ok(messages.includes("sandbox is paused (hibernated)"), log);
  await e2b("sandbox", "kill", id);
  assert.doesNotMatch(await e2b("sandbox", "list", "--format", "json"), new RegExp(id));
  assert.match(await e2b("sandbox", "logs", "--format", "json", id), /sandbox is gone/);
});

test("a template from a Dockerfile", where, async () => {
  const name = `cli-${Date.now()}`;
  await writeFile(join(home, "Dockerfile"), "FROM e2bdev/base\nRUN echo made > /home/user/made\n");
  await e2b("template", "create", name, "--path", home, "--memory-mb", "1024", "--cpu-count", "2");
  assert.match(await e2b("template", "list", "--format", "json"), new RegExp(name));
  const id = (await e2b("sandbox", "create", name, "--detach")).trim();
  assert.equal(await e2b("sandbox", "exec", id, "--", "cat", "/home/user/made"), "made\n");
  await e2b("sandbox", "kill", id);
  await e2b("template", "delete", name, "--yes");
  assert.doesNotMatch(await e2b("template", "list", "--format", "json"), new RegExp(name));
});
