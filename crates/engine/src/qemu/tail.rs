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
    progress: watch::Receiver<Progress>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    bytes_seen: u64,
    has_ended: bool,
}

impl Tail {
    /// Follows a stream to its end, keeping at most `most` bytes.
    pub(crate) fn follow(mut stream: impl AsyncRead + Send + Unpin + 'static, most: usize) -> Self {
        let bytes = Arc::new(Mutex::new(VecDeque::new()));
        let kept = bytes.clone();
        let (sender, progress) = watch::channel(Progress::default());
        tokio::spawn(async move {
            let mut buffer = [0; 4096];
            while let Ok(read) = stream.read(&mut buffer).await {
                if read == 0 {
                    break;
                }
                {
                    let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                    kept.extend(&buffer[..read]);
                    let excess = kept.len().saturating_sub(most);
                    kept.drain(..excess);
                }
                sender.send_modify(|progress| progress.bytes_seen += read as u64);
            }
            sender.send_modify(|progress| progress.has_ended = true);
        });
        Self { bytes, progress }
    }

    /// An empty one.
    pub(crate) fn empty() -> Self {
        let ended = Progress { bytes_seen: 0, has_ended: true };
        Self { bytes: Arc::default(), progress: watch::channel(ended).1 }
    }

    /// Waits for the end of the stream, not for long.
    pub(crate) async fn finish(&self, patience: Duration) {
        let mut progress = self.progress.clone();
        let _ = tokio::time::timeout(patience, progress.wait_for(|progress| progress.has_ended)).await;
    }

    /// Waits until the kept bytes hold a text; false: the stream ended before.
    pub(crate) async fn shows(&self, text: &str) -> bool {
        let mut progress = self.progress.clone();
        loop {
            let has_ended = progress.borrow_and_update().has_ended;
            if String::from_utf8_lossy(&self.kept()).contains(text) {
                return true;
            }
            if has_ended || progress.changed().await.is_err() {
                return false;
            }
        }
    }

    /// What is kept, made printable, at most `lines` of it.
    pub(crate) fn last_lines(&self, lines: usize) -> String {
        printable(&self.kept(), lines)
    }

    fn kept(&self) -> Vec<u8> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect()
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
