// Answers *.localhost with loopback, as browsers and systemd-resolved do, where the system does not.
const dns = require("node:dns");
const original = dns.lookup;
dns.lookup = (name, options, callback) => {
  if (!name.endsWith(".localhost")) return original(name, options, callback);
  const done = typeof options === "function" ? options : callback;
  if (typeof options === "object" && options?.all) return done(null, [{ address: "127.0.0.1", family: 4 }]);
  return done(null, "127.0.0.1", 4);
};
