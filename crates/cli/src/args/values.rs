//! What stands behind an option, from text.

use std::str::FromStr;

use stockade_model::{NameRule, SECRET_NAME, SNAPSHOT_NAME, SSH_KEY_NAME};

use super::lifecycle::Idle;

pub(super) fn snapshot_name(text: &str) -> Result<String, String> {
    name(SNAPSHOT_NAME, text)
}

pub(super) fn secret_name(text: &str) -> Result<String, String> {
    name(SECRET_NAME, text)
}

pub(super) fn ssh_key_name(text: &str) -> Result<String, String> {
    name(SSH_KEY_NAME, text)
}

/// A new name, by the server's own rule: some of what it refuses would not even reach it in a URL.
fn name(rule: NameRule, text: &str) -> Result<String, String> {
    rule.check(text).map(|()| text.to_owned()).map_err(|bad| bad.to_string())
}

pub(super) fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("expected KEY=VALUE".to_owned()),
    }
}

pub(super) fn seconds_or_never(text: &str) -> Result<Idle, String> {
    if text == "never" {
        return Ok(Idle(None));
    }
    seconds(text).map(|seconds| Idle(Some(seconds))).map_err(|error| format!("{error}, or `never`"))
}

/// Dollars as whole nano-dollars.
pub(super) fn dollars(text: &str) -> Result<u64, String> {
    let problem = || "expected dollars like 0.000015, with at most nine decimals".to_owned();
    let (whole, decimals) = text.split_once('.').unwrap_or((text, "0"));
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number(whole) || !is_number(decimals) || decimals.len() > 9 {
        return Err(problem());
    }
    let whole: u64 = whole.parse().map_err(|_| problem())?;
    let decimals: u64 = format!("{decimals:0<9}").parse().map_err(|_| problem())?;
    whole.checked_mul(1_000_000_000).and_then(|nano| nano.checked_add(decimals)).ok_or_else(problem)
}

pub(super) fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds.is_finite() && seconds > 0.0 => Ok(seconds),
        _ => Err("expected a number of seconds over zero".to_owned()),
    }
}

/// How many of something there are to be.
pub(super) fn count<N: FromStr + Default + PartialOrd>(text: &str) -> Result<N, String> {
    match text.parse() {
        Ok(count) if count > N::default() => Ok(count),
        _ => Err("expected a whole number over zero".to_owned()),
    }
}

/// Which process of a sandbox.
pub(super) fn process(text: &str) -> Result<String, String> {
    let is_pid = text.parse::<u32>().is_ok_and(|pid| pid > 0);
    if is_pid || text.strip_prefix("tag:").is_some_and(|tag| !tag.is_empty()) {
        return Ok(text.to_owned());
    }
    Err("expected a pid or tag:NAME; `stockade ps SANDBOX` lists both".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dollars_are_exact_to_the_nano_dollar() {
        assert_eq!(dollars("0.0000045"), Ok(4_500));
        assert_eq!((dollars("0"), dollars("12"), dollars("1.5")), (Ok(0), Ok(12_000_000_000), Ok(1_500_000_000)));
        for bad in ["", ".5", "1.", "-1", "1e-6", "0.0000000001", "99999999999999"] {
            assert!(dollars(bad).is_err(), "{bad:?}");
        }
    }
}
