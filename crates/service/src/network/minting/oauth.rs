//! Access tokens by OAuth 2.0 client credentials (RFC 6749, section 4.4).

use std::time::Duration;

use oauth2::{
    AsyncHttpClient, AuthType, ClientId, ClientSecret, HttpRequest, HttpResponse, RequestTokenError, Scope,
    TokenResponse, TokenUrl,
    basic::{BasicClient, BasicErrorResponse},
};
use serde::{Deserialize, Serialize};
use stockade_gateway::{Asker, FetchError, Fetcher, broker, check_https_url};
use stockade_model::{Secret, quoted};

use super::{Fresh, UNSAID_LIFETIME};
use crate::ServiceError;

const PATIENCE: Duration = Duration::from_secs(15);
const MOST_SCOPES: usize = 64;
const LONGEST_TEXT: usize = 2_048;

/// A client of a token endpoint, but for its secret.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct OAuthClient {
    /// The token endpoint; https.
    pub token_url: String,
    /// The client's id.
    pub client_id: String,
    /// What is asked for; empty: what the endpoint gives unasked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scopes: Vec<String>,
    /// Sent as `audience`, which some endpoints need.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audience: Option<String>,
    /// How the client says who it is.
    #[serde(default)]
    pub auth: ClientAuth,
}

/// How a client says who it is.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ClientAuth {
    /// In the header `Authorization`.
    #[default]
    Basic,
    /// In the form's fields `client_id` and `client_secret`.
    Form,
}

impl OAuthClient {
    pub(crate) fn check(&self) -> Result<(), ServiceError> {
        let invalid = |problem: String| Err(ServiceError::Invalid { field: "oauth", problem });
        if let Err(problem) = check_https_url(&self.token_url) {
            return invalid(format!("token_url {problem}"));
        }
        if self.client_id.is_empty() {
            return invalid("client_id is empty".to_owned());
        }
        let texts = [&self.token_url, &self.client_id].into_iter().chain(&self.audience).chain(&self.scopes);
        if self.scopes.len() > MOST_SCOPES || texts.clone().any(|text| text.len() > LONGEST_TEXT) {
            return invalid(format!("takes at most {MOST_SCOPES} scopes and {LONGEST_TEXT} bytes for each text"));
        }
        match self.scopes.iter().find(|scope| scope.is_empty() || scope.contains(char::is_whitespace)) {
            Some(scope) => invalid(format!("scopes: {} is none; list each on its own", quoted(scope))),
            None => Ok(()),
        }
    }

    /// An access token.
    pub(crate) async fn make(&self, fetcher: &Fetcher, client_secret: &Secret) -> Result<Fresh, String> {
        let url = TokenUrl::new(self.token_url.clone()).map_err(|_| "its token_url is no URL".to_owned())?;
        let auth = match self.auth {
            ClientAuth::Basic => AuthType::BasicAuth,
            ClientAuth::Form => AuthType::RequestBody,
        };
        let client = BasicClient::new(ClientId::new(self.client_id.clone()))
            .set_client_secret(ClientSecret::new(client_secret.expose().to_owned()))
            .set_auth_type(auth)
            .set_token_uri(url);
        let mut request = client.exchange_client_credentials();
        request = request.add_scopes(self.scopes.iter().cloned().map(Scope::new));
        if let Some(audience) = &self.audience {
            request = request.add_extra_param("audience", audience.clone());
        }
        let token = request.request_async(&Asking(fetcher)).await.map_err(|error| problem(&error))?;
        let value = Secret::new(token.access_token().secret().clone());
        broker::check_value(&value).map_err(|problem| format!("the token endpoint's token is unusable: {problem}"))?;
        let lifetime = token.expires_in().unwrap_or(UNSAID_LIFETIME);
        if lifetime.is_zero() {
            return Err("the token endpoint gave a token that has expired".to_owned());
        }
        Ok(Fresh { value, lifetime })
    }
}

/// What went wrong, without a word of the answer but its error code.
fn problem(error: &RequestTokenError<FetchError, BasicErrorResponse>) -> String {
    match error {
        RequestTokenError::Request(error) => format!("the token endpoint: {error}"),
        RequestTokenError::ServerResponse(answer) => {
            let code = answer.error().as_ref();
            let plain = |byte: u8| byte.is_ascii_lowercase() || byte == b'_';
            let code = if code.len() <= 40 && code.bytes().all(plain) { code } else { "an error" };
            format!("the token endpoint answered with {code}")
        }
        RequestTokenError::Parse(..) | RequestTokenError::Other(_) => {
            "the token endpoint's answer is no token response".to_owned()
        }
    }
}

/// Our way out, as the protocol's crate wants it.
struct Asking<'a>(&'a Fetcher);

impl<'c> AsyncHttpClient<'c> for Asking<'_> {
    type Error = FetchError;
    type Future = futures::future::BoxFuture<'c, Result<HttpResponse, FetchError>>;

    fn call(&'c self, request: HttpRequest) -> Self::Future {
        Box::pin(async move {
            let answer = self.0.fetch(Asker::User, PATIENCE, request).await?;
            Ok(answer.map(|body| body.to_vec()))
        })
    }
}
