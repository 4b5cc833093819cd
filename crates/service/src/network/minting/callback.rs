//! An HTTPS endpoint of the operator's that makes a value.
//!
//! ```text
//! POST <url>  Authorization: Bearer <what bearer_file holds>
//! {"secret": "github", "host": "api.github.com", "workspace": "…", "sandbox": "…", "metadata": {…}}
//! 200 {"value": "…", "expires_at": "2027-01-01T00:00:00Z"} or {"value": "…", "expires_in": 300}
//! ```

use std::{path::PathBuf, time::Duration};

use http::{HeaderValue, Request, StatusCode, header};
use serde::Deserialize;
use stockade_gateway::{Asker, Fetcher, check_https_url};
use zeroize::Zeroizing;

use super::{Asked, Fresh, read_answer};

/// Where to ask.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Callback {
    url: String,
    /// Holds the token we identify ourselves with; read for every question, so that it can be changed.
    #[serde(default)]
    bearer_file: Option<PathBuf>,
}

impl Callback {
    /// Whether it can be asked at all.
    pub(crate) fn check(&self) -> Result<(), String> {
        check_https_url(&self.url).map_err(|problem| format!("url: {problem}"))?;
        self.bearer().map(drop)
    }

    pub(crate) async fn make(&self, fetcher: &Fetcher, asked: &Asked, patience: Duration) -> Result<Fresh, String> {
        let body = serde_json::to_vec(asked).map_err(|error| error.to_string())?;
        let mut request = Request::post(&self.url).header(header::CONTENT_TYPE, "application/json");
        if let Some(bearer) = self.bearer()? {
            request = request.header(header::AUTHORIZATION, bearer);
        }
        let request = request.body(body).map_err(|error| error.to_string())?;
        let answer = fetcher.fetch(Asker::Operator, patience, request).await;
        let answer = answer.map_err(|error| format!("the operator's callback: {error}"))?;
        if answer.status() != StatusCode::OK {
            return Err(format!("the operator's callback answered with {}", answer.status().as_u16()));
        }
        read_answer(answer.body()).map_err(|problem| format!("the operator's callback: {problem}"))
    }

    fn bearer(&self) -> Result<Option<HeaderValue>, String> {
        let Some(path) = &self.bearer_file else { return Ok(None) };
        let text = std::fs::read_to_string(path).map(Zeroizing::new);
        let text = text.map_err(|error| format!("bearer_file {}: {error}", path.display()))?;
        let value = HeaderValue::from_str(&Zeroizing::new(format!("Bearer {}", text.trim())));
        let mut value = value.map_err(|_| format!("bearer_file {} holds no token", path.display()))?;
        value.set_sensitive(true);
        Ok(Some(value))
    }
}
