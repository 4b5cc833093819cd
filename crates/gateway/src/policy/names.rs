//! Names and patterns of names. Names on the wire are lower-case A-labels without the trailing dot.

use std::collections::HashSet;

use regex::bytes::Regex;
use stockade_model::quoted;

const MAX_NAME: usize = 253;
const MAX_LABEL: usize = 63;
const MAX_REGEX_BYTES: usize = 1 << 20;

/// Why a text is no name or pattern.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum NameError {
    /// Not a host name.
    #[error("{} is not a host name", quoted(.0))]
    NotAName(String),
    /// Not a pattern.
    #[error("{} is not a name pattern; use a.example, *.a.example, .a.example, * or ~regex", quoted(.0))]
    NotAPattern(String),
    /// Not a regular expression we run.
    #[error("{} is not a regular expression of linear time: {}", quoted(.0), .1)]
    NotARegex(String, String),
}

/// The form names are compared in: lower case, no trailing dot; `None` for what is no host name (addresses as text
/// included, since they are never looked up).
pub fn normalize_name(text: &str) -> Option<String> {
    let text = text.strip_suffix('.').unwrap_or(text);
    if text.is_empty() || text.len() > MAX_NAME || text.parse::<std::net::IpAddr>().is_ok() {
        return None;
    }
    let good_label = |label: &str| {
        (1..=MAX_LABEL).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    let last = text.rsplit('.').next().unwrap_or(text);
    // Clients read `127.1`, `0x7f.1` and `2130706433` as addresses; a last label that is a number is never a name.
    let number = last.bytes().all(|byte| byte.is_ascii_digit()) || last.to_ascii_lowercase().starts_with("0x");
    (text.split('.').all(good_label) && !number).then(|| text.to_ascii_lowercase())
}

/// One pattern.
#[derive(Clone, Debug)]
pub enum NamePattern {
    /// This name.
    Exact(String),
    /// All names below it, and itself if `apex`.
    Below {
        /// Without a leading dot.
        suffix: String,
        /// Whether the suffix itself matches.
        apex: bool,
    },
    /// Any name.
    Any,
    /// Names that match as a whole.
    Regex(Regex),
}

impl NamePattern {
    /// Reads `a.example`, `*.a.example`, `.a.example`, `*` or `~regex`. Unicode names become A-labels here.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        if let Some(pattern) = text.strip_prefix('~') {
            return whole_regex(pattern).map(Self::Regex).map_err(|e| NameError::NotARegex(text.to_owned(), e));
        }
        if text == "*" {
            return Ok(Self::Any);
        }
        let name = |part: &str| {
            let ascii = idna::domain_to_ascii(part).ok()?;
            normalize_name(&ascii)
        };
        let wrong = || NameError::NotAPattern(text.to_owned());
        if let Some(rest) = text.strip_prefix("*.") {
            return Ok(Self::Below { suffix: name(rest).ok_or_else(wrong)?, apex: false });
        }
        if let Some(rest) = text.strip_prefix('.') {
            return Ok(Self::Below { suffix: name(rest).ok_or_else(wrong)?, apex: true });
        }
        Ok(Self::Exact(name(text).ok_or_else(wrong)?))
    }
}

/// Whether one of the patterns matches a name in its [normal form](normalize_name).
///
/// # Errors
/// The first that is no pattern.
pub fn any_matches(patterns: &[String], name: &str) -> Result<bool, NameError> {
    Ok(NameSet::parse(patterns)?.matches(name))
}

/// Whether whatever matches `pattern` matches one of the patterns, as far as can be told without knowing all names.
///
/// # Errors
/// The first of `patterns` that is no pattern.
pub fn any_covers(patterns: &[String], pattern: &NamePattern) -> Result<bool, NameError> {
    Ok(NameSet::parse(patterns)?.covers(pattern))
}

/// A regular expression that has to match a text as a whole and cannot grow large.
pub(super) fn whole_regex(pattern: &str) -> Result<Regex, String> {
    regex::bytes::RegexBuilder::new(&format!("^(?:{pattern})$"))
        .unicode(false)
        .size_limit(MAX_REGEX_BYTES)
        .build()
        .map_err(|error| error.to_string().lines().last().unwrap_or("not valid").to_owned())
}

/// A set of patterns, asked in time that depends on the name's labels and the number of regular expressions.
#[derive(Clone, Debug, Default)]
pub(crate) struct NameSet {
    exact: HashSet<String>,
    below: HashSet<String>,
    below_and_apex: HashSet<String>,
    any: bool,
    regexes: Vec<Regex>,
}

impl NameSet {
    pub(crate) fn parse(patterns: &[String]) -> Result<Self, NameError> {
        let mut set = Self::default();
        for text in patterns {
            match NamePattern::parse(text)? {
                NamePattern::Exact(name) => drop(set.exact.insert(name)),
                NamePattern::Below { suffix, apex: false } => drop(set.below.insert(suffix)),
                NamePattern::Below { suffix, apex: true } => drop(set.below_and_apex.insert(suffix)),
                NamePattern::Any => set.any = true,
                NamePattern::Regex(regex) => set.regexes.push(regex),
            }
        }
        Ok(set)
    }

    pub(crate) fn matches(&self, name: &str) -> bool {
        if self.any || self.exact.contains(name) || self.below_and_apex.contains(name) {
            return true;
        }
        let mut rest = name;
        while let Some((_, parent)) = rest.split_once('.') {
            if self.below.contains(parent) || self.below_and_apex.contains(parent) {
                return true;
            }
            rest = parent;
        }
        self.regexes.iter().any(|regex| regex.is_match(name.as_bytes()))
    }

    /// As [`any_covers`].
    pub(crate) fn covers(&self, pattern: &NamePattern) -> bool {
        match pattern {
            NamePattern::Exact(name) => self.matches(name),
            // A name of no kind: what matches it by its suffix matches all that have it.
            NamePattern::Below { suffix, apex } => {
                self.matches(&format!("any-name.{suffix}")) && (!apex || self.matches(suffix))
            }
            NamePattern::Any | NamePattern::Regex(_) => false,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        !self.any
            && self.exact.is_empty()
            && self.below.is_empty()
            && self.below_and_apex.is_empty()
            && self.regexes.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wildcard_matches_below_and_only_the_dotted_form_matches_the_apex() {
        let set = |pattern: &str| NameSet::parse(&[pattern.to_owned()]).expect("a pattern");
        assert!(set("*.a.example").matches("b.a.example"));
        assert!(set("*.a.example").matches("c.b.a.example"));
        assert!(!set("*.a.example").matches("a.example"));
        assert!(!set("*.a.example").matches("ba.example"));
        assert!(set(".a.example").matches("a.example"));
        assert!(set("A.Example.").matches("a.example"));
        assert!(set("~a[0-9]+\\.example").matches("a12.example"));
        assert!(!set("~a[0-9]+\\.example").matches("a12.example.evil"));
        assert!(set("bücher.example").matches("xn--bcher-kva.example"));
    }

    #[test]
    fn what_is_no_name_is_refused() {
        for bad in ["", ".", "a..b", "-a.example", "a b", "127.0.0.1", "127.1", "0x7f.0x1", "::1", "a/b", "é.example"]
        {
            assert_eq!(normalize_name(bad), None, "{bad}");
        }
        for bad in ["", "*", "**.a", "*a.example", "a.*.example", "http://a.example", "a.example:80", "10.0.0.1"] {
            assert!(bad == "*" || NamePattern::parse(bad).is_err(), "{bad}");
        }
        assert!(NamePattern::parse("~(").is_err());
    }
}
