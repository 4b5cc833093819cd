//! The last bytes of an endless text: the guest's console, the emulator's complaints.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncReadExt},
    sync::watch,
};

/// Keeps the last bytes of a stream. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Tail {
    bytes: Arc<Mutex<VecDeque<u8>>>,
    ended: watch::Receiver<bool>,
}

impl Tail {
    /// Follows a stream to its end, keeping at most `most` bytes.
    pub(crate) fn follow(mut stream: impl AsyncRead + Send + Unpin + 'static, most: usize) -> Self {
        let bytes = Arc::new(Mutex::new(VecDeque::new()));
        let kept = bytes.clone();
        let (sender, ended) = watch::channel(false);
        tokio::spawn(async move {
            let mut buffer = [0; 4096];
            while let Ok(read) = stream.read(&mut buffer).await {
                if read == 0 {
                    break;
                }
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                kept.extend(&buffer[..read]);
                let excess = kept.len().saturating_sub(most);
                kept.drain(..excess);
            }
            let _ = sender.send(true);
        });
        Self { bytes, ended }
    }

    /// An empty one.
    pub(crate) fn empty() -> Self {
        Self { bytes: Arc::default(), ended: watch::channel(true).1 }
    }

    /// Waits for the end of the stream, not for long.
    pub(crate) async fn finish(&self, patience: Duration) {
        let mut ended = self.ended.clone();
        let _ = tokio::time::timeout(patience, ended.wait_for(|ended| *ended)).await;
    }

    /// What is kept, made printable, at most `lines` of it.
    pub(crate) fn last_lines(&self, lines: usize) -> String {
        let bytes: Vec<u8> = self.bytes.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect();
        printable(&bytes, lines)
    }
}

/// Control characters could play tricks on the terminal of whoever reads the error.
fn printable(bytes: &[u8], lines: usize) -> String {
    let text = String::from_utf8_lossy(bytes);
    let text: String =
        text.chars().filter(|letter| *letter == '\n' || *letter == '\t' || !letter.is_control()).collect();
    let all: Vec<&str> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_printable_last_lines_are_shown() {
        assert_eq!(printable(b"one\r\n\n\x1b[31mtwo\x07\r\nthree\xff", 2), "[31mtwo\nthree\u{fffd}");
        assert_eq!(printable(b"", 5), "");
    }

    #[tokio::test]
    async fn an_endless_stream_keeps_its_last_bytes_only() {
        let text = "0123456789\n".repeat(1000);
        let tail = Tail::follow(std::io::Cursor::new(text.into_bytes()), 25);
        tail.finish(Duration::from_secs(10)).await;
        assert_eq!(tail.last_lines(10), "89\n0123456789\n0123456789");
    }
}
