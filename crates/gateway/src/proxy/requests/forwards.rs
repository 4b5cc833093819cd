//! Requests that go to a rule's proxy instead of their host.

use std::sync::{Arc, Mutex, PoisonError};

use http::{HeaderValue, request};

use super::Session;
use crate::{
    policy::{CompiledForward, Scheme},
    proxy::{
        client::{Client, Way},
        refuse::Refusal,
    },
};

/// Proxies of rules that a connection keeps clients of.
const MOST_FORWARDS: usize = 8;

/// Clients of the proxies a connection's requests were sent to.
#[derive(Default)]
pub(super) struct Forwards(Mutex<Vec<(CompiledForward, Arc<Client>)>>);

impl Session {
    /// The client of a rule's proxy.
    pub(super) fn client_of(&self, proxy: &CompiledForward) -> Arc<Client> {
        let mut known = self.forwards.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, client)) = known.iter().find(|(one, _)| one == proxy) {
            return Arc::clone(client);
        }
        if known.len() >= MOST_FORWARDS {
            known.clear();
        }
        let client = Arc::new(Client::new(Arc::clone(&self.sandbox), Way::Forward(proxy.clone()), Scheme::Https));
        known.push((proxy.clone(), Arc::clone(&client)));
        client
    }

    /// Makes a request one for a rule's proxy. What it says about where it comes from is ours alone.
    pub(super) fn mark_forwarded(
        &self,
        head: &mut request::Parts,
        proxy: &CompiledForward,
        host: &str,
    ) -> Result<(), Refusal> {
        let ours: Vec<_> =
            head.headers.keys().filter(|name| name.as_str().starts_with("x-stockade-")).cloned().collect();
        for name in ours {
            head.headers.remove(name);
        }
        let scheme = if self.scheme == Scheme::Http { "http" } else { "https" };
        for (name, value) in [
            ("x-stockade-forwarded-scheme", scheme),
            ("x-stockade-forwarded-host", host),
            ("x-stockade-forwarded-port", &self.target.port.to_string()),
            ("x-stockade-sandbox", self.sandbox.id.as_str()),
        ] {
            let value = HeaderValue::from_str(value).map_err(|_| Refusal::bad_request("a host that is no text"))?;
            head.headers.insert(name, value);
        }
        let target = head.uri.path_and_query().map_or("/", |target| target.as_str());
        let target = if target == "*" { "/" } else { target };
        let target = format!("{}{target}", proxy.path);
        head.uri = target.parse().map_err(|_| Refusal::bad_request("a target that is none below the proxy's path"))?;
        Ok(())
    }
}
