import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { AuthenticationError, CommandExitError, NotFoundError, Sandbox, TimeoutError } from "e2b";

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

test("what is not supported says so", async () => {
  await assert.rejects(Sandbox.create({ network: { egressProxy: { address: "proxy.example:1080" } } }), /egressProxy is not supported/);
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
