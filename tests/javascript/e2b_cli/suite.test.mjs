// E2B's own command line, as it comes from npm.
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { mkdir, mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { after } from "node:test";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { coversProgram, has, test, uses } from "./compat.mjs";

const run = promisify(execFile);
const here = dirname(fileURLToPath(import.meta.url));
const program = join(here, "node_modules/.bin/e2b");
const home = await mkdtemp(join(tmpdir(), "e2b-cli-"));
after(() => rm(home, { recursive: true }));
await coversProgram(join(here, "node_modules/@e2b/cli/package.json"), e2b);
// With them came options for terminals.
const hasSnapshots = has("sandbox snapshot create");

/** What a command prints; it fails where the command does. */
async function e2b(...args) {
  uses(args);
  return printed(program, args);
}

/** The same at a terminal at which `lines` are typed. */
async function e2bAtTerminal(lines, ...args) {
  uses(args);
  return printed("script", ["--quiet", "--return", "--command", [program, ...args].join(" "), "/dev/null"], lines);
}

async function printed(file, args, typed = "") {
  const names = `--require ${join(here, "localhost.cjs")}`;
  const environment = { ...process.env, HOME: home, NODE_OPTIONS: names, NO_COLOR: "1" };
  const running = run(file, args, { env: environment, timeout: 300_000 });
  running.child.stdin.end(typed);
  return (await running).stdout;
}

/** A new sandbox's id, which older releases tell in a sentence. */
async function created(...args) {
  return (await e2b("sandbox", "create", ...args, "--detach")).match(/\bsbx\w{20}\b/)[0];
}

test("a sandbox from its creation to its end", async () => {
  const id = await created("base", "--timeout", "300");
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

test("terminals", async () => {
  const asks = "echo $X-$((40+2))-$(id -un)-$(pwd)\nexit\n";
  const made = await e2bAtTerminal(asks, "sandbox", "create", "base");
  assert.match(made, /-42-user-\/home\/user/);
  const id = await created("base");
  const options = hasSnapshots ? ["-u", "root", "-c", "/tmp", "-e", "X=1"] : [];
  const expected = hasSnapshots ? /1-42-root-\/tmp/ : /-42-user-\/home\/user/;
  assert.match(await e2bAtTerminal(asks, "sandbox", "connect", ...options, id), expected);
  await e2b("sandbox", "kill", id);
});

test("snapshots", async (context) => {
  if (!hasSnapshots) return context.skip("this release does not have them");
  const id = await created("base");
  const [snapshot] = (await e2b("sandbox", "snapshot", "create", id)).match(/snap\w{10,}/);
  assert.match(await e2b("sandbox", "snapshot", "list", id), new RegExp(snapshot));
  await e2b("sandbox", "snapshot", "delete", snapshot);
  assert.doesNotMatch(await e2b("sandbox", "snapshot", "list", id), new RegExp(snapshot));
  await e2b("sandbox", "kill", id);
});

test("a template's files, made anew and of an older form", async () => {
  const old = join(home, "old");
  await mkdir(old);
  await writeFile(join(old, "e2b.Dockerfile"), "FROM e2bdev/base\nRUN echo made\n");
  const language = ["--language", "typescript", "--path"];
  await e2b("template", "migrate", "--name", "moved", ...language, old);
  assert.match(await readFile(join(old, "template.ts"), "utf8"), /fromImage\(["']e2bdev\/base["']\)[^]*echo made/);
  await e2b("template", "init", "--name", "made", ...language, home);
  assert.match(await readFile(join(home, "made/template.ts"), "utf8"), /Template\(\)/);
});

test("templates are nobody's to publish", async () => {
  for (const way of ["publish", "unpublish"]) {
    await assert.rejects(e2b("template", way, "base", "--yes"), (error) => {
      assert.match(error.stderr, /publishing templates and changing them .* not supported/);
      return error.code === 1;
    });
  }
});

test("a template from a Dockerfile", async () => {
  const name = `cli-${Date.now()}`;
  await writeFile(join(home, "Dockerfile"), "FROM e2bdev/base\nRUN echo made > /home/user/made\n");
  await e2b("template", "create", name, "--path", home, "--memory-mb", "1024", "--cpu-count", "2");
  assert.match(await e2b("template", "list", "--format", "json"), new RegExp(name));
  const id = await created(name);
  assert.equal(await e2b("sandbox", "exec", id, "--", "cat", "/home/user/made"), "made\n");
  await e2b("sandbox", "kill", id);
  await e2b("template", "delete", name, "--yes");
  assert.doesNotMatch(await e2b("template", "list", "--format", "json"), new RegExp(name));
});
