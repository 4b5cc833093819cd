// What this server does not have is refused by name, through the calls that ask for it.
import assert from "node:assert/strict";
import { Sandbox, Secret, Template, Volume } from "e2b";
import { isCurrent, test } from "./compat.mjs";

const OF_VOLUMES = {
  create: () => Volume.create("mine"),
  connect: () => Volume.connect("vol_1"),
  list: () => Volume.list(),
  getInfo: () => Volume.getInfo("vol_1"),
  destroy: () => Volume.destroy("vol_1"),
};
const OF_A_VOLUME = {
  list: (volume) => volume.list("/", { depth: 2 }),
  makeDir: (volume) => volume.makeDir("/a", { uid: 1, gid: 1, mode: 0o700, force: true }),
  exists: (volume) => volume.exists("/a"),
  getInfo: (volume) => volume.getInfo("/a"),
  updateMetadata: (volume) => volume.updateMetadata("/a", { uid: 1, gid: 1, mode: 0o700 }),
  readFile: (volume) => volume.readFile("/a"),
  "readFile as bytes": (volume) => volume.readFile("/a", { format: "bytes" }),
  "readFile as a stream": (volume) => volume.readFile("/a", { format: "stream", streamIdleTimeoutMs: 70_000 }),
  writeFile: (volume) => volume.writeFile("/a", "x", { uid: 1, gid: 1, mode: 0o600, force: true }),
  remove: (volume) => volume.remove("/a"),
};
const REGISTRY_IMAGES = {
  "debian:12": (from) => from.fromDebianImage("12"),
  "ubuntu:24.04": (from) => from.fromUbuntuImage("24.04"),
  "fedora:42": (from) => from.fromFedoraImage("42"),
  "alpine:3.20": (from) => from.fromAlpineImage("3.20"),
  "archlinux:base": (from) => from.fromArchImage("base"),
  "python:3.12": (from) => from.fromPythonImage("3.12"),
  "node:24": (from) => from.fromNodeImage("24"),
  "oven/bun:1": (from) => from.fromBunImage("1"),
  "any:1": (from) => from.fromImage("any:1"),
  "r.example/a": (from) => from.fromImage("r.example/a", { username: "u", password: "p" }),
  "1.dkr.ecr.example/a": (from) =>
    from.fromAWSRegistry("1.dkr.ecr.example/a", { accessKeyId: "i", secretAccessKey: "s", region: "us-west-2" }),
  "gcr.io/p/a": (from) => from.fromGCPRegistry("gcr.io/p/a", { serviceAccountJSON: { type: "service_account" } }),
  "ubuntu:22.04": (from) => from.fromDockerfile("FROM ubuntu:22.04\nRUN true\n"),
};
const ABSENT_TEMPLATES = {
  "mcp-gateway": (steps) => steps.addMcpServer("exa"),
  devcontainer: (steps) => steps.betaDevContainerPrebuild("/a").betaSetDevContainerStart("/a"),
};
const SHAPES = { cpuCount: 8, memoryMB: 4096, minFreeDiskMb: 10 };
const OF_CREATE = {
  iam: { iam: { tokens: { aws: Secret.iamToken({ audience: "sts.example", tokenType: "JWT-SVID" }) } } },
  volumeMounts: { volumeMounts: { "/data": "mine" } },
  "network.httpsPorts": { network: { httpsPorts: [8443] } },
};

// An older SDK does not send them.
const NEW = ["minFreeDiskMb", "network.httpsPorts"];
const known = (options) => Object.entries(options).filter(([name]) => isCurrent() || !NEW.includes(name));

const unused = () => `refused-${crypto.randomUUID()}`;
const build = (steps, options = {}) => Template.build(steps, unused(), options);
const buildInBackground = (steps, options) => Template.buildInBackground(steps, unused(), options);

export default function refused(box) {
  test("volumes are refused", async () => {
    for (const call of Object.values(OF_VOLUMES)) await assert.rejects(call(), /volumes: not supported/);
    const volume = new Volume("vol_1", "mine", process.env.E2B_API_KEY, process.env.E2B_DOMAIN);
    for (const call of Object.values(OF_A_VOLUME)) await assert.rejects(call(volume), /volumes: not supported/);
  });

  test("registry images are refused", async () => {
    for (const [image, steps] of Object.entries(REGISTRY_IMAGES)) {
      await assert.rejects(build(steps(Template())), new RegExp(`registry image '${image}' is not supported`));
    }
  });

  test("another shape for a template is refused", async () => {
    for (const [name, shape] of known(SHAPES)) {
      const refusal = new RegExp(`${name} ${shape} is not supported`);
      for (const way of [build, buildInBackground]) {
        await assert.rejects(way(Template().fromTemplate("base"), { [name]: shape }), refusal);
      }
    }
  });

  test("templates that do not exist here are named", async () => {
    for (const [parent, steps] of Object.entries(ABSENT_TEMPLATES)) {
      await assert.rejects(build(steps(Template().fromTemplate(parent))), new RegExp(`template '${parent}' not found`));
    }
  });

  test("options of create that cannot be honoured are refused", async () => {
    Secret.iamToken({ audience: "sts.example", tokenType: "JWT-SVID" });
    for (const [field, options] of known(OF_CREATE)) {
      await assert.rejects(Sandbox.create(options), new RegExp(`${field} is not supported`));
    }
  });
}
