//! The short form of a policy: internet or not, what is open, what is closed.
//!
//! ```text
//! a.example            ports 80 and 443 of this name
//! *.a.example:8443     one port of all names below it
//! 203.0.114.0/24       all ports of these addresses
//! [2600:1f00::1]:22    one port of one address
//! ```
//!
//! What is closed is closed whatever else is said. A list of what is open closes everything that is not on it.

use serde::{Deserialize, Serialize};
use stockade_model::quoted;

use super::{Action, DefaultAction, Policy, PolicyError, Ports, Rule, names::NamePattern};

/// What people say of a network who do not write rules.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SimplePolicy {
    /// Whether there is an internet at all, but for what `allow` names.
    pub internet: bool,
    /// Open; if anything is, the rest is closed.
    pub allow: Vec<String>,
    /// Closed.
    pub deny: Vec<String>,
}

impl Default for SimplePolicy {
    fn default() -> Self {
        Self { internet: true, allow: Vec::new(), deny: Vec::new() }
    }
}

impl SimplePolicy {
    /// As rules.
    ///
    /// # Errors
    /// An entry is no destination; `field` is its place.
    pub fn to_policy(&self) -> Result<Policy, PolicyError> {
        let denied = rules("deny", Action::Deny, &self.deny)?;
        let allowed = rules("allow", Action::Allow, &self.allow)?;
        let closed = !self.internet || !self.allow.is_empty();
        let default = if closed { DefaultAction::Deny } else { DefaultAction::AllowWeb };
        Ok(Policy { default, rules: denied.into_iter().chain(allowed).collect(), ..Policy::default() })
    }
}

fn rules(field: &str, action: Action, entries: &[String]) -> Result<Vec<Rule>, PolicyError> {
    let rule = |(at, entry): (usize, &String)| {
        let rule = Rule {
            id: format!("{field} {entry}"),
            action,
            names: Vec::new(),
            cidrs: Vec::new(),
            ports: Vec::new(),
            l7: None,
            origin: None,
        };
        destination(rule, entry).map_err(|why| {
            let problem = format!("{} {why}", quoted(entry));
            PolicyError::new(format!("{field}[{at}]"), problem)
        })
    };
    entries.iter().enumerate().map(rule).collect()
}

/// Fills in where a rule's destination is; the error goes on from the entry.
fn destination(rule: Rule, entry: &str) -> Result<Rule, String> {
    if entry.contains("://") {
        return Err("is a URL; use its host alone, with :PORT if need be".to_owned());
    }
    let (place, port) = split_port(entry);
    let is_network = is_network(place);
    // Regular expressions hold colons of their own; they belong into rules.
    if !is_network && (place.starts_with('~') || NamePattern::parse(place).is_err()) {
        let what = if place.is_empty() && port.is_some() { "names no host" } else { "is no destination" };
        return Err(format!("{what}; use a.example, *.a.example:8443 or 203.0.114.0/24"));
    }
    let ports = port.map(read_port).transpose()?.into_iter().collect();
    let place = vec![place.to_owned()];
    Ok(if is_network { Rule { cidrs: place, ports, ..rule } } else { Rule { names: place, ports, ..rule } })
}

fn read_port(text: &str) -> Result<Ports, String> {
    let ports = text.parse().map_or_else(|_| Ports::Range(text.to_owned()), Ports::One);
    // A sign or a space would be let pass by `parse`.
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-');
    match ports.range().filter(|_| is_plain) {
        Some(_) => Ok(ports),
        None => {
            Err(format!("has the port {}, which is none; use 1 to 65535, or a range such as 8000-8999", quoted(text)))
        }
    }
}

fn is_network(text: &str) -> bool {
    text.parse::<ipnet::IpNet>().is_ok() || text.parse::<std::net::IpAddr>().is_ok()
}

fn split_port(entry: &str) -> (&str, Option<&str>) {
    if let Some((address, rest)) = entry.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        return (address, rest.strip_prefix(':'));
    }
    match entry.split_once(':') {
        // More than one colon without brackets is an IPv6 address or network.
        Some((_, rest)) if rest.contains(':') => (entry, None),
        Some((place, port)) => (place, Some(port)),
        None => (entry, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{CompiledPolicy, Destination, Floor};

    fn compiled(internet: bool, allow: &[&str], deny: &[&str]) -> CompiledPolicy {
        let texts = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect();
        let simple = SimplePolicy { internet, allow: texts(allow), deny: texts(deny) };
        CompiledPolicy::compile(&Floor::default(), &simple.to_policy().expect("a policy")).expect("compiles")
    }

    fn name(policy: &CompiledPolicy, name: &str, port: u16) -> bool {
        policy.connect(Destination::Name(name), port, &[]).allowed
    }

    fn address(policy: &CompiledPolicy, text: &str, port: u16) -> bool {
        policy.connect(Destination::Address(text.parse().expect("an address")), port, &[]).allowed
    }

    #[test]
    fn the_web_is_open_by_default_and_nothing_else() {
        let policy = compiled(true, &[], &[]);
        assert!(name(&policy, "a.example", 443) && name(&policy, "a.example", 80));
        assert!(!name(&policy, "a.example", 22) && !address(&policy, "10.0.0.1", 443));
        let policy = compiled(false, &[], &[]);
        assert!(!name(&policy, "a.example", 443));
    }

    #[test]
    fn a_list_of_what_is_open_closes_the_rest_and_what_is_closed_stays_closed() {
        let policy = compiled(true, &["a.example", "*.b.example:8443", "1.2.3.0/24", "[2600::1]:22"], &["x.b.example"]);
        assert!(name(&policy, "a.example", 443) && !name(&policy, "a.example", 8443));
        assert!(name(&policy, "y.b.example", 8443) && !name(&policy, "y.b.example", 443));
        assert!(!name(&policy, "x.b.example", 8443) && !name(&policy, "c.example", 443));
        assert!(address(&policy, "1.2.3.4", 5432) && !address(&policy, "1.2.4.4", 5432));
        assert!(address(&policy, "2600::1", 22) && !address(&policy, "2600::1", 23));
    }

    #[test]
    fn an_entry_that_is_no_destination_is_refused_with_its_place() {
        for bad in ["", "http://a.example", "a b", "a.example/x", "~a:b", "1.2.3.4/40", "a..b"] {
            let simple =
                SimplePolicy { allow: vec!["a.example".to_owned(), bad.to_owned()], ..SimplePolicy::default() };
            assert_eq!(simple.to_policy().expect_err(bad).field, "allow[1]");
        }
        let why = |entry: &str| {
            let simple = SimplePolicy { allow: vec![entry.to_owned()], ..SimplePolicy::default() };
            simple.to_policy().expect_err(entry).to_string()
        };
        for port in ["99999", "65536", "0", "abc", "", "-1", "+1", "9-8", "0-5", "1-2-3", " 1"] {
            let told = why(&format!("a.example:{port}"));
            assert!(told.contains(&format!("has the port {port:?}, which is none; use 1 to 65535")), "{told}");
        }
        assert!(why("[2600::1]:0").contains("has the port"));
        assert!(why(":443").contains("names no host") && why(":").contains("names no host"));
        assert!(why("https://a.example").contains("is a URL"));
        let long = why(&"a".repeat(5000));
        assert!(long.len() < 300 && long.contains("… (5000 bytes) is no destination"), "{long}");
    }
}
