// Every option the SDK documents, seen to have its effect; the others are in refused.mjs.
import assert from "node:assert/strict";
import { CommandExitError, E2B, Sandbox, Secret } from "e2b";
import { isCurrent, test } from "./compat.mjs";

const text = (data) => new TextEncoder().encode(data);
const mark = () => ({ mark: crypto.randomUUID() });

export default function options(box) {
  test("every option of create has its effect", async () => {
    const asked = {
      timeoutMs: 500_000,
      metadata: { "a b": "é & c" },
      envs: { GIVEN: "1 2" },
      secure: true,
      allowInternetAccess: false,
      network: { allowPublicTraffic: false, maskRequestHost: "${PORT}.a.example" },
      lifecycle: { onTimeout: { action: "pause" }, autoResume: true },
    };
    const made = await Sandbox.create("base:default", asked);
    const info = await made.getInfo();
    assert.deepEqual([info.name, info.metadata, info.allowInternetAccess], ["base", asked.metadata, false]);
    assert.ok(info.endAt - Date.now() > 300_000 && info.endAt - Date.now() <= 501_000);
    const { allowPublicTraffic, maskRequestHost } = info.network;
    assert.deepEqual([allowPublicTraffic, maskRequestHost], [false, "${PORT}.a.example"]);
    assert.deepEqual(info.lifecycle, { onTimeout: "pause", autoResume: true });
    assert.equal((await made.commands.run("echo $GIVEN")).stdout, "1 2\n");
    assert.deepEqual(await Sandbox.getFullInfo(made.sandboxId), await made.getInfo());
    assert.equal(await made.betaPause({ keepMemory: false }), true);
    await made.kill();
  });

  test("a timeout may keep the disk alone", async () => {
    const made = await Sandbox.create({ lifecycle: { onTimeout: { action: "pause", keepMemory: false } } });
    await made.files.write("kept", "here");
    await made.setTimeout(0);
    assert.equal((await made.getInfo()).state, "paused");
    await made.connect({ timeoutMs: 300_000 });
    assert.equal(await made.files.read("kept"), "here");
    await made.kill();
  });

  test("memory that was kept is dropped where a reboot is asked for", async (context) => {
    if (!isCurrent()) return context.skip("this release cannot ask for it");
    const made = await Sandbox.create({ timeoutMs: 300_000 });
    const { pid } = await made.commands.run("sleep 1000", { background: true });
    assert.equal(await made.pause({ keepMemory: true }), true);
    await made.connect({ onResume: "reboot", timeoutMs: 300_000 });
    assert.ok(!(await made.commands.list()).some((other) => other.pid === pid));
    await made.kill();
  });

  test("lists go on at their token", async () => {
    const metadata = mark();
    const made = [];
    for (let n = 0; n < 2; n++) made.push(await Sandbox.create({ timeoutMs: 300_000, metadata }));
    const query = { metadata, state: ["running"], template: "base", startedAfter: new Date(Date.now() - 3_600_000) };
    const first = Sandbox.list({ query, limit: 1, order: "asc" });
    const [one] = await first.nextItems();
    const [two] = await Sandbox.list({ query, limit: 1, order: "asc", nextToken: first.nextToken }).nextItems();
    assert.deepEqual([one.sandboxId, two.sandboxId], made.map((known) => known.sandboxId));
    for (const known of made) await known.kill();
  });

  test("snapshots have names and pages", async () => {
    const name = `options-${crypto.randomUUID()}`;
    const [named, other] = [await box().createSnapshot({ name }), await box().createSnapshot()];
    assert.deepEqual(named.names, [name]);
    const [found] = await Sandbox.listSnapshots({ name }).nextItems();
    assert.equal(found.snapshotId, named.snapshotId);
    const first = Sandbox.listSnapshots({ sandboxId: box().sandboxId, limit: 1 });
    const pages = await first.nextItems();
    const rest = { sandboxId: box().sandboxId, limit: 1, nextToken: first.nextToken };
    pages.push(...(await Sandbox.listSnapshots(rest).nextItems()));
    const ids = [named.snapshotId, other.snapshotId].sort();
    assert.deepEqual(pages.map((snapshot) => snapshot.snapshotId).sort(), ids);
    for (const id of ids) assert.equal(await Sandbox.deleteSnapshot(id), true);
  });

  test("secrets have pages, which go on at their token", async () => {
    const names = [1, 2].map(() => `options-${crypto.randomUUID()}`).sort();
    for (const name of names) await Secret.create(name, "v");
    const listed = [];
    for (let nextToken; ; ) {
      const page = Secret.list({ limit: 1, nextToken });
      const items = await page.nextItems();
      assert.equal(items.length, 1);
      listed.push(...items.map((secret) => secret.name));
      if (!page.hasNext) break;
      nextToken = page.nextToken;
    }
    assert.deepEqual(listed.filter((name) => names.includes(name)), names);
    for (const name of names) await Secret.destroy(name);
  });

  test("an update of a secret keeps its metadata, or has its own", async () => {
    const name = `options-${crypto.randomUUID()}`;
    await Secret.create(name, "v", { metadata: { team: "red" } });
    assert.deepEqual((await Secret.update(name, "w")).metadata, { team: "red" });
    assert.deepEqual((await Secret.update(name, "x", { metadata: { team: "blue" } })).metadata, { team: "blue" });
    assert.deepEqual((await Secret.getInfo(name)).metadata, { team: "blue" });
    await Secret.destroy(name);
  });

  test("a sandbox is reached under the address that is given for all of them", async () => {
    const sandboxUrl = `https://sandbox.${process.env.E2B_DOMAIN}`;
    const made = await Sandbox.create({ template: "base:default", sandboxUrl });
    assert.equal((await made.getInfo()).name, "base");
    await made.files.write("told", "by header");
    assert.equal((await made.commands.run("cat told")).stdout, "by header");
    const url = await made.downloadUrl("told");
    assert.ok(url.startsWith(`${sandboxUrl}/`), url);
    const headers = { "E2b-Sandbox-Id": made.sandboxId, "E2b-Sandbox-Port": "49983" };
    assert.equal(await (await fetch(url, { headers })).text(), "by header");
    await made.kill();
  });

  test("metrics of a time, and forks of a lifetime", async () => {
    const [now, hour] = [Date.now(), 3_600_000];
    assert.ok((await box().getMetrics({ start: new Date(now - hour), end: new Date(now + hour) })).length > 0);
    assert.deepEqual(await box().getMetrics({ start: new Date(now - 2 * hour), end: new Date(now - hour) }), []);
    const [child] = await box().fork({ timeoutMs: 77_000, count: 1 });
    const left = (await child.getInfo()).endAt - Date.now();
    assert.ok(left > 20_000 && left <= 78_000, `${left}`);
    await child.kill();
  });

  test("a command runs, and is joined, as it is told", async () => {
    const [out, err] = [[], []];
    const listen = { onStdout: (piece) => out.push(piece), onStderr: (piece) => err.push(piece), timeoutMs: 60_000 };
    await box().commands.run("id -un; echo to-err >&2", { user: "root", ...listen });
    assert.deepEqual([out.join(""), err.join("")], ["root\n", "to-err\n"]);
    out.length = 0;
    const handle = await box().commands.run("cat", { background: true, stdin: true });
    const joined = await box().commands.connect(handle.pid, listen);
    await handle.sendStdin("through the handle");
    await handle.closeStdin();
    assert.equal((await joined.wait()).stdout, "through the handle");
    assert.equal(out.join(""), "through the handle");
    const left = await box().commands.run("sleep 1000", { background: true });
    await left.disconnect();
    assert.ok((await box().commands.list()).some((process) => process.pid === left.pid), "it outlives its listener");
    assert.equal(await box().commands.kill(left.pid), true);
  });

  test("a terminal opens as it is told, is joined and ended", async () => {
    const decoder = new TextDecoder();
    let [seen, also] = ["", ""];
    const handle = await box().pty.create({
      cols: 200,
      rows: 24,
      cwd: "/tmp",
      envs: { X: "1 2" },
      user: "root",
      timeoutMs: 60_000,
      onData: (data) => (seen += decoder.decode(data)),
    });
    const joined = await box().pty.connect(handle.pid, { onData: (data) => (also += decoder.decode(data)), timeoutMs: 60_000 });
    await box().pty.sendInput(handle.pid, text("echo $X-$(id -un)-$(pwd); exit\n"));
    await Promise.all([handle.wait(), joined.wait()]);
    assert.match(seen, /1 2-root-\/tmp/);
    assert.match(also, /1 2-root-\/tmp/);
    const other = await box().pty.create({ cols: 80, rows: 24, onData: () => {} });
    assert.equal(await box().pty.kill(other.pid), true);
    await assert.rejects(other.wait(), CommandExitError);
    assert.equal(await box().pty.kill(other.pid), false);
  });

  test("files are their users'", async () => {
    const { files } = box();
    const [root, user] = [`/root/${crypto.randomUUID()}`, "root"];
    assert.equal(await files.makeDir(root, { user }), true);
    const how = { user, gzip: true, useOctetStream: true };
    await files.write(`${root}/one`, "1", { ...how, metadata: { a: "b" } });
    const info = await files.getInfo(`${root}/one`, { user });
    assert.deepEqual([info.owner, info.metadata], ["root", { a: "b" }]);
    await files.writeFiles([{ path: `${root}/two`, data: "2" }], { ...how, metadata: { c: "d" } });
    await assert.rejects(files.read(`${root}/one`));
    const stream = await files.read(`${root}/one`, { user, format: "stream", gzip: true, streamIdleTimeoutMs: 60_000 });
    assert.equal(await new Response(stream).text(), "1");
    assert.equal((await files.rename(`${root}/one`, `${root}/sub/three`, { user })).name, "three");
    const deep = await files.list(root, { depth: 2, user });
    assert.deepEqual(deep.map((entry) => entry.path.slice(root.length)), ["/sub", "/sub/three", "/two"]);
    assert.equal(await files.exists(root, { user }), true);

    let seen;
    const written = new Promise((resolve) => (seen = (event) => event.type === "write" && event.entry && resolve(event)));
    const watch = { user, recursive: true, includeEntry: true, allowNetworkMounts: true, timeoutMs: 60_000 };
    const handle = await files.watchDir(root, (event) => seen(event), watch);
    await files.write(`${root}/sub/four`, "12345", { user });
    assert.equal((await written).entry.path, `${root}/sub/four`);
    await handle.stop();
    let over;
    const ended = new Promise((resolve) => (over = resolve));
    await files.watchDir(root, () => {}, { user, timeoutMs: 1000, onExit: () => over() });
    await ended;

    const url = await box().downloadUrl(`${root}/two`, { user, useSignatureExpiration: 60 });
    assert.equal(await (await fetch(url)).text(), "2");
    assert.notEqual((await fetch(await box().downloadUrl(`${root}/two`))).status, 200);
    const form = new FormData();
    form.append("file", new Blob(["up"]), "up");
    const up = await box().uploadUrl(`${root}/up`, { user, useSignatureExpiration: 60 });
    assert.equal((await fetch(up, { method: "POST", body: form })).status, 200);
    assert.equal((await files.getInfo(`${root}/up`, { user })).owner, "root");
    await files.remove(root, { user });
  });

  test("a client of its own has its own key", async () => {
    const { E2B_API_KEY: apiKey, E2B_DOMAIN: domain } = process.env;
    const client = new E2B({ apiKey, domain, requestTimeoutMs: 60_000 });
    assert.ok(Array.isArray(await client.Sandbox.list({ limit: 1 }).nextItems()));
    const stranger = new E2B({ apiKey: `e2b_${"0".repeat(40)}` });
    await assert.rejects(stranger.Sandbox.list().nextItems());
  });
}
