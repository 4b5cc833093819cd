//! Writes what commands have to say: data to standard output, the rest to standard error.

use std::io::{self, Write};

use serde::Serialize;

use crate::failure::Failure;

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

    /// An error, on standard error.
    pub(crate) fn failure(self, failure: &Failure) {
        let mut text = if self.json {
            let Failure { code, message, hint, sandbox, state, exit: _ } = failure;
            let mut error = serde_json::json!({"code": code, "message": message, "hint": hint});
            for (name, value) in [("sandbox", sandbox), ("state", state)] {
                if let Some(value) = value {
                    error[name] = value.as_str().into();
                }
            }
            serde_json::json!({"error": error}).to_string()
        } else {
            format!("error: {}", failure.message)
        };
        if let (false, Some(hint)) = (self.json, &failure.hint) {
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
    fn guest_text_cannot_drive_the_terminal() {
        assert_eq!(printable("a\u{1b}[2Jb\n"), "a\\u{1b}[2Jb\n");
    }
}
