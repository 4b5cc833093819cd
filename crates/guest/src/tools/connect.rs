//! Standard input and output joined with a Unix socket.

use std::{
    io::{self, Read, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    path::Path,
    thread,
};

const PIECE: usize = 32 << 10;

/// Returns when the socket's side has ended.
pub(super) fn join(path: &Path) -> io::Result<()> {
    let mut socket = UnixStream::connect(path)?;
    eprintln!("connected");
    let mut writer = socket.try_clone()?;
    thread::spawn(move || {
        // The end of our input is the end of the socket's; an error on either side shows on the other.
        let _ = copy(&mut io::stdin().lock(), &mut writer);
        let _ = writer.shutdown(Shutdown::Write);
    });
    copy(&mut socket, &mut io::stdout().lock())
}

/// `io::copy` would hold small pieces back.
fn copy(from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut buffer = vec![0; PIECE];
    loop {
        let count = match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        to.write_all(&buffer[..count])?;
        to.flush()?;
    }
}
