// Records which public methods of an SDK's classes the passing tests call, and which of their options they set.
//
//   await covers("e2b", { Sandbox: [Sandbox], "Sandbox.git": [Git] });   what is looked at, by the table's names for it
//   test("...", async () => { ... });                                    as node:test's
//
// Of a program, commands: `await coversProgram("@e2b/cli", run)`, where `run` gives what a call prints, and `uses(args)`.
//
// The result goes to the file STOCKADE_COMPAT_OUT names, in the form of tests/python/compat_plugin.py.
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { after, test as nodeTest } from "node:test";
import { signatures } from "./signatures.mjs";

const known = new Set();
const passed = new Set();
let called = new Set();
const options = new Set();
let sdk;
let language = "JavaScript";
let types = "";
let placesOf = () => [];

/** Wraps the public methods of classes, and of what their methods return, if it is of a class in `returned`. */
export async function covers(name, classes, returned = {}) {
  const entry = createRequire(import.meta.url).resolve(name);
  const declarations = join(dirname(entry), "index.d.ts");
  types = readFileSync(declarations, "utf8");
  placesOf = signatures(declarations);
  sdk = release(join(dirname(entry), "../package.json"));
  for (const [label, owners] of Object.entries(classes)) {
    for (const owner of owners) {
      wrap(label, owner, owner.name, true, returned);
      wrap(label, owner.prototype, owner.name, false, returned);
    }
  }
}

function release(manifest) {
  const { name, version } = JSON.parse(readFileSync(manifest, "utf8"));
  return `${name} ${version}`;
}

/** Finds the commands of a program as its help tells them. */
export async function coversProgram(manifest, run, group = []) {
  sdk = release(manifest);
  language = "Command line";
  const help = await run(...group, "--help");
  const commands = help.slice(help.indexOf("\nCommands:")).matchAll(/^  (\w+)(?:\|\w+)?( .*)?$/gm);
  for (const [, name, rest = ""] of commands) {
    const command = [...group, name];
    if (name === "help") continue;
    // Groups take neither options nor arguments.
    if (/^ [[<]/.test(rest) || group[0] === "auth") known.add(command.join(" "));
    else await coversProgram(manifest, run, command);
  }
}

/** Whether it has a command; not every release has all. */
export const has = (command) => known.has(command);

/** Notes the command that a program's arguments name. */
export function uses(args) {
  const words = args.map((_, length) => args.slice(0, length + 1).join(" "));
  for (const command of words) if (known.has(command)) called.add(command);
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

function wrap(label, owner, className, isStatic, returned) {
  const unseen = hidden(className, isStatic ? "static " : "");
  for (const [name, property] of Object.entries(Object.getOwnPropertyDescriptors(owner ?? {}))) {
    const isPublic = name !== "constructor" && !name.startsWith("_") && !unseen.has(name);
    if (!isPublic || typeof property.value !== "function" || !property.writable) continue;
    const method = `${label}.${name}`;
    known.add(method);
    const places = placesOf(className, name, isStatic);
    for (const { names, keys } of places) for (const key of [...names, ...keys]) options.add(`${method}(${key})`);
    owner[name] = function (...args) {
      called.add(method);
      for (const key of given(args, places)) called.add(`${method}(${key})`);
      const result = property.value.apply(this, args);
      return result instanceof Promise ? result.then((value) => look(value, returned)) : look(result, returned);
    };
  }
}

/** The options that are set in a call. */
function given(args, places) {
  return places.flatMap(({ names, keys }, place) => {
    const value = args[place];
    const isObject = value !== null && typeof value === "object";
    const set = isObject ? [...keys].filter((key) => value[key] !== undefined) : [];
    return value === undefined || (isObject && keys.size > 0) ? set : [...names, ...set];
  });
}

const seen = new Set();
function look(value, returned) {
  const label = returned[value?.constructor?.name];
  if (label && !seen.has(label)) {
    seen.add(label);
    wrap(label, Object.getPrototypeOf(value), label, false, returned);
  }
  // What runs of code gave.
  if (label && Array.isArray(value.results)) value.results.forEach((result) => look(result, returned));
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
  const state = (name) => [name, passed.has(name) ? "tested" : "untested"];
  const states = (names) => Object.fromEntries([...names].sort().map(state));
  const result = { sdk, language, methods: states(known), options: states(options) };
  writeFileSync(out, JSON.stringify(result, null, 1) + "\n");
});
