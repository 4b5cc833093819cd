//! Refusals of the guest agent in E2B's words. The texts for an unknown user and a bad directory are
//! compared by clients, so they are made from what the client sent.

use http::StatusCode;
use stockade_engine::EngineError;
use stockade_wire::{ErrorBody, ErrorCode};

use super::super::{
    connect::{Code, ConnectError},
    error::HttpError,
};
use crate::error::chain;

/// What the request said, for texts that repeat it.
#[derive(Clone, Copy, Default)]
pub(super) struct Asked<'a> {
    pub(super) user: Option<&'a str>,
    pub(super) cwd: Option<&'a str>,
    pub(super) path: Option<&'a str>,
}

impl Asked<'_> {
    /// For an RPC.
    pub(super) fn connect_error(self, error: EngineError) -> ConnectError {
        match error {
            EngineError::Guest(body) => ConnectError::new(connect_code(body.code), self.message(body)),
            EngineError::LinkBroken { .. } | EngineError::Gone { .. } | EngineError::GuestSilent { .. } => {
                ConnectError::new(Code::Unavailable, chain(&error))
            }
            EngineError::NoCapacity { .. } => ConnectError::new(Code::ResourceExhausted, error.to_string()),
            other => {
                tracing::error!(error = chain(&other), "a call into a guest failed");
                ConnectError::new(Code::Internal, other.to_string())
            }
        }
    }

    /// For a route of `/files`.
    pub(super) fn http_error(self, error: EngineError) -> HttpError {
        match error {
            EngineError::Guest(body) => HttpError::new(http_status(body.code), self.message(body)),
            EngineError::LinkBroken { .. } | EngineError::Gone { .. } | EngineError::GuestSilent { .. } => {
                HttpError::new(StatusCode::BAD_GATEWAY, chain(&error))
            }
            other => {
                tracing::error!(error = chain(&other), "a call into a guest failed");
                HttpError::new(StatusCode::INTERNAL_SERVER_ERROR, other.to_string())
            }
        }
    }

    fn message(self, body: ErrorBody) -> String {
        match (body.code, self) {
            (ErrorCode::UnknownUser, Self { user: Some(user), .. }) => format!("invalid username: '{user}'"),
            (ErrorCode::BadCwd, Self { cwd: Some(cwd), .. }) if body.message.ends_with("is not a directory") => {
                format!("cwd '{cwd}' is not a directory")
            }
            (ErrorCode::BadCwd, Self { cwd: Some(cwd), .. }) if body.message.ends_with("does not exist") => {
                format!("cwd '{cwd}' does not exist")
            }
            (ErrorCode::NotFound, Self { path: Some(path), .. }) => format!("path '{path}' does not exist"),
            (ErrorCode::IsADirectory, Self { path: Some(path), .. }) => format!("path '{path}' is a directory"),
            (ErrorCode::NotADirectory, Self { path: Some(path), .. }) => format!("path '{path}' is not a directory"),
            (ErrorCode::NoSpace, _) => "not enough disk space available".to_owned(),
            _ => body.message,
        }
    }
}

fn connect_code(code: ErrorCode) -> Code {
    match code {
        ErrorCode::InvalidArgument
        | ErrorCode::IsADirectory
        | ErrorCode::NotADirectory
        | ErrorCode::TooLong
        | ErrorCode::TooLarge
        | ErrorCode::BadCwd
        | ErrorCode::CannotExecute
        | ErrorCode::UnknownSignal => Code::InvalidArgument,
        ErrorCode::NotFound | ErrorCode::NoSuchProcess => Code::NotFound,
        ErrorCode::AlreadyExists => Code::AlreadyExists,
        ErrorCode::NotEmpty | ErrorCode::StdinClosed | ErrorCode::NotATerminal => Code::FailedPrecondition,
        ErrorCode::PermissionDenied => Code::PermissionDenied,
        ErrorCode::NoSpace | ErrorCode::OutOfMemory | ErrorCode::LimitReached => Code::ResourceExhausted,
        ErrorCode::UnknownUser => Code::Unauthenticated,
        ErrorCode::PortClosed => Code::Unavailable,
        ErrorCode::Internal => Code::Internal,
    }
}

fn http_status(code: ErrorCode) -> StatusCode {
    match code {
        ErrorCode::UnknownUser => StatusCode::UNAUTHORIZED,
        ErrorCode::NotEmpty | ErrorCode::AlreadyExists => StatusCode::BAD_REQUEST,
        other => StatusCode::from_u16(other.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_user_and_bad_directory_have_the_words_clients_compare() {
        let asked = Asked { user: Some("nobody2"), cwd: Some("/none"), path: None };
        let user = asked.connect_error(ErrorBody::new(ErrorCode::UnknownUser, "no such user").into());
        assert_eq!(user, ConnectError::new(Code::Unauthenticated, "invalid username: 'nobody2'"));
        let cwd = asked.connect_error(ErrorBody::new(ErrorCode::BadCwd, "cwd '/x/none' does not exist").into());
        assert_eq!(cwd, ConnectError::new(Code::InvalidArgument, "cwd '/none' does not exist"));
        let file = ErrorBody::new(ErrorCode::BadCwd, "cwd '/x/none' is not a directory");
        let file = asked.connect_error(file.into());
        assert_eq!(file, ConnectError::new(Code::InvalidArgument, "cwd '/none' is not a directory"));
        let closed = ErrorBody::new(ErrorCode::BadCwd, "cannot enter cwd '/root': permission denied");
        let closed = asked.connect_error(closed.into());
        assert_eq!(closed, ConnectError::new(Code::InvalidArgument, "cannot enter cwd '/root': permission denied"));
    }

    #[test]
    fn files_errors_have_the_status_the_sdk_maps() {
        let asked = Asked { path: Some("/d"), ..Asked::default() };
        let of = |code| {
            let error = asked.http_error(ErrorBody::new(code, "said by the guest").into());
            (error.status.as_u16(), error.message)
        };
        assert_eq!(of(ErrorCode::NotFound), (404, "path '/d' does not exist".to_owned()));
        assert_eq!(of(ErrorCode::IsADirectory), (400, "path '/d' is a directory".to_owned()));
        assert_eq!(of(ErrorCode::NoSpace), (507, "not enough disk space available".to_owned()));
        assert_eq!(of(ErrorCode::UnknownUser).0, 401);
    }
}
