//! The way out of a sandbox: resolved, judged and connected as one step.
//!
//! ```text
//! target ─> the operator's route? ──────────────────────────────────────────────> there, as it is
//!        └> addresses ─> each judged ─> the sandbox's proxy? ─> through it ─┐
//!                                    └> the deployment's proxy, or directly <┘
//! ```

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use futures::{FutureExt as _, future::BoxFuture};

use crate::{
    policy::{CompiledEgressProxy, CompiledForward, Decision, Destination},
    proxy_client::Login,
    sandbox::{Sandbox, Target},
    upstream::{BoxIo, ResolveError},
};

/// A connection on its way.
pub(crate) type Opening<'a, T> = BoxFuture<'a, io::Result<T>>;

/// What can be dialled.
struct Place {
    addresses: Vec<IpAddr>,
    route: Option<SocketAddr>,
    port: u16,
    is_named: bool,
}

/// Why nothing was reached.
#[derive(Debug)]
pub(crate) enum DialError {
    Denied(Decision, Option<IpAddr>),
    Resolve(ResolveError),
    Connect(String),
}

impl DialError {
    pub(crate) fn code(&self) -> &'static str {
        match self {
            Self::Denied(decision, _) => decision.reason.code(),
            Self::Resolve(ResolveError::NotFound) => "name_not_found",
            Self::Resolve(ResolveError::Failed(_)) => "name_not_resolved",
            Self::Connect(_) => "connect_failed",
        }
    }

    pub(crate) fn is_denied(&self) -> bool {
        matches!(self, Self::Denied(..))
    }

    pub(crate) fn message(&self) -> String {
        match self {
            Self::Denied(decision, Some(address)) => format!("it resolves to {address}: {}", decision.reason),
            Self::Denied(decision, None) => decision.reason.to_string(),
            Self::Resolve(error) => error.to_string(),
            Self::Connect(problem) => format!("it cannot be reached: {problem}"),
        }
    }
}

impl Sandbox {
    /// Resolves, judges and connects as one step: only an address that was judged is dialled, and if the policy
    /// changed meanwhile it is judged again.
    pub(crate) async fn dial(&self, target: &Target) -> Result<(BoxIo, SocketAddr), DialError> {
        let judge = |address| self.judge(&self.policy(), target, Some(address));
        self.dial_target(target, judge, |address, is_route| self.connect(address, is_route).boxed()).await
    }

    /// The same in another way: `judge` decides about each address, and `open` is given those that may be reached, and
    /// whether the operator's routes lead there.
    pub(crate) async fn dial_target<'a, T>(
        &self,
        target: &Target,
        judge: impl Fn(IpAddr) -> Decision + Send,
        open: impl Fn(SocketAddr, bool) -> Opening<'a, T> + Send,
    ) -> Result<(T, SocketAddr), DialError> {
        let route = self.route(target);
        let addresses = match &target.name {
            Some(_) if route.is_some() => route.map(|route| route.ip()).into_iter().collect(),
            Some(name) => self.resolve(name).await.map_err(DialError::Resolve)?,
            None => vec![target.address.into()],
        };
        let place = Place { addresses, route, port: target.port, is_named: target.name.is_some() };
        self.dial_first(place, judge, open).await
    }

    /// The same for the proxy of a rule.
    pub(crate) async fn dial_forward(&self, proxy: &CompiledForward) -> Result<(BoxIo, SocketAddr), DialError> {
        let open = |address, is_route| self.connect(address, is_route).boxed();
        self.dial_open(&proxy.host, proxy.port, proxy.is_operators, open).await
    }

    /// The same for a host that no rule of the sandbox's has to allow (see [`CompiledPolicy::forward`]).
    async fn dial_open<'a, T>(
        &self,
        host: &str,
        port: u16,
        is_operators: bool,
        open: impl Fn(SocketAddr, bool) -> Opening<'a, T> + Send,
    ) -> Result<(T, SocketAddr), DialError> {
        let route = self.shared.out.routes.get(host, port);
        let literal = host.parse::<IpAddr>().ok();
        let addresses = match (route, literal) {
            (Some(route), _) => vec![route.ip()],
            (None, Some(address)) => vec![address],
            (None, None) => self.resolve(host).await.map_err(DialError::Resolve)?,
        };
        let judge = |address| {
            let destination = match (route, literal) {
                (Some(_), _) => Destination::Name(host),
                (None, Some(_)) => Destination::Address(address),
                (None, None) => Destination::Resolved(host, address),
            };
            self.policy().forward(is_operators, destination, port, &self.shared.out.host_addresses.get())
        };
        let place = Place { addresses, route, port, is_named: literal.is_none() };
        self.dial_first(place, judge, open).await
    }

    /// Connects to an address that was judged, by the sandbox's proxy if it has one.
    async fn connect(&self, address: SocketAddr, is_route: bool) -> io::Result<BoxIo> {
        let out = &self.shared.out;
        if is_route {
            return out.dial_route(address).await;
        }
        let policy = self.policy();
        let stream = match policy.egress_proxy() {
            Some(proxy) => self.connect_through(proxy, address).await.map_err(|problem| {
                io::Error::other(format!("the sandbox's proxy {}:{} {problem}", proxy.place.host, proxy.place.port))
            })?,
            None => out.dial(address).await?,
        };
        if self.policy().egress_proxy() != policy.egress_proxy() {
            return Err(io::Error::other("the way out changed meanwhile"));
        }
        Ok(stream)
    }

    async fn connect_through(&self, proxy: &CompiledEgressProxy, address: SocketAddr) -> Result<BoxIo, String> {
        let place = &proxy.place;
        let login = match &proxy.login {
            None => None,
            Some((username, password)) => {
                let filled = password.fill(self.secrets(), &self.secret_request(&place.host)).await;
                let password = filled.map_err(|error| format!("is not asked: {error}"))?;
                let login = Login { username: username.clone(), password };
                login.check().map_err(|problem| format!("is not asked: {problem}"))?;
                Some(login)
            }
        };
        let out = &self.shared.out;
        let direct = |address, is_route| match is_route {
            true => out.dial_route(address).boxed(),
            false => out.dial(address).boxed(),
        };
        let (stream, _) = self
            .dial_open(&place.host, place.port, false, direct)
            .await
            .map_err(|error| format!("was not reached: {}", error.message()))?;
        let asked = place.ask(stream, &self.shared.tls_http1, login.as_ref(), address).await;
        asked.map_err(|error| error.to_string())
    }

    async fn dial_first<'a, T>(
        &self,
        place: Place,
        judge: impl Fn(IpAddr) -> Decision + Send,
        open: impl Fn(SocketAddr, bool) -> Opening<'a, T> + Send,
    ) -> Result<(T, SocketAddr), DialError> {
        let mut problem = None;
        for address in place.addresses {
            let decision = judge(address);
            if !decision.allowed {
                let denied = DialError::Denied(decision, place.is_named.then_some(address));
                problem.get_or_insert(denied);
                continue;
            }
            let upstream = place.route.unwrap_or_else(|| SocketAddr::new(address, place.port));
            let dial = open(upstream, place.route.is_some());
            match tokio::time::timeout(self.limits.dial_timeout(), dial).await {
                Ok(Ok(opened)) => {
                    let decision = judge(address);
                    if !decision.allowed {
                        return Err(DialError::Denied(decision, Some(address)));
                    }
                    return Ok((opened, upstream));
                }
                Ok(Err(error)) => problem = Some(DialError::Connect(error.to_string())),
                Err(_) => problem = Some(DialError::Connect("it did not answer in time".to_owned())),
            }
        }
        Err(problem.unwrap_or(DialError::Resolve(ResolveError::NotFound)))
    }

    /// Where the operator leads it.
    pub(crate) fn route(&self, target: &Target) -> Option<SocketAddr> {
        target.name.as_deref().and_then(|name| self.shared.out.routes.get(name, target.port))
    }
}
