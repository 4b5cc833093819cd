//! Policies: what is refused, what matches, what is explained.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use std::net::IpAddr;

use http::{Method, Uri};
use proptest::prelude::*;
use serde_json::{Value, json};
use stockade_gateway::policy::{CanonicalPath, CompiledPolicy, Destination, Explanation, Floor, Policy, classify};

fn compile(policy: Value) -> Result<CompiledPolicy, String> {
    let policy: Policy = serde_json::from_value(policy).map_err(|error| error.to_string())?;
    CompiledPolicy::compile(&Floor::default(), &policy).map_err(|error| error.to_string())
}

fn by_name(policy: &CompiledPolicy, name: &str, port: u16) -> bool {
    policy.connect(Destination::Name(name), port, &[]).allowed
}

fn explain(policy: Value, method: &str, url: &str, addresses: &[&str]) -> Explanation {
    let addresses: Vec<IpAddr> = addresses.iter().map(|address| address.parse().unwrap()).collect();
    let method = Method::from_bytes(method.as_bytes()).unwrap();
    compile(policy).unwrap().explain(&method, &url.parse::<Uri>().unwrap(), &addresses, &[])
}

#[test]
fn what_cannot_be_honoured_is_refused_with_its_field() {
    let token = "stk_0123456789012345678901234";
    let rule = |rule: Value| json!({"rules": [rule]});
    let http = |more: Value| {
        let mut rule = json!({"hosts": ["a.example"], "action": "allow"});
        rule.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"http": [rule]})
    };
    let substitution = |more: Value| {
        let mut one = json!({"placeholder": token, "secret": "KEY", "hosts": ["a.example"]});
        one.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"substitutions": [one]})
    };
    for (policy, field) in [
        (json!({"defualt": "deny"}), "defualt"),
        (json!({"upstream": {"socks5": "proxy.example"}}), "upstream"),
        (rule(json!({"action": "allow", "names": ["http://a.example"]})), "rules[0].names[0]"),
        (rule(json!({"action": "allow", "names": ["a.example", "*.*.example"]})), "rules[0].names[1]"),
        (rule(json!({"action": "allow", "names": ["~("]})), "rules[0].names[0]"),
        (rule(json!({"action": "allow", "names": ["10.0.0.1"]})), "rules[0].names[0]"),
        (rule(json!({"action": "allow", "cidrs": ["10.0.0.0/33"]})), "rules[0].cidrs[0]"),
        (rule(json!({"action": "allow", "cidrs": ["a.example"]})), "rules[0].cidrs[0]"),
        (rule(json!({"action": "allow", "ports": [0]})), "rules[0].ports[0]"),
        (rule(json!({"action": "allow", "ports": ["9-1"]})), "rules[0].ports[0]"),
        (rule(json!({"action": "allow", "l7": "sctp"})), "sctp"),
        (rule(json!({"action": "allow", "l7": "udp", "names": ["a.example"]})), "rules[0].ports"),
        (rule(json!({"action": "maybe"})), "maybe"),
        (http(json!({"hosts": []})), "http[0].hosts"),
        (http(json!({"methods": ["get"]})), "http[0].methods[0]"),
        (http(json!({"path": {"regex": "(a"}})), "http[0].path.regex"),
        (http(json!({"path": {"glob": "*"}})), "glob"),
        (http(json!({"action": {"sign": {"aws": {}}}})), "sign"),
        (http(json!({"action": {"set_headers": {}}})), "http[0].action"),
        (http(json!({"mask_echo": true})), "http[0].mask_echo"),
        (http(json!({"mask_echo": true, "action": {"forward": {"url": "https://p.example"}}})), "http[0].mask_echo"),
        (http(json!({"action": {"set_headers": {"host": "b"}}})), "http[0].action.set_headers.host"),
        (http(json!({"action": {"set_headers": {"a b": "c"}}})), "http[0].action.set_headers.a b"),
        (http(json!({"action": {"set_headers": {"x-a": "b\r\nc: d"}}})), "http[0].action.set_headers.x-a"),
        (http(json!({"action": {"set_headers": {"x-a": "${KEY}"}}})), "http[0].action.set_headers.x-a"),
        (http(json!({"scheme": "http", "action": {"set_headers": {"x-a": "${secrets.A}"}}})), "http[0].scheme"),
        (http(json!({"action": {"respond": {"status": 99}}})), "http[0].action.respond.status"),
        (http(json!({"action": {"respond": {"status": 204, "body": "x"}}})), "http[0].action.respond.body"),
        (substitution(json!({"placeholder": "short"})), "substitutions[0].placeholder"),
        (substitution(json!({"placeholder": "with spaces in it, which is wrong"})), "substitutions[0].placeholder"),
        (substitution(json!({"hosts": []})), "substitutions[0].hosts"),
        (substitution(json!({"secret": ""})), "substitutions[0].secret"),
        (substitution(json!({"in": {"headers": false, "basic": false}})), "substitutions[0].in"),
        (substitution(json!({"in": {"cookies": true}})), "cookies"),
        (json!({"attribution": {"Authorization": "x"}}), "attribution.Authorization"),
    ] {
        let error = compile(policy.clone()).err().unwrap_or_else(|| panic!("taken: {policy}"));
        assert!(error.contains(field), "{policy}: {error}");
    }
    let mut twice = substitution(json!({}));
    let one = twice["substitutions"][0].clone();
    twice["substitutions"].as_array_mut().unwrap().push(one);
    assert!(compile(twice).unwrap_err().contains("substitutions[1].placeholder"));
    let mut pinned = substitution(json!({}));
    pinned["intercept"] = json!({"never": ["*.example"]});
    assert!(compile(pinned).unwrap_err().contains("substitutions[0].hosts[0]"));
    let mut closed = http(json!({"hosts": ["*"], "action": "deny"}));
    closed["intercept"] = json!({"never": ["pinned.example"]});
    assert!(compile(closed).unwrap_err().contains("http[0].hosts[0]"));
    // Nor may a tenant close a host that an outer layer has rules for.
    let layer = |value: Value| serde_json::from_value::<Policy>(value).unwrap();
    let layers = [
        layer(http(json!({"hosts": ["a.example"], "action": "deny"}))),
        layer(json!({"intercept": {"never": ["a.example"]}})),
    ];
    assert!(CompiledPolicy::compile_layers(&Floor::default(), &layers).is_err());
    let floor = Floor { open_cidrs: vec!["169.254.169.254/32".into()], ..Floor::default() };
    assert!(CompiledPolicy::compile(&floor, &Policy::default()).unwrap_err().to_string().contains("open_cidrs[0]"));
}

#[test]
fn rules_are_ordered_and_ports_default_to_the_web() {
    let policy = compile(json!({
        "default": "deny",
        "rules": [
            {"action": "deny", "names": ["bad.a.example"]},
            {"action": "allow", "names": [".a.example"]},
            {"action": "allow", "names": ["db.example"], "ports": [5432, "6000-6010"]},
            {"action": "allow", "cidrs": ["93.184.216.0/24"], "ports": [22]},
        ],
    }))
    .unwrap();
    assert!(by_name(&policy, "a.example", 443) && by_name(&policy, "x.a.example", 80));
    assert!(!by_name(&policy, "a.example", 22) && !by_name(&policy, "bad.a.example", 443));
    assert!(by_name(&policy, "db.example", 6005) && !by_name(&policy, "db.example", 443));
    let address = |text: &str, port| policy.connect(Destination::Address(text.parse().unwrap()), port, &[]).allowed;
    assert!(address("93.184.216.34", 22) && !address("93.184.216.34", 443) && !address("93.184.217.1", 22));
    // An address rule opens literal addresses, no names: those would have to leave as queries.
    let resolved = Destination::Resolved("c.example", "93.184.216.34".parse().unwrap());
    assert!(!policy.connect(resolved, 22, &[]).allowed && !policy.may_reach("c.example"));
}

#[test]
fn a_denied_network_counts_for_the_address_a_name_resolves_to() {
    let policy = compile(json!({"rules": [
        {"action": "deny", "cidrs": ["93.184.216.0/24"]},
        {"action": "allow", "names": ["a.example"]},
    ]}))
    .unwrap();
    assert!(by_name(&policy, "a.example", 443));
    let at = |text: &str| policy.connect(Destination::Resolved("a.example", text.parse().unwrap()), 443, &[]).allowed;
    assert!(!at("93.184.216.34") && !at("::ffff:93.184.216.34") && at("93.184.217.34"));
}

#[test]
fn udp_is_open_where_it_is_named_and_closed_where_requests_are_read() {
    let udp = |policy: &Value, name: &str, port: u16| {
        compile(policy.clone()).unwrap().datagrams(Destination::Name(name), port, &[]).allowed
    };
    let tcp = |policy: &Value, name: &str, port: u16| by_name(&compile(policy.clone()).unwrap(), name, port);
    for closed in ["deny", "allow_web", "allow_public"] {
        assert!(!udp(&json!({"default": closed}), "a.example", 443), "{closed}");
    }
    let open = json!({"default": "allow_public_udp"});
    assert!(udp(&open, "a.example", 443) && tcp(&open, "a.example", 22));
    // What a rule says of UDP it says of nothing else, and the other way round; a denial without it is of both.
    let rules = json!({"default": "deny", "rules": [
        {"action": "deny", "names": ["no.example"]},
        {"action": "allow", "names": ["*.example"], "ports": [443], "l7": "udp"},
        {"action": "allow", "names": ["web.example"], "ports": [53, 80]},
    ]});
    assert!(udp(&rules, "a.example", 443) && !tcp(&rules, "a.example", 443));
    assert!(!udp(&rules, "web.example", 80) && tcp(&rules, "web.example", 80));
    assert!(!udp(&rules, "no.example", 443) && !udp(&rules, "a.example", 444));
    let only_tcp =
        json!({"default": "allow_public_udp", "rules": [{"action": "deny", "cidrs": ["0.0.0.0/0"], "l7": "udp"}]});
    assert!(tcp(&only_tcp, "a.example", 22));
    // HTTP/3 would carry requests past conditions on them.
    let mut read = json!({"default": "allow_public_udp", "http": [{"hosts": ["api.example"], "action": "deny"}],
                          "rules": [{"action": "allow", "names": ["*.example"], "ports": [443], "l7": "udp"}]});
    assert!(!udp(&read, "api.example", 443) && udp(&read, "other.example", 443) && !udp(&read, "other.org", 443));
    read["http"] = json!([]);
    read["intercept"] = json!({"always": ["api.example"]});
    assert!(!udp(&read, "api.example", 443) && !udp(&read, "other.org", 443));
    let layers: Vec<Policy> =
        [json!({"default": "allow_public"}), open.clone()].map(|layer| serde_json::from_value(layer).unwrap()).to_vec();
    let bound = CompiledPolicy::compile_layers(&Floor::default(), &layers).unwrap();
    assert!(!bound.datagrams(Destination::Name("a.example"), 443, &[]).allowed, "a bound without UDP closes it");
    let explained = explain(open, "GET", "udp://a.example:443", &["93.184.216.34"]);
    assert_eq!((explained.allowed, explained.mode), (true, "udp"));
    assert!(!explain(json!({}), "GET", "udp://a.example:443", &[]).allowed);
}

#[test]
fn layers_narrow_and_never_widen() {
    let layer = |value: Value| serde_json::from_value::<Policy>(value).unwrap();
    let bound = layer(json!({"default": "deny", "rules": [{"action": "allow", "names": ["*.example"]}]}));
    let wide = layer(json!({"default": "allow_public"}));
    let policy = CompiledPolicy::compile_layers(&Floor::default(), &[bound, wide]).unwrap();
    assert!(by_name(&policy, "a.example", 443));
    assert!(!by_name(&policy, "a.example", 22) && !by_name(&policy, "a.test", 443) && !policy.may_reach("a.test"));
}

#[test]
fn explanations_say_what_would_happen_and_why() {
    let policy = json!({
        "default": "deny",
        "rules": [{"id": "api", "action": "allow", "names": ["api.example", "docs.example"]},
                  {"id": "ssh", "action": "allow", "names": ["git.example"], "ports": [22]}],
        "http": [{"id": "key", "hosts": ["api.example"], "path": {"prefix": "/v1/"},
                  "action": {"set_headers": {"authorization": "${secrets.KEY}"}}},
                 {"id": "no", "hosts": ["api.example"], "methods": ["DELETE"], "action": "deny"}],
    });
    let ask = |method: &str, url: &str| explain(policy.clone(), method, url, &[]);
    let allowed = ask("GET", "https://api.example/v1/x");
    assert_eq!(
        (allowed.mode, allowed.rule.as_deref(), allowed.http_rule.as_deref()),
        ("intercept", Some("api"), Some("key"))
    );
    assert_eq!(allowed.secrets, ["KEY"]);
    assert_eq!(ask("GET", "https://docs.example/").mode, "pass");
    assert_eq!(ask("GET", "http://docs.example/").mode, "mediate");
    assert_eq!(ask("GET", "tcp://git.example:22").mode, "raw");
    for (method, url) in [
        ("DELETE", "https://api.example/x"),
        ("GET", "https://other.example/"),
        ("GET", "tcp://api.example:443"),
        ("GET", "https://93.184.216.34/"),
        ("GET", "https://169.254.169.254/"),
        ("GET", "ftp://api.example/"),
    ] {
        let refused = ask(method, url);
        assert!(!refused.allowed && refused.mode == "refuse" && !refused.reason.is_empty(), "{url}: {refused:?}");
    }
    let rebound = explain(policy.clone(), "GET", "https://docs.example/", &["10.0.0.1"]);
    assert_eq!((rebound.allowed, rebound.reason.as_str()), (false, "private and special addresses are closed"));
}

#[test]
fn paths_that_servers_read_in_two_ways_are_not_canonical() {
    for path in ["/", "/a", "/a/b/", "/a%20b", "/a;v=1/b", "/~u/x.html", "/a+b", "/a%C3%A9", "*"] {
        assert!(CanonicalPath::of(path).is_canonical(), "{path}");
    }
    for path in [
        "",
        "a",
        "//",
        "/a//b",
        "/./a",
        "/a/..",
        "/a/../b",
        "/a\\b",
        "/%2e%2e/b",
        "/a%2Fb",
        "/a%5cb",
        "/%61",
        "/a%",
        "/a%zz",
        "/a%00",
        "/a%252e",
        "/a/..;/b",
        "/a/.;x/b",
        "/é",
    ] {
        assert!(!CanonicalPath::of(path).is_canonical(), "{path}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Whatever a tenant writes, a closed address stays closed and an unlisted name under a deny default too.
    #[test]
    fn no_policy_of_a_tenant_opens_a_closed_address(
        address in prop_oneof![any::<u32>().prop_map(|bits| IpAddr::V4(bits.into())), any::<u128>().prop_map(|bits| IpAddr::V6(bits.into()))],
        port in any::<u16>(),
        default in prop_oneof![Just("deny"), Just("allow_web"), Just("allow_public")],
        rules in prop::collection::vec((any::<bool>(), prop_oneof![Just("*"), Just("*.example"), Just("~.*")], any::<bool>()), 0..4),
        unlisted in any::<bool>(),
    ) {
        let rules: Vec<Value> = rules.into_iter().map(|(allow, name, all)| json!({
            "action": if allow { "allow" } else { "deny" },
            "names": [name],
            "cidrs": if all { vec!["0.0.0.0/0", "::/0"] } else { vec![] },
            "ports": ["1-65535"],
        })).collect();
        let policy = compile(json!({"default": default, "rules": rules, "dns": {"resolve_unlisted": unlisted}})).unwrap();
        let closed = classify(address) != stockade_gateway::policy::AddressClass::Public || port == 25 || port == 0;
        for destination in [Destination::Address(address), Destination::Resolved("a.example", address)] {
            let allowed = policy.connect(destination, port, &[]).allowed;
            prop_assert!(!(closed && allowed), "{destination} {port}");
            prop_assert!(!policy.connect(destination, port, &[address]).allowed, "the host's own");
        }
    }

    /// Reading a policy from any text ends in a policy or an error.
    #[test]
    fn any_json_compiles_or_is_refused(name in ".{0,40}", cidr in ".{0,30}", path in ".{0,40}") {
        let _ = compile(json!({
            "rules": [{"action": "allow", "names": [name], "cidrs": [cidr]}],
            "http": [{"hosts": [name], "path": {"regex": path}, "action": {"set_headers": {"x-a": path}}}],
        }));
        let _ = CanonicalPath::of(&path);
    }
}
