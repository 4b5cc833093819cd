//! Writes what commands have to say: data to standard output, the rest to standard error.

use std::io::{self, Write};

use serde::Serialize;
use stockade_model::shortened;

use crate::failure::Failure;

/// Longest word of an error that is told whole: more than all but a few paths have.
const LONGEST_WORD: usize = 512;
/// Longest text of an error that is told whole.
const LONGEST_TEXT: usize = 4096;

/// How the user wants to be spoken to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ui {
    /// JSON in place of text, on both streams.
    pub(crate) json: bool,
}

impl Ui {
    /// One JSON document or what `text` makes, on standard output.
    pub(crate) fn data<T: Serialize>(self, value: &T, text: impl FnOnce() -> String) -> Result<(), Failure> {
        let mut out = if self.json {
            serde_json::to_string(value).map_err(|error| Failure::new("internal", error.to_string()))?
        } else {
            text()
        };
        if !out.is_empty() && !out.ends_with('\n') {
            out.push('\n');
        }
        write_all(&mut io::stdout().lock(), &out)
    }

    /// One line of events, on standard output; nothing without `--json`.
    pub(crate) fn event(self, event: &serde_json::Value) -> Result<(), Failure> {
        if self.json { write_all(&mut io::stdout().lock(), &format!("{event}\n")) } else { Ok(()) }
    }

    /// A remark for people, on standard error; nothing with `--json`.
    pub(crate) fn note(self, text: &str) {
        if !self.json {
            // Nobody is left to be told that standard error is closed.
            let _ = writeln!(io::stderr(), "{text}");
        }
    }

    /// An error, on standard error. Whatever it repeats of what was typed, read or answered is bounded here.
    pub(crate) fn failure(self, failure: &Failure) {
        let Failure { code, message, hint, in_the_way, exit: _ } = failure;
        let (message, hint) = (told(message), hint.as_deref().map(told));
        let mut text = if self.json {
            let mut error = serde_json::json!({"code": code, "message": message, "hint": hint});
            if let Some(in_the_way) = in_the_way {
                error["sandbox"] = in_the_way.sandbox.as_str().into();
                error["state"] = in_the_way.state.as_str().into();
            }
            serde_json::json!({"error": error}).to_string()
        } else {
            format!("error: {message}")
        };
        if let (false, Some(hint)) = (self.json, &hint) {
            text.push_str("\n\nhint: ");
            text.push_str(hint);
        }
        let _ = writeln!(io::stderr(), "{text}");
    }
}

fn write_all(out: &mut impl Write, text: &str) -> Result<(), Failure> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // `stockade ls | head -1`: the reader has what it wanted.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(error) => Err(Failure::host("write to standard output", error)),
        Ok(()) => Ok(()),
    }
}

/// Columns two spaces apart, as wide as their widest cell; the last one is not padded.
pub(crate) fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([head[column].len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let line = |cells: Vec<&str>| {
        let padded = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        let line = padded.collect::<Vec<_>>().join("  ");
        format!("{}\n", line.trim_end())
    };
    let mut text = line(head.to_vec());
    for row in rows {
        text.push_str(&line(row.iter().map(String::as_str).collect()));
    }
    text
}

/// An error's text for people: without control characters; of a word or a text that is too long what leads to it.
fn told(text: &str) -> String {
    let text: String = text.split_inclusive(char::is_whitespace).map(told_word).collect();
    let text = printable(&text);
    let Some((end, _)) = text.char_indices().nth(LONGEST_TEXT) else { return text };
    // The reason stands at the end.
    let (head, tail) =
        (&text[..end], text.char_indices().rev().nth(LONGEST_TEXT / 4).map_or("", |(at, _)| &text[at..]));
    format!("{head}… ({} bytes) …{tail}", text.len())
}

/// A word and the white space behind it.
fn told_word(word: &str) -> String {
    let bare = word.trim_end();
    if bare.chars().nth(LONGEST_WORD).is_none() {
        return word.to_owned();
    }
    format!("{}{}", shortened(bare), &word[bare.len()..])
}

/// Guest text made safe for a terminal: control characters become `\u{…}`.
pub(crate) fn printable(text: &str) -> String {
    let escape = |character: char| match character {
        '\n' | '\t' => character.to_string(),
        _ if character.is_control() => character.escape_unicode().to_string(),
        _ => character.to_string(),
    };
    text.chars().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_readable_without_colour() {
        let rows = [vec!["a".to_owned(), "running".to_owned()], vec!["long-id".to_owned(), "gone".to_owned()]];
        assert_eq!(table(&["ID", "STATE"], &rows), "ID       STATE\na        running\nlong-id  gone\n");
    }

    #[test]
    fn an_error_repeats_little_of_what_is_long_and_keeps_the_reason() {
        let path = format!("/tmp/{}", "é".repeat(400));
        let text = format!("cannot read {path}: no such file");
        assert_eq!(told(&text), text, "a long path is still one");
        let word = "x".repeat(100_000);
        let start = "x".repeat(64);
        assert_eq!(told(&format!("a {word}\nb")), format!("a {start}… (100000 bytes)\nb"));
        let words = told(&format!("cannot read {}: no such file", "a\u{1b}b ".repeat(30_000)));
        assert!(words.starts_with("cannot read a\\u{1b}b ") && words.ends_with(": no such file"), "{words}");
        assert!(words.chars().count() < LONGEST_TEXT * 2, "{}", words.len());
    }

    #[test]
    fn guest_text_cannot_drive_the_terminal() {
        assert_eq!(printable("a\u{1b}[2Jb\n"), "a\\u{1b}[2Jb\n");
    }
}
