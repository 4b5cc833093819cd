//! API keys that come along with a request for a port of a sandbox.

use http::{HeaderMap, HeaderName, HeaderValue, header};
use stockade_service::Principal;

use crate::{ApiError, AppState, auth::bearer_token};

/// Takes the deployment's API keys out of a request, so that no guest sees one, and says whose they are. What is no key
/// of ours stays: it is for the server in the guest.
pub(crate) async fn withhold(app: &AppState, headers: &mut HeaderMap) -> Result<Vec<Principal>, ApiError> {
    let mut owners = Vec::new();
    for name in [header::AUTHORIZATION, HeaderName::from_static("x-api-key")] {
        let values: Vec<HeaderValue> = headers.get_all(&name).iter().cloned().collect();
        headers.remove(&name);
        for value in values {
            let text = value.to_str().ok().map(str::trim);
            let key = if name == header::AUTHORIZATION { text.and_then(bearer_token) } else { text };
            let owner = match key {
                Some(key) => app.service.authenticate(key).await?,
                None => None,
            };
            match owner {
                Some(owner) => owners.push(owner),
                None => drop(headers.append(&name, value)),
            }
        }
    }
    Ok(owners)
}
