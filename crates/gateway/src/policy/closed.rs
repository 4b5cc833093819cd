//! What somebody asks to be open although the floor closes it: it never would be, so it is refused when it is written.
//! Only then: a floor that is tightened later must not keep sandboxes from running that are there.

use ipnet::IpNet;

use super::{
    Action, Policy, PolicyError, addresses,
    compile::{self, CompiledFloor, CompiledPolicy},
    names::NamePattern,
};

impl CompiledPolicy {
    /// Refuses rules of the sandbox's own policy, as it was written, that open what the operator's floor closes as a whole.
    ///
    /// # Errors
    /// One does; the field is its place.
    pub fn refuse_closed(&self, own: &Policy) -> Result<(), PolicyError> {
        let floor = &self.floor;
        for (at, rule) in own.rules.iter().enumerate().filter(|(_, rule)| rule.action == Action::Allow) {
            let refused = |field: &str, index: usize, what: &str, why: &str| {
                Err(PolicyError::new(
                    format!("rules[{at}].{field}[{index}]"),
                    format!("{what} cannot be opened: {why}"),
                ))
            };
            for (index, name) in rule.names.iter().enumerate() {
                if NamePattern::parse(name).is_ok_and(|pattern| floor.deny_names.covers(&pattern)) {
                    return refused("names", index, name, "the operator has closed it, or it serves metadata");
                }
            }
            for (index, cidr) in rule.cidrs.iter().enumerate() {
                if let Some(why) = compile::network(cidr).and_then(|network| why_closed(floor, &network)) {
                    return refused("cidrs", index, cidr, why);
                }
            }
            for (index, ports) in rule.ports.iter().enumerate() {
                let range = ports.range();
                if range.is_some_and(|(first, last)| (first..=last).all(|port| floor.deny_ports.contains(port))) {
                    return refused("ports", index, &ports.to_string(), "the operator has closed it");
                }
            }
        }
        Ok(())
    }
}

/// `None`: some of it can be open.
fn why_closed(floor: &CompiledFloor, network: &IpNet) -> Option<&'static str> {
    if addresses::is_all_metadata(network) {
        return Some("metadata addresses are always closed");
    }
    if floor.deny.iter().any(|closed| closed.contains(network)) {
        return Some("the operator has closed it");
    }
    let is_opened = |open: &IpNet| open.contains(network) || network.contains(open);
    let is_closed = addresses::is_all_private(network) && !floor.open.iter().any(is_opened);
    is_closed.then_some("private and special addresses are closed unless the operator opens them (floor.open_cidrs)")
}

#[cfg(test)]
mod tests {
    use super::{super::Floor, *};

    fn refused(floor: &str, rule: &str) -> Option<String> {
        let floor: Floor = serde_json::from_str(floor).expect("a floor");
        let policy: Policy = serde_json::from_str(&format!(r#"{{"rules": [{rule}]}}"#)).expect("a policy");
        let compiled = CompiledPolicy::compile(&floor, &policy).expect("compiles");
        compiled.refuse_closed(&policy).err().map(|error| error.field)
    }

    #[test]
    fn what_the_floor_closes_as_a_whole_is_refused_by_its_place() {
        let floor = r#"{"open_cidrs": ["10.20.0.0/16"], "deny_cidrs": ["203.0.114.0/24"],
            "deny_names": ["*.internal.example"], "deny_ports": [25, "6000-6100"]}"#;
        for (rule, field) in [
            (r#"{"action": "allow", "cidrs": ["8.8.8.8", "10.0.0.5"]}"#, "rules[0].cidrs[1]"),
            (r#"{"action": "allow", "cidrs": ["192.168.0.0/16"]}"#, "rules[0].cidrs[0]"),
            (r#"{"action": "allow", "cidrs": ["fd00::/8"]}"#, "rules[0].cidrs[0]"),
            (r#"{"action": "allow", "cidrs": ["::ffff:10.0.0.0/104"]}"#, "rules[0].cidrs[0]"),
            (r#"{"action": "allow", "cidrs": ["169.254.169.254"]}"#, "rules[0].cidrs[0]"),
            (r#"{"action": "allow", "cidrs": ["203.0.114.7"]}"#, "rules[0].cidrs[0]"),
            (r#"{"action": "allow", "names": ["db.internal.example"]}"#, "rules[0].names[0]"),
            (r#"{"action": "allow", "names": ["*.deep.internal.example"]}"#, "rules[0].names[0]"),
            (r#"{"action": "allow", "names": ["metadata.google.internal"]}"#, "rules[0].names[0]"),
            (r#"{"action": "allow", "names": ["mail.example"], "ports": [443, 25]}"#, "rules[0].ports[1]"),
            (r#"{"action": "allow", "names": ["x.example"], "ports": ["6000-6050"]}"#, "rules[0].ports[0]"),
        ] {
            assert_eq!(refused(floor, rule).as_deref(), Some(field), "{rule}");
        }
    }

    #[test]
    fn what_can_be_open_in_part_and_what_is_closed_anyway_are_taken() {
        let floor = r#"{"open_cidrs": ["10.20.0.0/16"], "deny_names": ["*.internal.example"], "deny_ports": [25]}"#;
        for rule in [
            r#"{"action": "allow", "cidrs": ["10.20.3.0/24", "10.0.0.0/8", "0.0.0.0/0", "::/0", "203.0.114.0/24"]}"#,
            r#"{"action": "deny", "cidrs": ["192.168.0.0/16"]}"#,
            r#"{"action": "allow", "names": ["internal.example", ".internal.example", "*", "*.example"]}"#,
            r#"{"action": "allow", "names": ["mail.example"], "ports": ["1-1023"]}"#,
        ] {
            assert_eq!(refused(floor, rule), None, "{rule}");
        }
    }
}
