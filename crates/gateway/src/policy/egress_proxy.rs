//! The proxy a sandbox's owner has all its connections go through.

use stockade_model::Secret;

use super::{CompiledPolicy, EgressProxy, PolicyError};
use crate::{
    broker::Template,
    proxy_client::{Login, ProxyPlace},
};

/// A proxy that can be asked.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct CompiledEgressProxy {
    pub(crate) place: ProxyPlace,
    pub(crate) login: Option<(String, Template)>,
}

impl CompiledEgressProxy {
    pub(super) fn compile(proxy: &EgressProxy) -> Result<Self, PolicyError> {
        let wrong = |field: &str, problem: &str| PolicyError::new(format!("egress_proxy.{field}"), problem);
        let place = ProxyPlace::parse(&proxy.url).map_err(|problem| wrong("url", problem))?;
        let login = match (&proxy.username, &proxy.password) {
            (None, None) => None,
            (Some(username), Some(password)) => {
                let template =
                    Template::parse(password).map_err(|problem| PolicyError::new("egress_proxy.password", problem))?;
                // What a reference stands for is checked when it is used.
                let text = if template.has_secret() { "x" } else { password.as_str() };
                let login = Login { username: username.clone(), password: Secret::new(text) };
                login.check().map_err(|problem| PolicyError::new("egress_proxy", problem))?;
                Some((username.clone(), template))
            }
            (Some(_), None) => return Err(wrong("password", "is missing beside a username")),
            (None, Some(_)) => return Err(wrong("username", "is missing beside a password")),
        };
        Ok(Self { place, login })
    }
}

impl CompiledPolicy {
    /// What allowed connections go through.
    pub(crate) fn egress_proxy(&self) -> Option<&CompiledEgressProxy> {
        self.egress_proxy.as_ref()
    }
}

impl EgressProxy {
    /// As it may be shown: a password that is written out is left empty.
    #[must_use]
    pub fn shown(&self) -> Self {
        let is_reference = |text: &String| Template::parse(text).is_ok_and(|template| template.is_one_secret());
        let password = self.password.clone().map(|text| if is_reference(&text) { text } else { String::new() });
        Self { password, ..self.clone() }
    }
}
