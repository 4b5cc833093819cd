//! Real work: a C project from Debian's sources, built and tried in a sandbox.

use std::{fs, process::Command};

use stockade_system_tests::{TestServer, source_directory, target_directory};

/// Needs what a build that went wrong would not have: arithmetic, strings, closures, coroutines, garbage
/// collection, files, errors.
const TRIAL: &str = r#"
assert(_VERSION == "Lua 5.4")
assert(7 // 2 == 3 and 2^53 == 9007199254740992.0 and math.maxinteger + 1 == math.mininteger)
assert(("%5.2f|%s"):format(math.pi, "x") == " 3.14|x" and ("a,b,,c"):gsub(",", ";") == "a;b;;c")
assert(string.unpack("<i4", string.pack("<i4", -42)) == -42)
local numbers = {}
for i = 1, 20000 do numbers[i] = (i * 7919) % 20011 end
table.sort(numbers)
for i = 2, #numbers do assert(numbers[i - 1] <= numbers[i]) end
local generate = coroutine.wrap(function() for i = 1, 3 do coroutine.yield(i) end end)
assert(generate() + generate() + generate() == 6)
local weak = setmetatable({}, { __mode = "v" })
weak[1] = {}
collectgarbage()
assert(weak[1] == nil)
local file = assert(io.open("trial.txt", "w"))
file:write("line\n"):close()
assert(io.lines("trial.txt")() == "line")
local ok, message = pcall(error, { code = 7 })
assert(not ok and message.code == 7)
print("all well")
"#;

#[tokio::test]
async fn lua_from_debians_sources_is_built_with_make_and_works() {
    let inputs = target_directory().join("test-inputs");
    let fetch = source_directory().join("tests/system/fetch_source.sh");
    let fetched = Command::new("sh").arg(fetch).arg("lua5.4").arg(&inputs).status().expect("there is a shell");
    assert!(fetched.success(), "the source could not be fetched");

    let server = TestServer::start().await;
    let sandbox = server.create("base").await;
    sandbox.write("/home/user/lua.tar", fs::read(inputs.join("lua5.4.tar")).expect("fetched")).await;
    sandbox.write("/home/user/trial.lua", TRIAL).await;
    let unpack = "mkdir lua && tar -xf lua.tar && tar -C lua --strip-components=1 -xf lua5.4.orig.tar.*";
    sandbox.shell(unpack).await.expect_success();
    // Unoptimised: an emulated compiler takes its time, and it is not the compiler that is tested.
    sandbox.shell("make -C lua -j2 linux MYCFLAGS=-O0").await.expect_success();
    let ran = sandbox.shell("make -C lua test && lua/src/lua trial.lua").await.expect_success();
    assert!(ran.stdout.ends_with(b"all well\n"), "{ran}");
    server.stop().await;
}
