// Template builds with each method of a builder.
import assert from "node:assert/strict";
import { mkdir, mkdtemp, rm, symlink, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { Sandbox, Template, waitForFile, waitForPort, waitForProcess, waitForTimeout, waitForURL } from "e2b";
import { test } from "./compat.mjs";

// Stands for programs that the image lacks or that need a network: they note what they were asked for.
const NOTES = `cd /usr/local/bin
printf '#!/bin/sh\\necho "$(id -un) \${0##*/} $*" >> /asked\\n' | tee apt-get bun npm pip > /dev/null
touch /asked; chmod 666 /asked; chmod 755 apt-get bun npm pip`;

const LOOK = `stat -c '%U %a %n' /opt/made /opt/made/two.txt /opt/plain.txt
echo $(readlink /opt/link) $(cat /opt/link)
echo /opt/app: $(ls /opt/app)
cat /asked
echo $(pwd) $FROM_DOCKERFILE$LAST $(ls -d /opt/gone 2> /dev/null || echo gone)`;

/** A start, and every way to wait for it. */
export const START = "touch /tmp/started; exec python3 -m http.server 8000";
export const READY = [
  waitForPort(8000),
  waitForURL("http://localhost:8000/", 200),
  waitForProcess("python3"),
  waitForFile("/tmp/started"),
]
  .map((way) => way.getCmd())
  .join(" && ");

function everyStep(fileContextPath) {
  const user = "root";
  return Template({ fileContextPath, fileIgnorePatterns: ["**/*.out"] })
    .fromDockerfile("FROM e2bdev/base\nENV FROM_DOCKERFILE=seen\n")
    .copy("link.txt", "/opt/one.txt", { forceUpload: true, user, mode: 0o640, resolveSymlinks: true, gzip: true })
    .copyItems([{ src: "app", dest: "/opt/app" }, { src: "one.txt", dest: "/opt/plain.txt", user: "user" }])
    .makeDir(["/opt/made", "/opt/gone"], { mode: 0o700, user })
    .rename("/opt/one.txt", "/opt/made/two.txt", { force: true, user })
    .remove("/opt/gone", { force: true, recursive: true, user })
    .makeSymlink("/opt/made/two.txt", "/opt/link", { user, force: true })
    .runCmd(["git init -q -b main /tmp/r", "git -C /tmp/r -c user.name=a -c user.email=a@a commit -qm 1 --allow-empty"])
    .gitClone("file:///tmp/r", "/home/user/clone", { branch: "main", depth: 1, user: "user" })
    .runCmd(NOTES, { user })
    .aptInstall(["hello", "jq"], { noInstallRecommends: true, fixMissing: true })
    .bunInstall("left-pad", { g: true, dev: true })
    .pipInstall("numpy", { g: false })
    .npmInstall(["left-pad", "is-odd"], { g: true, dev: true })
    .setWorkdir("/home/user/clone")
    .setEnvs({ LAST: "1" })
    .skipCache()
    .setUser("user");
}

async function finished(info) {
  const lines = [];
  for (;;) {
    const status = await Template.getBuildStatus(info, { logsOffset: lines.length });
    lines.push(...status.logEntries.map((entry) => entry.message));
    if (status.status !== "building" && status.logEntries.length === 0) return [status.status, lines];
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
}

const isCached = (lines) => lines.some((line) => line.startsWith("CACHED"));

export default function templates() {
  test("every step is carried out with its options", async (context) => {
    const place = await mkdtemp(join(tmpdir(), "e2b-steps-"));
    context.after(() => rm(place, { recursive: true }));
    await mkdir(join(place, "app"));
    for (const [name, data] of [["one.txt", "one"], ["app/main.txt", "main"], ["app/left.out", "x"]]) {
      await writeFile(join(place, name), data);
    }
    await symlink("one.txt", join(place, "link.txt"));
    const alias = `js-steps-${crypto.randomUUID()}`;
    const plan = everyStep(place);
    for (const computeHashes of [true, false]) {
      const copies = JSON.parse(await Template.toJSON(plan, computeHashes)).steps.filter((step) => step.type === "COPY");
      assert.deepEqual(copies.map((step) => "filesHash" in step), [computeHashes, computeHashes, computeHashes]);
    }
    await Template.build(plan.setReadyCmd(waitForTimeout(1000)), { alias, tags: ["one"], cpuCount: 2, memoryMB: 1024 });
    assert.equal(await Template.aliasExists(alias), true);
    const made = await Sandbox.create(`${alias}:one`, { timeoutMs: 300_000 });
    const { stdout } = await made.commands.run(LOOK, { user: "root" });
    await made.kill();
    assert.deepEqual(stdout.trim().split("\n"), [
      "root 700 /opt/made",
      "root 640 /opt/made/two.txt",
      "user 644 /opt/plain.txt",
      "/opt/made/two.txt one",
      "/opt/app: main.txt",
      "root apt-get update",
      "root apt-get install -y --no-install-recommends --fix-missing hello jq",
      "root bun install -g --dev left-pad",
      "user pip install --user numpy",
      "root npm install -g --save-dev left-pad is-odd",
      "/home/user/clone seen1 gone",
    ]);
  });

  test("a build goes on by itself, and what is not to be cached is carried out again", async () => {
    const shape = { alias: `js-background-${crypto.randomUUID()}`, tags: ["t"], cpuCount: 2, memoryMB: 1024 };
    const steps = (from) => from.fromBaseImage().runCmd(`echo ${shape.alias}`);
    const build = async (template, options = {}) => finished(await Template.buildInBackground(template, { ...shape, ...options }));
    for (const [template, options, isKnown] of [
      [steps(Template()), {}, false],
      [steps(Template()), {}, true],
      [steps(Template()), { skipCache: true }, false],
      [steps(Template().skipCache()), {}, false],
    ]) {
      const [state, lines] = await build(template, options);
      assert.equal(state, "ready");
      assert.equal(isCached(lines), isKnown, lines.join("\n"));
    }
  });

  test("who builds hears of it: all that happens, or until the build goes on by itself", async () => {
    const shape = { alias: `js-heard-${crypto.randomUUID()}`, skipCache: true };
    const steps = () => Template().fromBaseImage().runCmd("echo heard");
    const heard = [];
    const onBuildLogs = (entry) => heard.push(entry.message);
    await finished(await Template.buildInBackground(steps(), { ...shape, onBuildLogs }));
    assert.match(heard[0], /^Requesting build/);
    assert.equal(heard.at(-1), "Starting building...");
    heard.length = 0;
    await Template.build(steps(), { ...shape, onBuildLogs });
    assert.ok(heard.some((line) => line.includes("RUN echo heard")), heard.join("\n"));
    assert.equal(isCached(heard), false, heard.join("\n"));
    assert.equal(heard.at(-1), "Build finished");
  });

  test("a template as a Dockerfile", () => {
    assert.match(Template.toDockerfile(Template().fromImage("a").runCmd("true")), /^FROM a\nRUN true/);
  });
}
