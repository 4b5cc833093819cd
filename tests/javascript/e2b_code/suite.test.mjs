import assert from "node:assert/strict";
import { after, before } from "node:test";
import { Sandbox } from "@e2b/code-interpreter";
import { NotFoundError, SandboxError, TimeoutError } from "e2b";
import { covers, test } from "./compat.mjs";

await covers("@e2b/code-interpreter", { CodeInterpreter: [Sandbox] }, { Execution: "Execution", Result: "Result" });

// Kernels of an emulated guest take their own time.
const PATIENCE_MS = 300_000;
const patient = { timeoutMs: PATIENCE_MS, requestTimeoutMs: PATIENCE_MS };

let box;
before(async () => {
  box = await Sandbox.create({ timeoutMs: 3_000_000, envs: { FROM_SANDBOX: "seen" } });
});
after(() => box.kill());

const run = (code, options = {}) => box.runCode(code, { ...patient, ...options });

test("a value is the main result, and state stays", async () => {
  const first = await run("x = 41\nx");
  assert.equal(first.text, "41");
  assert.equal(first.results[0].isMainResult, true);
  assert.equal(first.error, undefined);
  const second = await run("x + 1");
  assert.equal(second.text, "42");
  assert.equal(second.executionCount, first.executionCount + 1);
  assert.deepEqual(second.toJSON().logs, { stdout: [], stderr: [] });
});

test("output, results and errors come to the callbacks in order", async () => {
  const seen = [];
  const code = "import sys, time\nprint('one'); time.sleep(0.3)\nprint('two', file=sys.stderr); time.sleep(0.3)\ndisplay(3)\n1 / 0";
  const execution = await run(code, {
    onStdout: (message) => seen.push(["out", message.line]),
    onStderr: (message) => seen.push(["err", message.line]),
    onResult: (result) => seen.push(["result", result.text]),
    onError: (error) => seen.push(["error", error.name]),
  });
  assert.deepEqual(seen, [["out", "one\n"], ["err", "two\n"], ["result", "3"], ["error", "ZeroDivisionError"]]);
  assert.deepEqual(execution.logs, { stdout: ["one\n"], stderr: ["two\n"] });
  assert.equal(execution.error.value, "division by zero");
  assert.match(execution.error.traceback, /ZeroDivisionError/);
});

test("every form of a result arrives under its name", async () => {
  const { results } = await run(
    "from IPython.display import *\n" +
      "display(HTML('<b>h</b>'), Markdown('*m*'), Latex('$l$'), JSON({'j': [1]}), Javascript('1'), SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"/>'))\n" +
      "display({'application/x-own': 'o', 'text/plain': 'p'}, raw=True)\n" +
      "display({'application/pdf': 'UERG', 'image/png': 'UE5H', 'image/jpeg': 'SlBH', 'e2b/data': {'a': [1]}}, raw=True)\n" +
      "'quoted'",
  );
  const [html, markdown, latex, json, javascript, svg, own, raw, main] = results;
  assert.deepEqual([html.html, markdown.markdown, latex.latex], ["<b>h</b>", "*m*", "$l$"]);
  assert.deepEqual([json.json, javascript.javascript], [{ j: [1] }, "1"]);
  assert.match(svg.svg, /<svg/);
  // The SDK has no place of its own for these: its `extra` stays empty.
  assert.deepEqual([own.raw.extra, own.text], [{ "application/x-own": "o" }, "p"]);
  assert.deepEqual([raw.pdf, raw.png, raw.jpeg, raw.data], ["UERG", "UE5H", "SlBH", { a: [1] }]);
  assert.equal(main.text, "quoted");
  assert.ok(html.formats().includes("html"));
  assert.equal(html.toJSON().html, "<b>h</b>");
});

test("a chart is a picture and its data", async () => {
  const { results } = await run("import matplotlib.pyplot as plt\nplt.bar(['A', 'B'], [3, 1]); plt.title('One')\nplt.show()");
  assert.ok(results[0].png.startsWith("iVBOR"));
  assert.equal(results[0].chart.type, "bar");
  assert.deepEqual(results[0].chart.elements.map(({ label, value }) => [label, value]), [["A", 3], ["B", 1]]);
  const { chart } = (await run("plt.boxplot([1, 2, 3, 4, 20], tick_labels=['a'])\nplt.show()")).results[0];
  assert.equal(chart.type, "box_and_whisker");
  const quartiles = { first_quartile: 2, median: 3, third_quartile: 4 };
  assert.deepEqual(chart.elements, [{ label: "a", min: 1, ...quartiles, max: 4, outliers: [20] }]);
});

test("the environment is the sandbox's and the run's", async () => {
  const code = "import os\n[os.environ.get('FROM_SANDBOX'), os.environ.get('ONCE')]";
  assert.equal((await run(code, { envs: { ONCE: "1" } })).text, "['seen', '1']");
  assert.equal((await run(code)).text, "['seen', None]");
});

test("JavaScript and TypeScript share a context", async () => {
  assert.equal((await run("const typed: number = 5; typed * 2", { language: "typescript" })).text, "10");
  assert.equal((await run("await Promise.resolve(typed)", { language: "javascript" })).text, "5");
});

test("contexts are made, listed, restarted and removed", async () => {
  const context = await box.createCodeContext({ language: "python", cwd: "/tmp", ...patient });
  assert.deepEqual([context.language, context.cwd], ["python", "/tmp"]);
  assert.ok((await box.listCodeContexts()).some((known) => known.id === context.id));
  assert.equal((await run("import os\nkept = 1\nos.getcwd()", { context })).text, "/tmp");
  await box.restartCodeContext(context);
  assert.equal((await run("kept", { context })).error.name, "NameError");
  await box.removeCodeContext(context.id);
  assert.ok(!(await box.listCodeContexts()).some((known) => known.id === context.id));
  await assert.rejects(run("1", { context }), NotFoundError);
  // The SDK keeps why to itself.
  await assert.rejects(box.createCodeContext({ language: "cobol" }), SandboxError);
});

test("a time limit interrupts and the state stays", async () => {
  await run("before_timeout = 7");
  await assert.rejects(run("import time\nwhile True:\n    time.sleep(0.1)", { timeoutMs: 3000 }), TimeoutError);
  assert.equal((await run("before_timeout")).text, "7");
});
