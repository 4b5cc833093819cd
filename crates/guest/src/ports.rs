//! Tunnels to ports on the guest's loopback. The request's body goes in, the answer's body comes out, and
//! each side can end its direction alone.

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame};
use http_body_util::BodyExt;
use hyper::{Method, Request, Response, body::Incoming};
use stockade_wire::{ErrorBody, ErrorCode};
use tokio::{
    io::{AsyncRead, AsyncWriteExt, ReadBuf},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    task::JoinHandle,
};

use crate::{
    failure::{Result, failed, invalid},
    http::Reply,
    routes,
};

const PIECE: usize = 32 << 10;

/// Connects to a port and hands both directions over to bodies.
pub(crate) async fn connect(port: &str, request: Request<Incoming>) -> Result<Response<Reply>> {
    if request.method() != Method::POST {
        return Err(routes::unknown("ports"));
    }
    let number: u16 =
        port.parse().ok().filter(|port| *port != 0).ok_or_else(|| invalid(format!("'{port}' is not a port")))?;
    let stream = dial(number).await?;
    // Small answers of an interactive service must not wait for more.
    stream.set_nodelay(true).map_err(failed("set up the connection"))?;
    let (reader, writer) = stream.into_split();
    let upward = tokio::spawn(send(request.into_body(), writer));
    Ok(Response::new(Reply::stream(FromPort { reader, buffer: BytesMut::new(), upward, is_done: false })))
}

async fn dial(port: u16) -> Result<TcpStream> {
    let v4 = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let v6 = SocketAddr::from((Ipv6Addr::LOCALHOST, port));
    match TcpStream::connect(v4).await {
        Ok(stream) => return Ok(stream),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
        Err(error) => return Err(failed(format_args!("connect to port {port}"))(error)),
    }
    let closed = |_| ErrorBody::new(ErrorCode::PortClosed, format!("nothing listens on port {port}"));
    TcpStream::connect(v6).await.map_err(closed)
}

/// Ends the connection's input when the body ends; a body that breaks off resets the connection.
async fn send(mut body: Incoming, mut writer: OwnedWriteHalf) -> io::Result<()> {
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else {
            let _ = writer.as_ref().set_zero_linger();
            return Ok(());
        };
        if let Ok(data) = frame.into_data() {
            writer.write_all(&data).await?;
        }
    }
    writer.shutdown().await
}

struct FromPort {
    reader: OwnedReadHalf,
    buffer: BytesMut,
    upward: JoinHandle<io::Result<()>>,
    is_done: bool,
}

impl Body for FromPort {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let port = self.get_mut();
        if port.is_done {
            return Poll::Ready(None);
        }
        port.buffer.resize(PIECE, 0);
        let mut space = ReadBuf::new(&mut port.buffer);
        ready!(Pin::new(&mut port.reader).poll_read(context, &mut space))?;
        let read = space.filled().len();
        if read == 0 {
            port.is_done = true;
            return Poll::Ready(None);
        }
        Poll::Ready(Some(Ok(Frame::data(Bytes::copy_from_slice(&port.buffer[..read])))))
    }
}

impl Drop for FromPort {
    /// The client has gone, or the service has closed its side: in the first case nobody will use
    /// the other direction any more, in the second it may go on.
    fn drop(&mut self) {
        if !self.is_done {
            self.upward.abort();
        }
    }
}
