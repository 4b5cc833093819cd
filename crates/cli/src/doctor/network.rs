//! Ports and names.

use std::{
    io,
    net::{SocketAddr, TcpListener},
};

use tokio::{net::lookup_host, time::timeout};

use super::{Check, PATIENCE, Plan, as_root};
use crate::{local_paths::Ready, server::data_dir};

pub(super) fn ports(plan: &Plan) -> [Check; 2] {
    // Ports our own server holds are as they should be.
    let own = data_dir::holder(&plan.data_dir).and_then(|_| Ready::read(&plan.data_dir).ok().flatten());
    let (own_http, own_https) = own.map(|ready| (ready.http_url, ready.https_url)).unzip();
    [port("http port", "--http", plan.http, own_http), port("https port", "--https", plan.https, own_https)]
}

fn port(name: &'static str, option: &str, address: SocketAddr, own_url: Option<String>) -> Check {
    match TcpListener::bind(address) {
        Ok(_) => Check::ok(name, format!("{address} is free")),
        Err(_) if own_url.is_some_and(|url| url.ends_with(&format!(":{}", address.port()))) => {
            Check::ok(name, format!("{address} is this server's"))
        }
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            let remedy = format!(
                "stockade up {option} {}:0   (or see who: ss -ltnp 'sport = :{}')",
                address.ip(),
                address.port()
            );
            Check::fail(name, format!("{address} is taken by another program"), remedy)
        }
        Err(error) => Check::fail(
            name,
            format!("cannot listen on {address}: {error}"),
            format!("stockade up {option} 127.0.0.1:0"),
        ),
    }
}

/// SDKs look up `api.e2b.DOMAIN` and a name per sandbox.
pub(super) async fn names(base_domain: &str) -> Check {
    const NAME: &str = "names";
    let name = format!("api.e2b.{base_domain}");
    let remedy = if base_domain.ends_with("localhost") {
        as_root("apt-get install --yes libnss-myhostname")
    } else {
        format!("let *.{base_domain} and *.e2b.{base_domain} point to this host in your DNS")
    };
    match timeout(PATIENCE, lookup_host((name.as_str(), 443))).await {
        Ok(Ok(mut addresses)) => match addresses.next() {
            Some(address) => Check::ok(NAME, format!("{name} is {}", address.ip())),
            None => Check::warn(NAME, format!("{name} has no address; SDKs will not find the server"), remedy),
        },
        Ok(Err(error)) => {
            Check::warn(NAME, format!("{name} cannot be looked up ({error}); SDKs will not find the server"), remedy)
        }
        Err(_) => Check::warn(NAME, format!("looking up {name} took too long"), remedy),
    }
}
