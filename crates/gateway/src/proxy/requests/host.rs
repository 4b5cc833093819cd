//! Which host a request is for.

use http::{Request, Version, header, uri::Authority};

use super::Session;
use crate::{
    HostPort,
    policy::Scheme,
    proxy::{BoxBody, refuse::Refusal},
};

impl Session {
    /// The host of a request, which has to be the connection's: what it says twice has to agree.
    pub(super) fn host_of(&self, request: &Request<BoxBody>) -> Result<String, Refusal> {
        let mut hosts = request.headers().get_all(header::HOST).iter();
        let (first, more) = (hosts.next(), hosts.next());
        if more.is_some() {
            return Err(Refusal::bad_request("more than one Host header"));
        }
        let header = match first {
            Some(value) => Some(value.to_str().map_err(|_| Refusal::bad_request("a Host header that is no text"))?),
            None if request.version() == Version::HTTP_2 || request.version() == Version::HTTP_10 => None,
            None => return Err(Refusal::bad_request("no Host header")),
        };
        let in_target = request.uri().authority().map(Authority::as_str);
        let mut said = header.into_iter().chain(in_target).peekable();
        if said.peek().is_none() && self.target.name.is_none() {
            return Ok(self.target.host());
        }
        if said.peek().is_none() {
            return Err(Refusal::bad_request("no Host header"));
        }
        let mut host = None;
        for text in said {
            let here = self.authority_here(text).ok_or_else(|| self.misdirected(text))?;
            if host.as_ref().is_some_and(|before| *before != here) {
                return Err(self.misdirected(text));
            }
            host = Some(here);
        }
        host.ok_or_else(|| Refusal::bad_request("no Host header"))
    }

    fn misdirected(&self, asked: &str) -> Refusal {
        let scheme = if self.scheme == Scheme::Http { "http" } else { "https" };
        Refusal::misdirected(&format!("{}:{}", self.target.host(), self.target.port), &format!("{scheme}://{asked}"))
    }

    /// The host in `text` if this connection leads to it.
    fn authority_here(&self, text: &str) -> Option<String> {
        let authority: Authority = text.parse().ok()?;
        let default = if self.scheme == Scheme::Http { 80 } else { 443 };
        // `user@host` is for people.
        let place = HostPort::of(&authority).ok()?.or(default);
        if place.port != self.target.port {
            return None;
        }
        match (&self.target.name, place.address()) {
            (Some(name), None) => (**name == *place.host).then_some(place.host),
            (Some(_), Some(_)) => None,
            // To an address the guest used by itself, a name can only be said, never proven.
            (None, None) => Some(place.host),
            (None, Some(_)) => (place.host == self.target.host()).then_some(place.host),
        }
    }
}
