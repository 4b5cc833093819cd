//! Which router a request's host name leads to.

/// The sandbox and port a host name (or a pair of headers) names. In the extensions of each request
/// that reaches a sandbox router; neither part has been looked up yet.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SandboxHost {
    /// The port in the guest.
    pub port: u16,
    /// The sandbox's id as written: one or more of `[a-z0-9]`.
    pub sandbox: String,
}
