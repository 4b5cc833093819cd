//! From the kernel's errors to the protocol's.

use std::{fmt::Display, io};

use stockade_wire::{ErrorBody, ErrorCode};

/// What every operation of the agent returns.
pub(crate) type Result<T> = std::result::Result<T, ErrorBody>;

/// The code that goes with an error of the kernel.
pub(crate) fn code_of(error: &io::Error) -> ErrorCode {
    match error.raw_os_error() {
        Some(libc::ENOENT) => ErrorCode::NotFound,
        Some(libc::EEXIST) => ErrorCode::AlreadyExists,
        Some(libc::EISDIR) => ErrorCode::IsADirectory,
        Some(libc::ENOTDIR) => ErrorCode::NotADirectory,
        Some(libc::ENOTEMPTY) => ErrorCode::NotEmpty,
        Some(libc::EACCES | libc::EPERM | libc::EROFS) => ErrorCode::PermissionDenied,
        Some(libc::ENAMETOOLONG | libc::E2BIG) => ErrorCode::TooLong,
        Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => ErrorCode::NoSpace,
        Some(libc::ENOMEM | libc::EAGAIN) => ErrorCode::OutOfMemory,
        Some(libc::EMFILE | libc::ENFILE) => ErrorCode::LimitReached,
        Some(libc::EINVAL | libc::ELOOP | libc::ENXIO | libc::EXDEV | libc::ETXTBSY) => ErrorCode::InvalidArgument,
        _ => ErrorCode::Internal,
    }
}

/// For `map_err`: names what was tried; the message ends with the kernel's words.
pub(crate) fn failed(action: impl Display) -> impl FnOnce(io::Error) -> ErrorBody {
    move |error| {
        let code = code_of(&error);
        let words = error.to_string();
        let words = words.split(" (os error").next().unwrap_or_default().to_lowercase();
        ErrorBody::new(code, format!("cannot {action}: {words}"))
    }
}

/// A request that makes no sense.
pub(crate) fn invalid(message: impl Into<String>) -> ErrorBody {
    ErrorBody::new(ErrorCode::InvalidArgument, message)
}

/// The last error of a system call made through `libc`, or its value.
pub(crate) fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
