//! Names the operator leads somewhere: a mirror inside the deployment, a service under a name of its own, a proxy.
//!
//! ```text
//! "pypi.example"       -> 10.0.0.7        any port, the same there
//! "api.example:443"    -> 10.0.0.8:8443   this port, another there
//! ```
//!
//! A policy judges such a destination by its name as any other; its address is the operator's word and is neither
//! resolved nor judged.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use crate::policy::normalize_name;

/// Why a route is refused.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("routes.{name}: {problem}")]
pub struct RouteError {
    /// As it was written.
    pub name: String,
    /// What is wrong and what would do.
    pub problem: &'static str,
}

/// Names and where they lead.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Routes(BTreeMap<(String, Option<u16>), (IpAddr, Option<u16>)>);

impl Routes {
    /// Reads routes as they are written.
    ///
    /// # Errors
    /// A name or an address is none.
    pub fn parse(written: &BTreeMap<String, String>) -> Result<Self, RouteError> {
        let mut routes = BTreeMap::new();
        for (from, to) in written {
            let wrong = |problem| RouteError { name: from.clone(), problem };
            let (name, port) = match from.rsplit_once(':') {
                Some((name, port)) => (name, Some(port.parse().map_err(|_| wrong("the port is no number"))?)),
                None => (from.as_str(), None),
            };
            let name = normalize_name(name).ok_or_else(|| wrong("is no host name; use name or name:port"))?;
            let target = match to.parse::<SocketAddr>() {
                Ok(socket) => (socket.ip(), Some(socket.port())),
                Err(_) => (to.parse().map_err(|_| wrong("leads to no address; use address or address:port"))?, None),
            };
            routes.insert((name, port), target);
        }
        Ok(Self(routes))
    }

    /// Where a name and port lead.
    pub fn get(&self, name: &str, port: u16) -> Option<SocketAddr> {
        let exact = self.0.get(&(name.to_owned(), Some(port)));
        let (address, there) = exact.or_else(|| self.0.get(&(name.to_owned(), None)))?;
        Some(SocketAddr::new(*address, there.unwrap_or(port)))
    }

    /// Whether a name leads anywhere, on some port.
    pub fn knows(&self, name: &str) -> bool {
        let first = (name.to_owned(), None);
        self.0.range(first..).next().is_some_and(|((known, _), _)| known == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routes(pairs: &[(&str, &str)]) -> Result<Routes, RouteError> {
        Routes::parse(&pairs.iter().map(|(from, to)| ((*from).to_owned(), (*to).to_owned())).collect())
    }

    #[test]
    fn a_route_with_a_port_is_better_than_one_without() {
        let routes = routes(&[("A.example", "10.0.0.1"), ("a.example:443", "[::1]:8443")]).expect("routes");
        assert_eq!(routes.get("a.example", 443), Some("[::1]:8443".parse().expect("an address")));
        assert_eq!(routes.get("a.example", 80), Some("10.0.0.1:80".parse().expect("an address")));
        assert_eq!(routes.get("b.example", 80), None);
        assert!(routes.knows("a.example") && !routes.knows("a.exampl") && !routes.knows("b.example"));
    }

    #[test]
    fn what_is_no_name_or_leads_nowhere_is_refused_by_name() {
        for (from, to) in
            [("", "10.0.0.1"), ("10.0.0.1", "10.0.0.2"), ("a.example:x", "10.0.0.1"), ("a.example", "b.example")]
        {
            assert_eq!(routes(&[(from, to)]).expect_err("wrong").name, from);
        }
    }
}
