// What the public methods of an SDK can be told beside what they must be told, as its type declarations say.
import ts from "typescript";

// The connection's own options are the same for every method.
const OF_CONNECTIONS = new Set(["ConnectionOpts", "VolumeApiOpts"]);
const EVERYWHERE = new Set(["requestTimeoutMs", "signal"]);

/** Reads declarations; the answer gives the options of a class's method. */
export function signatures(path) {
  const settings = { skipLibCheck: true, moduleResolution: ts.ModuleResolutionKind.Bundler, module: ts.ModuleKind.ESNext };
  const program = ts.createProgram([path], settings);
  const checker = program.getTypeChecker();
  const classes = new Map();
  program.getSourceFile(path).forEachChild((node) => {
    if (ts.isClassDeclaration(node) && node.name) classes.set(node.name.text, node);
  });
  return (owner, method, isStatic) => {
    const members = classes.get(owner)?.members ?? [];
    const named = members.filter((member) => member.name?.getText() === method && ts.isMethodDeclaration(member));
    const found = named.filter((member) => isStatic === isStaticMember(member));
    return merged(found.map((member) => argumentsOf(member).map((parameter) => optionsOf(parameter, checker))));
  };
}

/** `this` has a place in declarations, and none in calls. */
function argumentsOf(member) {
  return member.parameters.filter((parameter) => parameter.name.getText() !== "this");
}

function isStaticMember(member) {
  return (ts.getCombinedModifierFlags(member) & ts.ModifierFlags.Static) !== 0;
}

/** `{ keys }` of an object of options, `{ name }` of an optional argument, or nothing. */
function optionsOf(parameter, checker) {
  const name = parameter.name.getText();
  if (/^(opts|options|config)$/i.test(name)) {
    const type = checker.getNonNullableType(checker.getTypeAtLocation(parameter));
    const parts = type.isUnion() ? type.types : [type];
    const symbols = parts.flatMap((part) => checker.getPropertiesOfType(part));
    return { keys: symbols.filter(isOption).map((symbol) => symbol.name) };
  }
  return parameter.questionToken || parameter.initializer ? { name } : {};
}

function isOption(symbol) {
  const isOptional = (symbol.flags & ts.SymbolFlags.Optional) !== 0;
  const interfaces = (symbol.declarations ?? []).map((declaration) => declaration.parent?.name?.text);
  return isOptional && !EVERYWHERE.has(symbol.name) && !interfaces.some((name) => OF_CONNECTIONS.has(name));
}

/** Of all overloads, by place. */
function merged(overloads) {
  const places = [];
  for (const overload of overloads) {
    overload.forEach(({ name, keys }, place) => {
      const all = (places[place] ??= { names: new Set(), keys: new Set() });
      if (name) all.names.add(name);
      for (const key of keys ?? []) all.keys.add(key);
    });
  }
  return places;
}
