//! What clap says of arguments it does not understand, as one of our own failures.

use clap::error::ErrorKind;

use crate::failure::Failure;

const BAD_USAGE: &str = "bad_usage";

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
