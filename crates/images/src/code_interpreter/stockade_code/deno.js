// Run once in a new kernel: how it prints, shows and ends.
(({ Console, core, jupyter: kernel }, jupyter) => {
  // A message that does not fit into a socket at once gets the kernel's next one in its middle, and the connection is lost:
  // what is printed goes in pieces, in UTF-16 units. Each costs milliseconds: some go at once, what comes on top together.
  const MOST = 65536;
  const AT_ONCE = 10;
  const WINDOW_MS = 100;
  const { broadcast } = jupyter;
  // The code that runs here may put others in their place.
  const { setTimeout, performance } = globalThis;
  let held = "";
  let isHeldError = false;
  let isDue = false;
  let windowEnd = 0;
  let sent = 0;
  const flush = () => {
    const text = held;
    held = "";
    for (let from = 0, to; from < text.length; from = to) {
      to = from + MOST;
      const isPairCut = (text.charCodeAt(to - 1) & 0xfc00) === 0xd800;
      if (isPairCut) to -= 1;
      core.print(text.slice(from, to), isHeldError);
    }
  };
  const print = (text, isError) => {
    if (isError !== isHeldError || held.length >= MOST) flush();
    held += text;
    isHeldError = isError;
    const now = performance.now();
    if (now >= windowEnd) {
      windowEnd = now + WINDOW_MS;
      sent = 0;
    }
    if (sent++ < AT_ONCE) return flush();
    if (isDue) return;
    isDue = true;
    setTimeout(() => {
      isDue = false;
      flush();
    }, WINDOW_MS);
  };
  globalThis.console = new Console((text, level) => print(text, level > 1));
  // Node's process writes through these, which lead nowhere in a kernel.
  for (const stream of [Deno.stdout, Deno.stderr]) {
    const decoder = new TextDecoder();
    stream.writeSync = (bytes) => {
      print(decoder.decode(bytes, { stream: true }), stream === Deno.stderr);
      return bytes.length;
    };
    stream.write = async (bytes) => stream.writeSync(bytes);
  }

  // An error that nobody catches would end the kernel's loop, which starts again after half a minute and tells nobody.
  const textOf = (error) => {
    try {
      return String(error?.stack ?? Deno.inspect(error));
    } catch {
      return "an error that cannot be shown";
    }
  };
  const tell = (event, what, error) => {
    event.preventDefault();
    print(`${what} ${textOf(error)}\n`, true);
  };
  addEventListener("error", (event) => tell(event, "Uncaught", event.error));
  addEventListener("unhandledrejection", (event) => tell(event, "Uncaught (in promise)", event.reason));

  // A promise left as the value of a cell is awaited before it is shown.
  Object.defineProperty(Promise.prototype, Symbol.for("Jupyter.display"), {
    configurable: true,
    async value() {
      const value = await this;
      const own = value?.[Symbol.for("Jupyter.display")];
      if (typeof own === "function") return await own.call(value);
      if (value === undefined) return {};
      return { "text/plain": typeof value === "string" ? value : Deno.inspect(value, { colors: false }) };
    },
  });
  // What is shown comes after what was printed before it.
  for (const name of ["broadcast", "display"]) {
    const own = jupyter[name];
    jupyter[name] = (...what) => {
      flush();
      return own.apply(jupyter, what);
    };
  }
  // After the value of a cell, which may be undefined, comes the mark; a cell that fails has no value.
  const mark = Symbol.for("stockade_output_end");
  const markEnd = (execution_count) => {
    flush();
    return broadcast(mark.description, { execution_count });
  };
  const show = kernel.broadcastResult;
  kernel.broadcastResult = async (execution_count, value) => {
    flush();
    try {
      await show(execution_count, value);
    } finally {
      markEnd(execution_count);
    }
  };
  Object.defineProperty(globalThis, mark, { value: markEnd });
})(Deno[Deno.internal], Deno.jupyter);
undefined;
