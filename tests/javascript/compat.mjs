// Records which public methods of an SDK's classes the passing tests call.
//
//   await covers("e2b", { Sandbox: [Sandbox], "Sandbox.git": [Git] });   what is looked at, by the table's names for it
//   test("...", async () => { ... });                                    as node:test's
//
// The result goes to the file STOCKADE_COMPAT_OUT names, in the form of tests/python/compat_plugin.py.
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { after, test as nodeTest } from "node:test";

const known = new Set();
const passed = new Set();
let called = new Set();
let sdk;
let types = "";

/** Wraps the public methods of classes, and of what their methods return, if it is of a class in `returned`. */
export async function covers(name, classes, returned = {}) {
  const entry = createRequire(import.meta.url).resolve(name);
  types = readFileSync(join(dirname(entry), "index.d.ts"), "utf8");
  const manifest = JSON.parse(readFileSync(join(dirname(entry), "../package.json"), "utf8"));
  sdk = `${manifest.name} ${manifest.version}`;
  for (const [label, owners] of Object.entries(classes)) {
    for (const owner of owners) {
      wrap(label, owner, hidden(owner.name, "static "), returned);
      wrap(label, owner.prototype, hidden(owner.name, ""), returned);
    }
  }
}

/** Whether the SDK is newer than the 2.45 generation. */
export function isCurrent() {
  const [major, minor] = sdk.split(" ")[1].split(".").map(Number);
  return major > 2 || minor > 45;
}

/** What TypeScript hides of a class is no method of anybody's. */
function hidden(name, kind) {
  const body = types.match(new RegExp(`^declare class ${name}\\b[^]*?^}`, "m"))?.[0] ?? "";
  const members = body.matchAll(new RegExp(`^ +(?:private|protected) ${kind}(?:readonly |async )*(\\w+)`, "gm"));
  return new Set(Array.from(members, (match) => match[1]));
}

function wrap(label, owner, hidden, returned) {
  for (const [name, property] of Object.entries(Object.getOwnPropertyDescriptors(owner ?? {}))) {
    const isPublic = name !== "constructor" && !name.startsWith("_") && !hidden.has(name);
    if (!isPublic || typeof property.value !== "function" || !property.writable) continue;
    const method = `${label}.${name}`;
    known.add(method);
    owner[name] = function (...args) {
      called.add(method);
      const result = property.value.apply(this, args);
      return result instanceof Promise ? result.then((value) => look(value, returned)) : look(result, returned);
    };
  }
}

const seen = new Set();
function look(value, returned) {
  const label = returned[value?.constructor?.name];
  if (label && !seen.has(label)) {
    seen.add(label);
    wrap(label, Object.getPrototypeOf(value), hidden(label, ""), returned);
  }
  return value;
}

/** As node:test's; tests of a file run one after the other. */
export function test(name, body) {
  return nodeTest(name, async (context) => {
    called = new Set();
    await body(context);
    for (const method of called) passed.add(method);
  });
}

after(() => {
  const out = process.env.STOCKADE_COMPAT_OUT;
  if (!out || !sdk) return;
  const state = (method) => [method, passed.has(method) ? "tested" : "untested"];
  const methods = Object.fromEntries([...known].sort().map(state));
  writeFileSync(out, JSON.stringify({ sdk, language: "JavaScript", methods }, null, 1) + "\n");
});
