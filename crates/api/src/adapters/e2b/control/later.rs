//! Areas of E2B's API that this release does not have yet, each refused by name.

use super::super::error::HttpError;

/// Areas of E2B's API without any route here.
pub(super) fn area(path: &str) -> Option<HttpError> {
    let mut parts = path.split('/').filter(|part| !part.is_empty() && !matches!(*part, "v1" | "v2" | "v3"));
    let what = match parts.next()? {
        "volumes" | "volumecontent" => "volumes",
        "templates" => {
            "publishing templates and changing them in other ways than by a build (each template is its workspace's)"
        }
        "teams" | "api-keys" | "access-tokens" => "managing teams and keys through E2B's API",
        _ => return None,
    };
    Some(HttpError::not_supported(format!("{what}: not supported by this release of Stockade")))
}
