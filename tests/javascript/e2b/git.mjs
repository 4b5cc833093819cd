// sandbox.git: the SDK's own words for commands, which need git in the guest and its messages in English.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { GitAuthError } from "e2b";
import { test } from "./compat.mjs";

// From here, and from where `make test` copies this.
const SERVER = new URL("../../../tests/python/e2b/git_server.py", import.meta.url);
const PORT = 8123;

// What every method takes.
const HOW = { cwd: "/tmp", envs: { LANG: "C" }, user: "user", timeoutMs: 60_000 };
const AUTHOR = { authorName: "Me", authorEmail: "me@a.example" };

export default function repositories(box) {
  const shell = async (command) => (await box().commands.run(command)).stdout.trim();

  test("a repository from its start to a commit, with the options every call has", async () => {
    const { git, files } = box();
    const path = "/tmp/js-repository";
    await git.init(path, { ...HOW, initialBranch: "main" });
    await git.configureUser("Me", "me@a.example", { ...HOW, scope: "local", path });
    await files.write(`${path}/a`, "1");
    assert.equal((await git.status(path, HOW)).isClean, false);
    await git.add(path, { ...HOW, all: true });
    await git.commit(path, "first", { ...HOW, ...AUTHOR });
    await git.createBranch(path, "other", HOW);
    assert.deepEqual((await git.branches(path, HOW)).branches.sort(), ["main", "other"]);
    await git.checkoutBranch(path, "main", HOW);
    await git.deleteBranch(path, "other", { ...HOW, force: true });
    assert.deepEqual((await git.branches(path)).branches, ["main"]);
    await git.remoteAdd(path, "origin", "https://a.example/r.git", HOW);
    assert.equal(await git.remoteGet(path, "origin", HOW), "https://a.example/r.git");
    await git.setConfig("pull.rebase", "false", { ...HOW, scope: "local", path });
    assert.equal(await git.getConfig("pull.rebase", { ...HOW, scope: "local", path }), "false");
    await git.clone(path, { ...HOW, path: "/tmp/js-clone" });
    assert.equal((await git.status("/tmp/js-clone")).isClean, true);
    await files.write(`${path}/a`, "2");
    await git.add(path, { ...HOW, files: ["a"] });
    await git.reset(path, { ...HOW, paths: ["a"] });
    await git.add(path);
    await git.restore(path, { ...HOW, paths: ["a"], staged: true, worktree: true, source: "HEAD" });
    assert.equal(await files.read(`${path}/a`), "1");
    await git.reset(path, { ...HOW, mode: "hard", target: "HEAD" });
    await assert.rejects(git.status("js-repository"), "elsewhere the path leads nowhere");
    assert.equal((await git.status("js-repository", HOW)).isClean, true);
  });

  test("a repository is pushed and pulled, and credentials are kept where that is asked for", async () => {
    const { git, files } = box();
    const [work, remote, copy] = ["work", "remote.git", "copy"].map((name) => `/tmp/js-git/${name}`);
    await git.init(remote, { bare: true, initialBranch: "main" });
    await git.init(work, { initialBranch: "main" });
    await git.commit(work, "first", { ...AUTHOR, allowEmpty: true });
    await git.remoteAdd(work, "origin", remote, { fetch: true, overwrite: true });
    await git.push(work, { remote: "origin", branch: "main", setUpstream: true });
    await git.clone(`file://${remote}`, { path: copy, branch: "main", depth: 1 });
    await git.commit(work, "second", { ...AUTHOR, allowEmpty: true });
    await git.push(work, { ...HOW, remote: "origin", branch: "main" });
    await git.pull(copy, { ...HOW, remote: "origin", branch: "main" });
    assert.equal(await shell(`git -C ${copy} log -1 --format=%s`), "second");
    const host = { host: "git.example", protocol: "http" };
    await git.dangerouslyAuthenticate({ ...HOW, ...host, username: "me", password: "pass-word" });
    assert.equal(await files.read(".git-credentials"), "http://me:pass-word@git.example\n");
  });

  test("a repository behind a password", async (context) => {
    const { git, files, commands } = box();
    const [served, behind, kept, later] = ["served", "behind", "kept", "later"].map((name) => `/tmp/js-guarded/${name}`);
    const url = `http://localhost:${PORT}/r.git`;
    const known = { username: "me", password: "pass-word" };
    // A helper would keep the password for whoever asks next.
    await shell("git config --global --unset credential.helper; rm -f ~/.git-credentials");
    await shell(`git init -q --bare -b main ${served}/r.git`);
    await files.write("/tmp/js-guarded/first/a", "1");
    await git.init("/tmp/js-guarded/first", { initialBranch: "main" });
    await git.add("/tmp/js-guarded/first");
    await git.commit("/tmp/js-guarded/first", "first", AUTHOR);
    await shell(`git -C /tmp/js-guarded/first push -q ${served}/r.git main`);
    await files.write("/tmp/git_server.py", await readFile(SERVER, "utf8"));
    const serve = `exec python3 /tmp/git_server.py ${PORT} ${served} ${known.username}:${known.password}`;
    const server = await commands.run(serve, { background: true, timeoutMs: 0 });
    context.after(() => server.kill());
    const ask = `curl -s -o /dev/null -w '%{http_code}' --retry 60 --retry-delay 1 --retry-connrefused localhost:${PORT}`;
    assert.equal(await shell(ask), "401");

    for (const wrong of [{}, { ...known, password: "wrong" }]) {
      await assert.rejects(git.clone(url, { path: "/tmp/js-guarded/refused", ...wrong }), GitAuthError);
    }
    await git.clone(url, { path: behind, ...known });
    await git.clone(url, { path: kept, dangerouslyStoreCredentials: true, ...known });
    assert.match(await git.remoteGet(kept, "origin"), /me:pass-word@/);
    await git.clone(url, { path: later, ...known });

    await files.write(`${behind}/b`, "2");
    await git.add(behind);
    await git.commit(behind, "second", AUTHOR);
    await assert.rejects(git.push(behind, { remote: "origin", branch: "main" }), GitAuthError);
    await git.push(behind, { remote: "origin", branch: "main", ...known });
    assert.equal(await shell(`git -C ${served}/r.git log -1 --format=%s main`), "second");
    await assert.rejects(git.pull(later, { remote: "origin", branch: "main" }), GitAuthError);
    await git.pull(later, { remote: "origin", branch: "main", ...known });
    assert.equal(await files.read(`${later}/b`), "2");
    // Used once, kept nowhere.
    for (const path of [behind, later]) assert.equal(await git.remoteGet(path, "origin"), url);
  });
}
