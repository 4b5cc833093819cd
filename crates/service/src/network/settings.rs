//! A sandbox's network as its owner writes it, and as it is kept.

use std::collections::BTreeMap;

use http::HeaderValue;
use serde::{Deserialize, Serialize};
use stockade_gateway::{
    HostPort, broker,
    policy::{
        EgressProxy, NamePattern, OtherHost, Places, Policy, PolicyError, SimplePolicy, Substitution, any_covers,
    },
};
use stockade_model::{quoted, shortened};

use crate::ServiceError;

const MOST_SECRETS: usize = 64;

/// A sandbox's network: either the short form (`internet`, `allow`, `deny`) or a whole `policy`, and the secrets its
/// guest may use without having them.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct NetworkSpec {
    /// False: no internet, but for what `allow` names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub internet: Option<bool>,
    /// Destinations that are open: `a.example`, `*.a.example:8443`, `203.0.114.0/24`. If there is any, the rest is closed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<String>,
    /// Destinations that are closed, whatever else is said.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub deny: Vec<String>,
    /// Instead of the three above: ordered rules, conditions on requests, headers to be set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<Policy>,
    /// Secrets the guest uses by a token.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<SecretUse>,
    /// Who may look at its ports by their host names.
    #[serde(skip_serializing_if = "Previews::is_default")]
    pub previews: Previews,
    /// What servers in the sandbox see as `Host`: a name or address, with a port or not, `${PORT}` for the sandbox's
    /// port. The host that was asked for is then in `X-Forwarded-Host` alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mask_request_host: Option<String>,
}

/// Who may look at a sandbox's ports by their host names (`<port>-<id>.<base domain>`).
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Previews {
    /// Who has a link of its owner's, or the owner's key.
    #[default]
    Private,
    /// Everybody who knows the sandbox's id.
    Public,
    /// As `private`, and E2B's host names, which are public otherwise, take the sandbox's traffic token.
    Token,
}

impl Previews {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// A secret the guest uses by a token: the token is in the guest's environment and becomes the secret's value in
/// requests to the hosts it may go to, outside of the guest.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SecretUse {
    /// The secret's name.
    pub secret: String,
    /// The environment variable that holds the token.
    pub env: String,
    /// Where it may go; empty: wherever the secret may.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
    /// In which parts of a request it is replaced.
    #[serde(rename = "in", default)]
    pub places: Places,
    /// Only in these headers; empty: all but those that servers are known to echo.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub header_names: Vec<String>,
    /// What happens to a request that carries the token to another host.
    #[serde(default)]
    pub other_host: OtherHost,
    /// Put the token in place of the value in what hosts answer.
    #[serde(default)]
    pub mask_echo: bool,
}

/// What is kept of a network.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Settings {
    /// Counts up with each change.
    pub(crate) revision: u64,
    /// As it was written, `hosts` filled in.
    pub(crate) spec: NetworkSpec,
    /// By environment variable.
    tokens: BTreeMap<String, Token>,
}

#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
struct Token {
    secret: String,
    text: String,
}

/// Variables without which programs do not run, or by which they are made to run another way; `LD_*` besides.
const RESERVED_VARIABLES: [&str; 21] = [
    "AWS_CA_BUNDLE",
    "BASH_ENV",
    "CARGO_HTTP_CAINFO",
    "CURL_CA_BUNDLE",
    "DENO_CERT",
    "ENV",
    "GIT_SSL_CAINFO",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
    "HOME",
    "IFS",
    "LANG",
    "LOGNAME",
    "NODE_EXTRA_CA_CERTS",
    "PATH",
    "PIP_CERT",
    "PWD",
    "REQUESTS_CA_BUNDLE",
    "SHELL",
    "SSL_CERT_FILE",
    "TERM",
    "USER",
];

fn policy_error(error: &PolicyError) -> ServiceError {
    ServiceError::Invalid { field: "network", problem: error.to_string() }
}

impl Settings {
    /// Of a new sandbox. `hosts`: where its secrets may go, by their names.
    pub(crate) fn first(spec: NetworkSpec, hosts: BTreeMap<String, Vec<String>>) -> Result<Self, ServiceError> {
        Self { revision: 0, spec: NetworkSpec::default(), tokens: BTreeMap::new() }.changed(spec, &hosts)
    }

    /// Of no sandbox: what others are made of.
    pub(crate) fn unbound(spec: NetworkSpec) -> Self {
        Self { revision: 0, spec, tokens: BTreeMap::new() }
    }

    /// The same sandbox's, or one's that has its memory, with another spec: tokens its guest knows stay as they are.
    pub(crate) fn changed(
        &self,
        mut spec: NetworkSpec,
        hosts: &BTreeMap<String, Vec<String>>,
    ) -> Result<Self, ServiceError> {
        check(&spec)?;
        let mut tokens = BTreeMap::new();
        for (at, used) in spec.secrets.iter_mut().enumerate() {
            let may =
                hosts.get(&used.secret).ok_or_else(|| ServiceError::SecretNotFound { name: used.secret.clone() })?;
            if used.hosts.is_empty() {
                used.hosts.clone_from(may);
            }
            if let Some(beyond) = used.hosts.iter().find(|pattern| !covers(may, pattern)) {
                let (secret, may) = (&used.secret, may.join(", "));
                let beyond = quoted(beyond);
                let problem =
                    format!("secrets[{at}].hosts: {beyond} is not among the hosts of secret {secret} ({may})");
                return Err(ServiceError::Invalid { field: "network", problem });
            }
            let known = self.tokens.get(&used.env).filter(|token| token.secret == used.secret).cloned();
            let new = || Token { secret: used.secret.clone(), text: broker::placeholder() };
            tokens.insert(used.env.clone(), known.unwrap_or_else(new));
        }
        Ok(Self { revision: self.revision + 1, spec, tokens })
    }

    /// The policy of the sandbox's own layer.
    pub(crate) fn policy(&self) -> Result<Policy, ServiceError> {
        let mut policy = match &self.spec.policy {
            Some(policy) => policy.clone(),
            None => {
                let NetworkSpec { internet, allow, deny, .. } = self.spec.clone();
                let simple = SimplePolicy { internet: internet.unwrap_or(true), allow, deny };
                simple.to_policy().map_err(|error| policy_error(&error))?
            }
        };
        policy.revision = self.revision;
        policy.substitutions.extend(self.spec.secrets.iter().filter_map(|used| {
            let token = self.tokens.get(&used.env)?;
            Some(Substitution {
                placeholder: token.text.clone(),
                secret: used.secret.clone(),
                hosts: used.hosts.clone(),
                places: used.places,
                header_names: used.header_names.clone(),
                other_host: used.other_host,
                mask_echo: used.mask_echo,
            })
        }));
        Ok(policy)
    }

    /// Why its policy is refused, by the place in what was written.
    pub(crate) fn refused(&self, error: PolicyError) -> ServiceError {
        let PolicyError { field, problem } = &error;
        // Those of secrets come after the written ones.
        let written = self.spec.policy.as_ref().map_or(0, |policy| policy.substitutions.len());
        let of_secret = || {
            let (at, rest) = field.strip_prefix("substitutions[")?.split_once(']')?;
            Some(format!("secrets[{}]{rest}", at.parse::<usize>().ok()?.checked_sub(written)?))
        };
        let field = match of_secret() {
            Some(field) => field,
            None if field.starts_with("bounds.") || field.starts_with("floor.") => field.clone(),
            None if self.spec.policy.is_some() => format!("policy.{field}"),
            None if field == "rules" => "allow and deny".to_owned(),
            None if field.starts_with("rules[") => self.short_field(field),
            None => field.clone(),
        };
        policy_error(&PolicyError { field, problem: problem.clone() })
    }

    /// Where in the short form a rule that was made of it comes from.
    fn short_field(&self, field: &str) -> String {
        let at = field.strip_prefix("rules[").and_then(|rest| rest.split_once(']')?.0.parse::<usize>().ok());
        let Some(at) = at else { return field.to_owned() };
        match at.checked_sub(self.spec.deny.len()) {
            Some(at) => format!("allow[{at}]"),
            None => format!("deny[{at}]"),
        }
    }

    /// What the guest's processes hold in place of secrets.
    pub(crate) fn env(&self) -> BTreeMap<String, String> {
        self.tokens.iter().map(|(env, token)| (env.clone(), token.text.clone())).collect()
    }

    pub(crate) fn to_json(&self) -> String {
        serde_json::to_string(self).expect("settings have string keys and no failing serialisers")
    }

    pub(crate) fn from_json(text: &str) -> Result<Self, ServiceError> {
        serde_json::from_str(text).map_err(|error| ServiceError::Store(Box::new(error)))
    }
}

/// Whether a secret that may go to `patterns` may go to whatever matches `pattern`. What is no pattern is refused elsewhere,
/// by its place.
fn covers(patterns: &[String], pattern: &str) -> bool {
    patterns.iter().any(|one| one == "*" || one == pattern)
        || NamePattern::parse(pattern).map_or(true, |pattern| any_covers(patterns, &pattern) == Ok(true))
}

/// The `Host` of requests to a port; `None`: it is none.
pub(crate) fn masked_host(mask: &str, port: u16) -> Option<HeaderValue> {
    let host = mask.replace("${PORT}", &port.to_string());
    let authority: http::uri::Authority = host.parse().ok()?;
    HostPort::of(&authority).ok()?;
    HeaderValue::from_str(&host).ok()
}

impl NetworkSpec {
    /// Whether it makes sense by itself; its policy and secrets are looked at when a sandbox gets it.
    ///
    /// # Errors
    /// It does not; the error names the field.
    pub fn check(&self) -> Result<(), ServiceError> {
        check(self)
    }

    /// As it may be shown: without the password of its proxy, if that is written out.
    #[must_use]
    pub fn shown(mut self) -> Self {
        if let Some(policy) = &mut self.policy {
            policy.egress_proxy = policy.egress_proxy.as_ref().map(EgressProxy::shown);
        }
        self
    }
}

fn check(spec: &NetworkSpec) -> Result<(), ServiceError> {
    let invalid = |problem: String| Err(ServiceError::Invalid { field: "network", problem });
    if spec.policy.is_some() && (spec.internet.is_some() || !spec.allow.is_empty() || !spec.deny.is_empty()) {
        return invalid("takes either `policy` or `internet`, `allow` and `deny`, not both".to_owned());
    }
    if let Some(host) = spec.mask_request_host.as_ref().filter(|host| masked_host(host, 1).is_none()) {
        return invalid(format!(
            "mask_request_host: {} is no host; use host, host:port or host:${{PORT}}",
            quoted(host)
        ));
    }
    if spec.secrets.len() > MOST_SECRETS {
        return invalid(format!("has {} secrets, the most is {MOST_SECRETS}", spec.secrets.len()));
    }
    let mut seen = std::collections::BTreeSet::new();
    for (at, used) in spec.secrets.iter().enumerate() {
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        if used.env.is_empty() || used.env.starts_with(|c: char| c.is_ascii_digit()) || !used.env.bytes().all(is_name) {
            return invalid(format!("secrets[{at}].env: {} is no name of an environment variable", quoted(&used.env)));
        }
        if RESERVED_VARIABLES.contains(&&*used.env) || used.env.starts_with("LD_") {
            let name = shortened(&used.env);
            return invalid(format!("secrets[{at}].env: {name} is one that programs need as it is; take another name"));
        }
        if !seen.insert(&used.env) {
            return invalid(format!("secrets[{at}].env: {} is there twice", shortened(&used.env)));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(text: &str) -> NetworkSpec {
        serde_json::from_str(text).expect("a spec")
    }

    fn hosts() -> BTreeMap<String, Vec<String>> {
        BTreeMap::from([("github".to_owned(), vec!["api.github.com".to_owned()])])
    }

    #[test]
    fn a_token_stays_the_same_through_changes_and_is_new_in_another_sandbox() {
        let using = r#"{"secrets": [{"secret": "github", "env": "TOKEN"}]}"#;
        let first = Settings::first(spec(using), hosts()).expect("settings");
        let again = first.changed(spec(using), &hosts()).expect("settings");
        assert_eq!(first.env(), again.env());
        assert_eq!((first.revision, again.revision), (1, 2));
        let other = Settings::first(spec(using), hosts()).expect("settings");
        assert_ne!(first.env(), other.env());
        let policy = Settings::from_json(&again.to_json()).expect("read back").policy().expect("a policy");
        assert_eq!(policy.substitutions[0].hosts, ["api.github.com"]);
        assert_eq!(policy.substitutions[0].placeholder, first.env()["TOKEN"]);
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        let refused = |text: &str| Settings::first(spec(text), hosts()).expect_err(text).to_string();
        assert!(refused(r#"{"internet": false, "policy": {}}"#).contains("not both"));
        assert!(refused(r#"{"secrets": [{"secret": "github", "env": "A-B"}]}"#).contains("secrets[0].env"));
        assert!(refused(r#"{"secrets": [{"secret": "x", "env": "A"}]}"#).contains("\"x\""));
        let twice = r#"{"secrets": [{"secret": "github", "env": "A"}, {"secret": "github", "env": "A"}]}"#;
        assert!(refused(twice).contains("secrets[1].env: A is there twice"));
        for beyond in ["github.com", "*.github.com", ".api.github.com", "*", "~.*"] {
            let text = format!(r#"{{"secrets": [{{"secret": "github", "env": "A", "hosts": ["{beyond}"]}}]}}"#);
            let told = refused(&text);
            assert!(told.contains("secrets[0].hosts") && told.contains("(api.github.com)"), "{told}");
        }
        assert!(serde_json::from_str::<NetworkSpec>(r#"{"allow_list": []}"#).is_err());
    }

    #[test]
    fn a_masked_host_is_a_host_with_the_port_filled_in() {
        let masked = |mask: &str| masked_host(mask, 8000).map(|host| host.to_str().expect("text").to_owned());
        assert_eq!(masked("localhost").as_deref(), Some("localhost"));
        assert_eq!(masked("localhost:${PORT}").as_deref(), Some("localhost:8000"));
        assert_eq!(masked("[::1]:80").as_deref(), Some("[::1]:80"));
        for bad in [
            "",
            "a b",
            "a/b",
            "u@a",
            "a:",
            "a:b",
            "a:0",
            "a:99999",
            "é.example",
            "http://a",
            "a\r\nx: y",
            "${PORT}:${PORT}:1",
        ] {
            assert_eq!(masked(bad), None, "{bad:?}");
            let spec = NetworkSpec { mask_request_host: Some(bad.to_owned()), ..NetworkSpec::default() };
            assert!(Settings::first(spec, hosts()).is_err(), "{bad:?}");
        }
    }
}
