//! Our own terminal: raw mode that is always undone, size, and whether we may read from it.

use std::{
    io::{self, IsTerminal as _},
    os::fd::{AsFd, BorrowedFd},
    sync::Mutex,
};

use nix::sys::termios::{self, SetArg, Termios};

use crate::client::PtySize;

/// What the terminal was set to before raw mode; taken by whoever restores it.
static SAVED: Mutex<Option<Termios>> = Mutex::new(None);

/// Raw mode for as long as this lives. A panic restores the terminal too; signals end the program
/// through its ordinary paths.
#[derive(Debug)]
pub(crate) struct RawMode(());

impl RawMode {
    /// Every key goes to the guest, Ctrl-C included. `None` when standard input is no terminal.
    pub(crate) fn enter() -> io::Result<Option<Self>> {
        let stdin = io::stdin();
        if !stdin.is_terminal() {
            return Ok(None);
        }
        let before = termios::tcgetattr(&stdin)?;
        let mut raw = before.clone();
        termios::cfmakeraw(&mut raw);
        if let Ok(mut saved) = SAVED.lock() {
            *saved = Some(before);
        }
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            restore();
            previous(info);
        }));
        termios::tcsetattr(&stdin, SetArg::TCSADRAIN, &raw)?;
        Ok(Some(Self(())))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        restore();
    }
}

fn restore() {
    let saved = SAVED.lock().ok().and_then(|mut saved| saved.take());
    if let Some(before) = saved {
        // The terminal may be gone; there is nothing to restore then.
        let _ = termios::tcsetattr(io::stdin(), SetArg::TCSADRAIN, &before);
    }
}

/// The size of the terminal we write to, if it is one.
pub(crate) fn size() -> Option<PtySize> {
    let (stdout, stdin) = (io::stdout(), io::stdin());
    size_of(stdout.as_fd()).or_else(|| size_of(stdin.as_fd()))
}

fn size_of(terminal: BorrowedFd<'_>) -> Option<PtySize> {
    use std::os::fd::AsRawFd as _;
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the descriptor is open for the call, and TIOCGWINSZ writes one winsize to the address given.
    let result = unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCGWINSZ, &raw mut size) };
    (result == 0 && size.ws_col > 0 && size.ws_row > 0).then_some(PtySize { cols: size.ws_col, rows: size.ws_row })
}

/// Whether reading standard input may stop us: it is a terminal and we are in its background.
pub(crate) fn is_in_background() -> bool {
    let stdin = io::stdin();
    stdin.is_terminal() && nix::unistd::tcgetpgrp(&stdin).is_ok_and(|foreground| foreground != nix::unistd::getpgrp())
}
