//! `stockade preview | tunnel`.

use std::net::{Ipv4Addr, SocketAddr};

use serde_json::json;
use tokio::net::TcpListener;

use super::{
    Context,
    attend::{Signals, code_of_signal},
};
use crate::{
    args::{Preview, Tunnel},
    failure::Failure,
    ui::printable,
};

pub(super) async fn preview(context: &Context, args: Preview) -> Result<(), Failure> {
    let preview = context.client.preview(&args.sandbox, args.port, args.lifetime).await?;
    context.ui.data(&preview, || preview["url"].as_str().map(printable).unwrap_or_default())
}

/// Serves connections side by side until interrupted, which is how it is meant to end.
pub(super) async fn tunnel(context: &Context, args: Tunnel) -> Result<(), Failure> {
    let mut signals = Signals::listen()?;
    // A mistyped id shows now and not with the first connection.
    context.client.sandbox(&args.sandbox).await?;
    let address = args.listen.unwrap_or_else(|| SocketAddr::from((Ipv4Addr::LOCALHOST, args.port)));
    let listener = TcpListener::bind(address).await.map_err(|error| {
        Failure::host(format!("listen on {address}"), error)
            .hint("--listen names another address; port 0 takes a free one")
    })?;
    let address = listener.local_addr().map_err(|error| Failure::host("listen", error))?;
    // Said before the first connection, so that scripts can wait for it.
    context.ui.data(&json!({"listening": address}), || address.to_string())?;
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let (stream, _) = accepted.map_err(|error| Failure::host("take a connection", error))?;
                let (context, sandbox, port) = (context.clone(), args.sandbox.clone(), args.port);
                tokio::spawn(async move {
                    let joined = async { context.client.connect_port(&sandbox, port).await?.join(stream).await };
                    if let Err(failure) = joined.await {
                        context.ui.failure(&failure);
                    }
                });
            }
            number = signals.next() => {
                return match code_of_signal(number) {
                    // Ctrl-C and SIGTERM are the ways out.
                    130 | 143 => Ok(()),
                    code => Err(Failure::new("interrupted", format!("ended by signal {number} (exit code {code})"))),
                };
            }
        }
    }
}
