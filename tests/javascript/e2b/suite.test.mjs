import assert from "node:assert/strict";
import { after, before } from "node:test";
import {
  AuthenticationError,
  CommandExitError,
  Git,
  NotFoundError,
  Sandbox,
  Secret,
  SecretError,
  SecretNotFoundError,
  Template,
  TemplateBase,
  TimeoutError,
  Volume,
} from "e2b";
import { covers, test } from "./compat.mjs";
import git from "./git.mjs";
import mcp from "./mcp.mjs";
import options from "./options.mjs";
import refused from "./refused.mjs";
import templates, { READY, START } from "./templates.mjs";

const RETURNED = ["CommandHandle", "SandboxPaginator", "SecretPaginator", "SnapshotPaginator", "WatchHandle"];

// Not exported by name; nothing is sent by this.
const { commands, files, pty } = new Sandbox({ sandboxId: "none", envdVersion: "0.6.13" });
await covers(
  "e2b",
  {
    Sandbox: [Sandbox, Object.getPrototypeOf(Sandbox)],
    "Sandbox.commands": [commands.constructor],
    "Sandbox.files": [files.constructor],
    "Sandbox.pty": [pty.constructor],
    "Sandbox.git": [Git],
    Template: [TemplateBase, Template],
    Secret: [Secret],
    Volume: [Volume],
  },
  Object.fromEntries(RETURNED.map((name) => [name, name])),
);

const WORLD = process.env.STOCKADE_TEST_HOST;

let box;
before(async () => {
  box = await Sandbox.create({ timeoutMs: 300_000, metadata: { suite: "js & co" } });
});
after(async () => {
  await box.kill();
});

test("run returns output and exit code", async () => {
  const result = await box.commands.run("echo out; echo err >&2");
  assert.deepEqual([result.stdout, result.stderr, result.exitCode], ["out\n", "err\n", 0]);
});

test("a failing command rejects with its code", async () => {
  await assert.rejects(box.commands.run("exit 7"), (error) => error instanceof CommandExitError && error.exitCode === 7);
});

test("callbacks get each write", async () => {
  const out = [];
  await box.commands.run("echo a; sleep 0.3; echo b", { onStdout: (text) => out.push(text) });
  assert.deepEqual(out, ["a\n", "b\n"]);
});

test("environment, directory and an unknown user", async () => {
  const result = await box.commands.run("pwd; echo $X", { cwd: "/tmp", envs: { X: "1 2" } });
  assert.equal(result.stdout, "/tmp\n1 2\n");
  await assert.rejects(box.commands.run("true", { user: "nobody-here" }), AuthenticationError);
});

test("a timeout ends the command", async () => {
  await assert.rejects(box.commands.run("sleep 1000", { timeoutMs: 1000 }), TimeoutError);
});

test("background, stdin, connect, list and kill", async () => {
  const handle = await box.commands.run("cat; exit 3", { background: true, stdin: true });
  await box.commands.sendStdin(handle.pid, "hello\n");
  assert.ok((await box.commands.list()).some((process) => process.pid === handle.pid));
  const again = await box.commands.connect(handle.pid);
  await box.commands.closeStdin(handle.pid);
  await assert.rejects(again.wait(), (error) => error.exitCode === 3);
  await assert.rejects(handle.wait(), (error) => error.exitCode === 3 && error.stdout === "hello\n");
  const other = await box.commands.run("sleep 1000", { background: true });
  assert.equal(await other.kill(), true);
  await assert.rejects(other.wait());
  assert.equal(await box.commands.kill(other.pid), false);
});

test("terminals", async () => {
  const decoder = new TextDecoder();
  let seen = "";
  const handle = await box.pty.create({ cols: 80, rows: 24, onData: (data) => (seen += decoder.decode(data)) });
  await box.pty.resize(handle.pid, { cols: 90, rows: 50 });
  await box.pty.sendInput(handle.pid, new TextEncoder().encode("stty size; exit\n"));
  await handle.wait();
  assert.match(seen, /50 90/);
});

test("files in every format", async () => {
  const path = `/tmp/js-suite/${crypto.randomUUID()}`;
  const written = await box.files.write(`${path}/a b.txt`, "héllo");
  assert.equal(written.path, `${path}/a b.txt`);
  assert.equal(await box.files.read(`${path}/a b.txt`), "héllo");
  const bytes = new Uint8Array(100_000).map((_, index) => index);
  await box.files.write(`${path}/bytes`, bytes.buffer);
  assert.deepEqual(await box.files.read(`${path}/bytes`, { format: "bytes" }), bytes);
  assert.equal((await box.files.read(`${path}/bytes`, { format: "blob" })).size, bytes.length);
  let total = 0;
  for await (const chunk of await box.files.read(`${path}/bytes`, { format: "stream" })) total += chunk.length;
  assert.equal(total, bytes.length);
  const files = [1, 2].map((number) => ({ path: `${path}/many/${number}`, data: `${number}` }));
  assert.equal((await box.files.write(files)).length, 2);
  assert.deepEqual((await box.files.list(`${path}/many`)).map((entry) => entry.name), ["1", "2"]);
  assert.equal((await box.files.getInfo(`${path}/bytes`)).size, bytes.length);
  assert.equal(await box.files.makeDir(`${path}/dir`), true);
  assert.equal(await box.files.makeDir(`${path}/dir`), false);
  await box.files.rename(`${path}/bytes`, `${path}/dir/moved`);
  assert.equal(await box.files.exists(`${path}/bytes`), false);
  await box.files.remove(path);
  await assert.rejects(box.files.read(`${path}/a b.txt`), NotFoundError);
});

test("info, lists, timeouts and metrics", async () => {
  const info = await box.getInfo();
  assert.equal(info.sandboxId, box.sandboxId);
  assert.deepEqual(info.metadata, { suite: "js & co" });
  const pages = Sandbox.list({ query: { metadata: { suite: "js & co" } }, limit: 100 });
  assert.ok((await pages.nextItems()).some((item) => item.sandboxId === box.sandboxId));
  await box.setTimeout(600_000);
  assert.ok((await box.getInfo()).endAt > info.endAt);
  assert.equal(await box.isRunning(), true);
  assert.ok((await box.getMetrics()).length > 0);
  const again = await Sandbox.connect(box.sandboxId);
  assert.equal((await again.commands.run("echo same")).stdout, "same\n");
});

test("a killed sandbox is gone for every call", async () => {
  const other = await Sandbox.create();
  assert.equal(await other.kill(), true);
  assert.equal(await other.isRunning(), false);
  assert.equal(await other.kill(), false);
  await assert.rejects(other.commands.run("true"));
  await assert.rejects(other.getInfo(), NotFoundError);
});

test("secrets are written, never read back, and put into headers outside of the sandbox", async () => {
  const name = `js-${crypto.randomUUID()}`;
  const made = await Secret.create(name, "value-1", { metadata: { team: "red" } });
  assert.deepEqual([made.name, made.version, made.metadata], [name, 1, { team: "red" }]);
  await assert.rejects(Secret.create(name, "again"), SecretError);
  assert.deepEqual(await Secret.getInfo(made.secretId), made);
  assert.ok((await Secret.list().nextItems()).some((secret) => secret.secretId === made.secretId));
  assert.equal((await Secret.update(name, "value-2")).version, 2);
  assert.equal(await Secret.exists(name), true);
  if (WORLD) {
    const rules = { [WORLD]: [{ transform: { headers: { Authorization: `Bearer ${Secret.fill(name)}` } } }] };
    const other = await Sandbox.create({ network: { rules } });
    const { stdout } = await other.commands.run(`curl -sS --max-time 60 https://${WORLD}/echo`);
    assert.equal(JSON.parse(stdout).headers.authorization, "Bearer value-2");
    await other.kill();
  }
  assert.equal(await Secret.destroy(name), true);
  assert.equal(await Secret.destroy(name), false);
  await assert.rejects(Secret.getInfo(name), SecretNotFoundError);
});

test("a directory is watched", async () => {
  await box.files.makeDir("/tmp/js-watched");
  let seen;
  const first = new Promise((resolve) => (seen = resolve));
  const handle = await box.files.watchDir("/tmp/js-watched", (event) => seen(event));
  await box.files.writeFiles([{ path: "/tmp/js-watched/a", data: "1" }]);
  assert.equal((await first).name, "a");
  await handle.stop();
});

test("snapshots and forks start from what is there", async () => {
  await box.files.write("/tmp/js-state", "here");
  const snapshot = await box.createSnapshot();
  assert.ok((await box.listSnapshots().nextItems()).some((known) => known.snapshotId === snapshot.snapshotId));
  const other = await Sandbox.create(snapshot.snapshotId);
  assert.equal(await other.files.read("/tmp/js-state"), "here");
  await other.kill();
  const [child] = await box.fork({ count: 1 });
  assert.equal(await child.files.read("/tmp/js-state"), "here");
  await child.kill();
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true);
});

test("addresses of a sandbox", async () => {
  await box.files.write("/tmp/js-signed", "signed");
  const url = await box.downloadUrl("/tmp/js-signed", { useSignatureExpiration: 600 });
  assert.equal(await (await fetch(url)).text(), "signed");
  const form = new FormData();
  form.append("file", new Blob(["up"]), "/tmp/js-uploaded");
  assert.equal((await fetch(await box.uploadUrl("/tmp/js-uploaded"), { method: "POST", body: form })).status, 200);
  assert.equal(await box.files.read("/tmp/js-uploaded"), "up");
  assert.match(box.getHost(8000), new RegExp(`^8000-${box.sandboxId}\\.`));
});

test("a network is changed while it is there", async () => {
  await box.updateNetwork({ denyOut: ["8.8.8.8"] });
  assert.deepEqual((await box.getInfo()).network.denyOut, ["8.8.8.8"]);
  await box.updateNetwork({});
});

test("a template is built, named and removed", async () => {
  const name = `js-suite-${crypto.randomUUID()}`;
  const template = Template()
    .fromTemplate("base")
    .setEnvs({ FROM_TEMPLATE: "seen" })
    .makeDir("/tmp/made")
    .runCmd("echo built > /tmp/made/file")
    .setWorkdir("/tmp/made")
    .setStartCmd(START, READY);
  const steps = [];
  const built = await Template.build(template, name, { onBuildLogs: (entry) => steps.push(entry.message) });
  assert.ok(steps.some((line) => line.includes("echo built")));
  assert.equal(await Template.exists(name), true);
  await Template.assignTags(`${name}:default`, ["second"]);
  assert.ok((await Template.getTags(built.templateId)).some((tag) => tag.tag === "second"));
  await Template.removeTags(name, "second");
  const other = await Sandbox.create(name);
  assert.equal((await other.commands.run("cat file; echo $FROM_TEMPLATE; ls /tmp/started")).stdout, "built\nseen\n/tmp/started\n");
  await other.kill();
});

test("a paused sandbox comes back as it was", async () => {
  await box.files.write("/tmp/kept", "kept");
  assert.equal(await box.pause(), true);
  await box.connect({ timeoutMs: 300_000 });
  assert.equal(await box.files.read("/tmp/kept"), "kept");
});

test("fifty commands at once", async () => {
  const numbers = Array.from({ length: 50 }, (_, index) => index);
  const results = await Promise.all(numbers.map((n) => box.commands.run(`sleep 0.2; echo ${n}`, { timeoutMs: 300_000 })));
  assert.deepEqual(results.map((result) => result.stdout), numbers.map((n) => `${n}\n`));
});

options(() => box);
git(() => box);
refused(() => box);
templates();
mcp(() => box);
