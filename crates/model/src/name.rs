//! What clients may call things, and how their words are told back to them.
//!
//! Every name is refused by the same rule wherever it comes in, and the refusal says the rule and what breaks it. Words of
//! a client's stand in an error text through [`quoted`] and [`shortened`] alone: it escapes what would drive a terminal and does not repeat
//! all of a long text.

use std::fmt;

use crate::{ApiKeyId, MachineId, SandboxId, SnapshotId, SshKeyId, TemplateId, WorkspaceId};

/// Characters of a client's text that an error repeats.
const SHOWN_CHARS: usize = 64;

/// A client's text in an error text: quoted and escaped; of a long one the beginning and how long it is.
pub fn quoted(text: &str) -> Quoted<'_> {
    Quoted(text)
}

/// The same without the quotes, for texts that have quotes of their own or a peer's exact words.
pub fn shortened(text: &str) -> String {
    let escape = |char: char| if char.is_control() { char.escape_default().to_string() } else { char.to_string() };
    match text.char_indices().nth(SHOWN_CHARS) {
        None => text.chars().map(escape).collect(),
        Some((end, _)) => format!("{}… ({} bytes)", text[..end].chars().map(escape).collect::<String>(), text.len()),
    }
}

/// See [`quoted`].
#[derive(Clone, Copy, Debug)]
pub struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.char_indices().nth(SHOWN_CHARS) {
            None => write!(f, "{:?}", self.0),
            Some((end, _)) => write!(f, "{:?}… ({} bytes)", &self.0[..end], self.0.len()),
        }
    }
}

/// What a kind of name may be.
#[derive(Clone, Copy, Debug)]
pub struct NameRule {
    longest: usize,
    characters: &'static str,
    allows: fn(char) -> bool,
    /// Stands where an id may stand as well, and in paths.
    is_reference: bool,
}

/// Names of snapshots; the newest of a name is meant by it.
pub const SNAPSHOT_NAME: NameRule =
    NameRule { longest: 128, characters: "no control characters", allows: is_printable, is_reference: true };
/// Names of templates that are built.
pub const TEMPLATE_NAME: NameRule = NameRule {
    longest: 128,
    characters: "lower-case letters, digits and - _ . /",
    allows: |char| is_tag_char(char) || char == '/',
    is_reference: true,
};
/// Tags of templates.
pub const TEMPLATE_TAG: NameRule = NameRule {
    longest: 128,
    characters: "lower-case letters, digits and - _ .",
    allows: is_tag_char,
    is_reference: false,
};
/// Names of secrets.
pub const SECRET_NAME: NameRule = NameRule {
    longest: 128,
    characters: "letters, digits and - _ .",
    allows: |char| char.is_ascii_alphanumeric() || "-_.".contains(char),
    is_reference: true,
};
/// Names of SSH keys.
pub const SSH_KEY_NAME: NameRule =
    NameRule { longest: 128, characters: "no control characters", allows: is_printable, is_reference: true };
/// Keys of labels.
pub const LABEL_KEY: NameRule =
    NameRule { longest: 256, characters: "no control characters", allows: is_printable, is_reference: false };

fn is_printable(char: char) -> bool {
    !char.is_control()
}

fn is_tag_char(char: char) -> bool {
    char.is_ascii_lowercase() || char.is_ascii_digit() || "-_.".contains(char)
}

impl NameRule {
    /// Whether a text can be such a name.
    ///
    /// # Errors
    /// It cannot; the rule and what breaks it.
    pub fn check(&self, text: &str) -> Result<(), BadName> {
        let refuse = |why: String| Err(BadName { longest: self.longest, characters: self.characters, why });
        if text.is_empty() {
            return refuse("it is empty".to_owned());
        }
        if text.len() > self.longest {
            return refuse(format!("{} is longer", quoted(text)));
        }
        if let Some(char) = text.chars().find(|char| !(self.allows)(*char)) {
            return refuse(format!("{} has {char:?}", quoted(text)));
        }
        if self.is_reference && is_id(text) {
            return refuse(format!("{} reads like an id", quoted(text)));
        }
        // Programs take them out of URLs.
        if self.is_reference && text.split('/').any(|part| matches!(part, "." | "..")) {
            return refuse(format!("{} is a step in a path", quoted(text)));
        }
        Ok(())
    }
}

fn is_id(text: &str) -> bool {
    text.parse::<SandboxId>().is_ok()
        || text.parse::<TemplateId>().is_ok()
        || text.parse::<SnapshotId>().is_ok()
        || text.parse::<MachineId>().is_ok()
        || text.parse::<WorkspaceId>().is_ok()
        || text.parse::<ApiKeyId>().is_ok()
        || text.parse::<SshKeyId>().is_ok()
}

/// Why a text is no name; follows the name of the field.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("must have 1 to {longest} bytes, {characters}: {why}")]
pub struct BadName {
    longest: usize,
    characters: &'static str,
    why: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_the_rule_and_what_breaks_it() {
        let why = |rule: NameRule, text: &str| rule.check(text).expect_err(text).to_string();
        let snapshot = "must have 1 to 128 bytes, no control characters: ";
        assert_eq!(why(SNAPSHOT_NAME, ""), format!("{snapshot}it is empty"));
        assert_eq!(why(SNAPSHOT_NAME, "a\u{1b}[2J"), format!(r#"{snapshot}"a\u{{1b}}[2J" has '\u{{1b}}'"#));
        let long = "é".repeat(65);
        assert_eq!(why(SNAPSHOT_NAME, &long), format!("{snapshot}\"{}\"… (130 bytes) is longer", "é".repeat(64)));
        let id = SandboxId::random().to_string();
        assert_eq!(why(SNAPSHOT_NAME, &id), format!("{snapshot}\"{id}\" reads like an id"));
        assert!(why(TEMPLATE_NAME, "Web").ends_with("lower-case letters, digits and - _ . /: \"Web\" has 'W'"));
        for rule in [TEMPLATE_NAME, SECRET_NAME, SNAPSHOT_NAME] {
            assert!(why(rule, "..").ends_with("\"..\" is a step in a path"));
        }
        assert!(why(TEMPLATE_NAME, "../x").ends_with("\"../x\" is a step in a path"));
        assert!(why(TEMPLATE_TAG, "a/b").ends_with("has '/'"));
    }

    #[test]
    fn names_that_are_in_use_stay_names() {
        for name in ["mine", "before the upgrade", "größer", "a/b:c"] {
            assert_eq!(SNAPSHOT_NAME.check(name), Ok(()), "{name}");
        }
        for name in ["web", "team/web-1.2_x"] {
            assert_eq!(TEMPLATE_NAME.check(name), Ok(()), "{name}");
        }
        assert_eq!(SECRET_NAME.check("OpenAI.key-1"), Ok(()));
        assert_eq!(LABEL_KEY.check(SandboxId::random().as_str()), Ok(()));
    }

    #[test]
    fn a_long_text_is_not_repeated_as_a_whole() {
        assert_eq!(quoted("short").to_string(), "\"short\"");
        assert_eq!(quoted(&"x".repeat(64)).to_string(), format!("\"{}\"", "x".repeat(64)));
        assert_eq!(shortened(&"x".repeat(5000)), format!("{}… (5000 bytes)", "x".repeat(64)));
        assert_eq!(shortened("it's\n"), "it's\\n");
        assert_eq!(quoted(&"x".repeat(5000)).to_string(), format!("\"{}\"… (5000 bytes)", "x".repeat(64)));
    }
}
