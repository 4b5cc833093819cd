//! What clap says of arguments it does not understand: what was typed told as in every other error, and the whole as
//! one of our own failures.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use stockade_model::shortened;

use crate::failure::Failure;

const BAD_USAGE: &str = "bad_usage";

/// The same error, with control characters escaped in what was typed, and no more than the beginning of what is long.
pub(super) fn bounded(mut error: clap::Error) -> clap::Error {
    let mut typed = vec![ContextKind::InvalidSubcommand, ContextKind::InvalidValue];
    // In other errors it is the name of an option of ours.
    if error.kind() == ErrorKind::UnknownArgument {
        typed.push(ContextKind::InvalidArg);
    }
    for kind in typed {
        let Some(ContextValue::String(word)) = error.get(kind) else { continue };
        let (word, told) = (word.clone(), shortened(word));
        if told == word {
            continue;
        }
        // The tips repeat it.
        if let Some(ContextValue::StyledStrs(tips)) = error.get(ContextKind::Suggested) {
            let tips = tips.iter().map(|tip| tip.ansi().to_string().replace(&word, &told).into()).collect();
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
        }
        error.insert(kind, ContextValue::String(told));
    }
    error
}

/// Commands that say how long a sandbox lives and run nothing in it.
const OF_LIFETIMES: [&str; 3] = ["create", "set", "resume"];

/// The same error; where `--timeout` was typed for a sandbox's lifetime, as E2B calls it, with a tip that says so. What
/// only looks like it is something else.
pub(super) fn naming_lifetime(mut error: clap::Error, mut command: clap::Command) -> clap::Error {
    let is_timeout =
        matches!(error.get(ContextKind::InvalidArg), Some(ContextValue::String(word)) if word == "--timeout");
    let Some(ContextValue::StyledStr(usage)) = error.get(ContextKind::Usage) else { return error };
    let usage = usage.to_string();
    let name = usage.split_whitespace().skip_while(|word| *word != command.get_name()).nth(1).unwrap_or_default();
    if error.kind() != ErrorKind::UnknownArgument || !is_timeout || !OF_LIFETIMES.contains(&name) {
        return error;
    }
    command.build();
    let Some(command) = command.find_subcommand_mut(name) else { return error };
    error.remove(ContextKind::SuggestedArg);
    error.insert(ContextKind::Usage, ContextValue::StyledStr(command.render_usage()));
    let tip = "how long a sandbox lives is said with '--lifetime <SECONDS>'; a '--timeout' is a command's, with `stockade run` \
               and `stockade exec`";
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    error
}

/// The first paragraph is what is wrong; tips and the usage are the hint.
pub(super) fn failure(error: &clap::Error) -> Failure {
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return Failure::new(BAD_USAGE, "a command is missing").hint("`stockade --help` and `stockade COMMAND --help`");
    }
    let text = error.render().to_string();
    let mut paragraphs = text.split("\n\n").map(|paragraph| paragraph.split_whitespace().collect::<Vec<_>>().join(" "));
    let message = paragraphs.next().unwrap_or_default();
    let message = message.strip_prefix("error: ").unwrap_or(&message);
    let hint: Vec<_> = paragraphs.filter(|paragraph| !paragraph.is_empty()).collect();
    Failure::new(BAD_USAGE, message).hint(hint.join("; "))
}
