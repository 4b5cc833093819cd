//! Which pages a snapshot keeps: the file `memory.map`.
//!
//! ```text
//!  8 bytes  "STKPAGE1"
//!  8 bytes  pages of the whole memory
//!  8 bytes  number of runs
//! 16 bytes  for each run: its first page, its number of pages
//! ```
//!
//! Numbers are little-endian. Runs are in order, not empty, and do not touch. `memory.pages` holds the pages
//! themselves, 4096 bytes each, in the same order. What is read is believed only as far as that goes.

use super::pages::Run;

const MAGIC: &[u8; 8] = b"STKPAGE1";

pub(crate) fn encode(pages: u64, runs: &[Run]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(24 + 16 * runs.len());
    bytes.extend(MAGIC);
    bytes.extend(pages.to_le_bytes());
    bytes.extend((runs.len() as u64).to_le_bytes());
    for run in runs {
        bytes.extend(run.first.to_le_bytes());
        bytes.extend(run.count.to_le_bytes());
    }
    bytes
}

/// Reads a map of a memory of so many pages.
pub(crate) fn decode(bytes: &[u8], pages: u64) -> Result<Vec<Run>, String> {
    let Some((header, entries)) = bytes.split_at_checked(24) else { return Err("it is too short".to_owned()) };
    let number = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
    if &header[..8] != MAGIC {
        return Err("it is not a list of pages".to_owned());
    }
    if number(&header[8..16]) != pages {
        return Err(format!("it is about {} pages of memory, the machine has {pages}", number(&header[8..16])));
    }
    if !entries.len().is_multiple_of(16) || number(&header[16..24]) != (entries.len() / 16) as u64 {
        return Err("its length is not the one it names".to_owned());
    }
    let mut runs = Vec::with_capacity(entries.len() / 16);
    let mut free_from = 0;
    for entry in entries.chunks_exact(16) {
        let run = Run { first: number(&entry[..8]), count: number(&entry[8..]) };
        let end = run.first.checked_add(run.count).filter(|end| *end <= pages);
        match end {
            Some(end) if run.count > 0 && run.first >= free_from => free_from = end + 1,
            _ => return Err(format!("{} pages from page {} on cannot be", run.count, run.first)),
        }
        runs.push(run);
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_is_read_as_it_was_written() {
        let runs = [Run { first: 0, count: 1 }, Run { first: 2, count: 5 }, Run { first: 99, count: 1 }];
        assert_eq!(decode(&encode(100, &runs), 100).expect("read"), runs);
        assert_eq!(decode(&encode(0, &[]), 0).expect("read"), []);
    }

    #[test]
    fn no_map_leads_outside_the_memory_or_over_a_page_twice() {
        let refused = |runs: &[(u64, u64)]| {
            let runs: Vec<Run> = runs.iter().map(|(first, count)| Run { first: *first, count: *count }).collect();
            decode(&encode(100, &runs), 100).expect_err("refused")
        };
        refused(&[(99, 2)]);
        refused(&[(u64::MAX, 2)]);
        refused(&[(1, u64::MAX)]);
        refused(&[(5, 0)]);
        refused(&[(5, 2), (6, 1)]);
        refused(&[(5, 2), (4, 1)]);
        refused(&[(5, 1), (6, 1)]);
        assert!(decode(&encode(101, &[]), 100).is_err());
    }

    #[test]
    fn every_cut_is_seen() {
        let whole = encode(100, &[Run { first: 3, count: 4 }]);
        for length in 0..whole.len() {
            assert!(decode(&whole[..length], 100).is_err(), "{length}");
        }
        let longer = [whole.as_slice(), &[0; 16]].concat();
        assert!(decode(&longer, 100).is_err());
    }
}
