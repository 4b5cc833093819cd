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
