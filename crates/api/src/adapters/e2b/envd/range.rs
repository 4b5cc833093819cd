//! The `Range` header, as far as one range goes; several are answered with the whole file, as HTTP allows.

use http::{HeaderMap, header};

/// One range of bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Range {
    /// From here to the end.
    From(u64),
    /// From here to there, both included.
    Between(u64, u64),
    /// This many at the end.
    Last(u64),
}

impl Range {
    /// The header's range; nothing if there is none we understand.
    pub(super) fn of(headers: &HeaderMap) -> Option<Self> {
        let text = headers.get(header::RANGE)?.to_str().ok()?.trim();
        let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
        let number = |text: &str| text.trim().parse::<u64>().ok();
        match (first.trim(), last.trim()) {
            ("", last) => number(last).map(Self::Last),
            (first, "") => number(first).map(Self::From),
            (first, last) => {
                let (first, last) = (number(first)?, number(last)?);
                (first <= last).then_some(Self::Between(first, last))
            }
        }
    }

    /// Offset and length in a file of `size` bytes; `None`: outside of it.
    pub(super) fn within(self, size: u64) -> Option<(u64, Option<u64>)> {
        let (start, end) = match self {
            Self::From(start) => (start, size),
            Self::Between(start, last) => (start, size.min(last.saturating_add(1))),
            Self::Last(count) => (size.saturating_sub(count), size),
        };
        (start < end).then(|| (start, Some(end - start)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(text: &str) -> Option<Range> {
        let mut headers = HeaderMap::new();
        headers.insert(header::RANGE, text.parse().expect("ascii"));
        Range::of(&headers)
    }

    #[test]
    fn ranges_are_read_and_cut_to_the_file() {
        assert_eq!(range("bytes=2-5").and_then(|range| range.within(10)), Some((2, Some(4))));
        assert_eq!(range("bytes=2-").and_then(|range| range.within(10)), Some((2, Some(8))));
        assert_eq!(range("bytes=-3").and_then(|range| range.within(10)), Some((7, Some(3))));
        assert_eq!(range("bytes=8-99").and_then(|range| range.within(10)), Some((8, Some(2))));
        assert_eq!(range("bytes=10-").and_then(|range| range.within(10)), None);
        for odd in ["bytes=5-2", "lines=1-2", "bytes=1-2,4-5", "bytes=x-", "bytes=-"] {
            assert_eq!(range(odd), None, "{odd}");
        }
    }
}
