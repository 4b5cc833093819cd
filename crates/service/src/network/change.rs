//! A change of some of a sandbox's network.

use serde::Deserialize;
use stockade_gateway::policy::Policy;

use super::{NetworkSpec, Previews, SecretUse};

/// A change of a sandbox's network: what is given takes the place of what was, the rest stays.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, utoipa::ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct NetworkChange {
    /// As in the network as a whole. This, `allow`, `deny` and `policy` say together what may be reached: one of them
    /// given, all that was said before is gone.
    pub internet: Option<bool>,
    /// Destinations that are open.
    pub allow: Option<Vec<String>>,
    /// Destinations that are closed.
    pub deny: Option<Vec<String>>,
    /// Instead of the three above.
    pub policy: Option<Policy>,
    /// All secrets the guest may use from then on.
    pub secrets: Option<Vec<SecretUse>>,
    /// Who may look at its ports by their host names.
    pub previews: Option<Previews>,
    /// What servers in the sandbox see as `Host`; an empty one is none.
    pub mask_request_host: Option<String>,
}

impl NetworkChange {
    /// Another say on what may be reached, all of it; the rest stays.
    pub fn of_destinations(spec: NetworkSpec) -> Self {
        let NetworkSpec { internet, allow, deny, policy, .. } = spec;
        Self { internet, allow: Some(allow), deny: Some(deny), policy, ..Self::default() }
    }

    pub(super) fn applied_to(self, old: NetworkSpec) -> NetworkSpec {
        let Self { internet, allow, deny, policy, secrets, previews, mask_request_host } = self;
        let says_where = internet.is_some() || allow.is_some() || deny.is_some() || policy.is_some();
        let mut new = match says_where {
            true => NetworkSpec {
                internet,
                allow: allow.unwrap_or_default(),
                deny: deny.unwrap_or_default(),
                policy,
                ..old
            },
            false => old,
        };
        if let Some(secrets) = secrets {
            new.secrets = secrets;
        }
        if let Some(previews) = previews {
            new.previews = previews;
        }
        if let Some(host) = mask_request_host {
            new.mask_request_host = Some(host).filter(|host| !host.is_empty());
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(old: &str, change: &str) -> NetworkSpec {
        let change: NetworkChange = serde_json::from_str(change).expect("a change");
        change.applied_to(serde_json::from_str(old).expect("a network"))
    }

    fn network(text: &str) -> NetworkSpec {
        serde_json::from_str(text).expect("a network")
    }

    const OLD: &str = r#"{"internet": false, "allow": ["a.example"], "secrets": [{"secret": "s", "env": "S"}],
        "previews": "public", "mask_request_host": "localhost"}"#;

    #[test]
    fn what_is_not_named_stays() {
        assert_eq!(changed(OLD, "{}"), network(OLD));
        let other = changed(OLD, r#"{"deny": ["b.example"]}"#);
        let expected = r#"{"deny": ["b.example"], "secrets": [{"secret": "s", "env": "S"}],
            "previews": "public", "mask_request_host": "localhost"}"#;
        assert_eq!(other, network(expected));
        let other = changed(OLD, r#"{"secrets": [], "previews": "private", "mask_request_host": ""}"#);
        assert_eq!(other, network(r#"{"internet": false, "allow": ["a.example"]}"#));
    }

    #[test]
    fn a_policy_takes_the_place_of_the_short_form_and_the_other_way_round() {
        let policy = changed(OLD, r#"{"policy": {"default": "deny"}}"#);
        assert!(policy.policy.is_some() && policy.internet.is_none() && policy.allow.is_empty());
        let back = NetworkChange::of_destinations(network(r#"{"internet": false}"#)).applied_to(policy);
        assert_eq!((back.policy, back.internet, back.secrets.len()), (None, Some(false), 1));
    }

    #[test]
    fn a_field_that_is_not_known_is_refused() {
        assert!(serde_json::from_str::<NetworkChange>(r#"{"allow_out": []}"#).is_err());
    }
}
