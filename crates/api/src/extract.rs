//! Request parts, parsed into types, with refusals in our error shape. A refusal names the field, or
//! line and column, and never repeats what was sent: bodies hold environment values and files.

use std::time::Duration;

use axum::{
    extract::{FromRequest, FromRequestParts, Request},
    http::{HeaderMap, StatusCode, header, request::Parts},
};
use futures::StreamExt as _;
use serde::de::DeserializeOwned;

use crate::ApiError;

/// Largest JSON body, in bytes.
pub(crate) const MAX_JSON_BYTES: usize = 1 << 20;
/// A JSON body must have come within this time.
const JSON_TIMEOUT: Duration = Duration::from_secs(30);

/// A JSON body of known fields.
#[derive(Debug)]
pub(crate) struct Json<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Sync> FromRequest<S> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        check_content_type(request.headers())?;
        let is_for_data = takes_data(request.uri().path());
        let announced =
            request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        if announced.is_some_and(|bytes: u64| bytes > MAX_JSON_BYTES as u64) {
            return Err(too_large(is_for_data));
        }
        let body = tokio::time::timeout(JSON_TIMEOUT, collect(request, is_for_data)).await.map_err(|_| {
            let message = format!("the body did not come within {JSON_TIMEOUT:?}");
            ApiError::new(StatusCode::REQUEST_TIMEOUT, "request_timeout", message)
        })??;
        parse_json(&body).map(Self)
    }
}

async fn collect(request: Request, is_for_data: bool) -> Result<Vec<u8>, ApiError> {
    let mut stream = request.into_body().into_data_stream();
    let mut body = Vec::new();
    while let Some(piece) = stream.next().await {
        let piece = piece.map_err(|error| ApiError::invalid("the body was cut off").caused_by(error))?;
        if body.len() + piece.len() > MAX_JSON_BYTES {
            return Err(too_large(is_for_data));
        }
        body.extend_from_slice(&piece);
    }
    Ok(body)
}

fn too_large(is_for_data: bool) -> ApiError {
    let message = format!("the body is over {MAX_JSON_BYTES} bytes");
    let hint = match is_for_data {
        true => "send large data as a file (PUT /v1/sandboxes/{id}/files) or through stdin",
        false => "no request of this kind needs so much: GET /v1/openapi.json says what it takes",
    };
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message).hint(hint)
}

/// Whether a route starts something that reads files and input.
fn takes_data(path: &str) -> bool {
    path.starts_with("/v1/sandboxes/") && ["/exec", "/run", "/code"].iter().any(|end| path.ends_with(end))
}

fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(value) = headers.get(header::CONTENT_TYPE) else {
        return Ok(());
    };
    let essence = value.to_str().unwrap_or_default().split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let message = "the body's Content-Type is not application/json";
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message)
        .hint("send Content-Type: application/json"))
}

/// Parses JSON of unknown origin, a request's body or an operator's file; the error names the field and what JSON is
/// expected there, and repeats no value.
///
/// # Errors
/// It is no JSON, or not of this type.
pub fn parse_json<T: DeserializeOwned>(text: &[u8]) -> Result<T, ApiError> {
    // serde would take an array for an object, its elements for the fields in their order.
    if text.trim_ascii_start().first() == Some(&b'[') {
        return Err(ApiError::invalid("expected a JSON object"));
    }
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        json_error(&path, error.inner(), is_json(text))
    })?;
    deserializer.end().map_err(|error| json_error(".", &error, false))?;
    Ok(value)
}

/// serde says of a value where it wants a variant's name that the text were no JSON.
fn is_json(text: &[u8]) -> bool {
    serde_json::from_slice::<serde::de::IgnoredAny>(text).is_ok()
}

fn json_error(path: &str, error: &serde_json::Error, is_json: bool) -> ApiError {
    let place = format!("at line {} column {}", error.line(), error.column());
    let field = shown_field(path);
    if error.classify() != serde_json::error::Category::Data && !is_json {
        let code = "malformed_json";
        return ApiError::new(StatusCode::BAD_REQUEST, code, format!("{field}the body is not valid JSON {place}"));
    }
    ApiError::invalid(format!("{field}{} {place}", harmless(&error.to_string())))
}

/// The field an error is about, if it may be repeated, before the error's words.
fn shown_field(path: &str) -> String {
    if is_plain_path(path) { format!("{path}: ") } else { String::new() }
}

/// A path of our own field names, indices and short plain keys.
fn is_plain_path(path: &str) -> bool {
    path != "." && path != "?" && path.len() <= 100 && path.chars().all(is_name_char)
}

fn is_name_char(char: char) -> bool {
    char.is_ascii_alphanumeric() || "_-.[]".contains(char)
}

/// serde's words without the values it quotes: what it expected is ours, what it found is the client's.
fn harmless(message: &str) -> String {
    let name = |prefix: &str| {
        let (name, _) = message.strip_prefix(prefix)?.split_once('`')?;
        (name.len() <= 64 && name.chars().all(is_name_char)).then_some(name)
    };
    let without_place = |text: &str| text.rsplit_once(" at line ").map_or(text, |(text, _)| text).to_owned();
    let expected = message.rsplit_once(", expected ").map(|(_, rest)| {
        let rest = without_place(rest);
        format!("expected {}", json_type(&rest).unwrap_or(&rest))
    });
    let starts = |prefix: &str| message.starts_with(prefix);
    if let Some(name) = name("missing field `") {
        format!("field `{name}` is missing")
    } else if starts("unknown field") {
        let name = name("unknown field `").map_or(String::new(), |name| format!(" `{name}`"));
        format!("unknown field{name}, {}", expected.unwrap_or_else(|| "no field is expected here".into()))
    } else if let Some(name) = name("duplicate field `") {
        format!("field `{name}` is there twice")
    } else if starts("invalid type") || starts("invalid value") || starts("invalid length") || starts("unknown variant")
    {
        expected.unwrap_or_else(|| "unacceptable value".into())
    } else if starts("number out of range") {
        "the number is out of range".into()
    } else if starts("recursion limit") {
        "nested too deeply".into()
    } else if starts("expected value") {
        "expected an object with one field, which says the kind".into()
    } else if starts("expected ") && !starts("expected `") {
        // A type of ours says itself what it takes.
        without_place(message)
    } else {
        "unacceptable value".into()
    }
}

/// What JSON calls what serde expects by the name of a Rust type.
fn json_type(expected: &str) -> Option<&'static str> {
    let starts = |prefix: &str| expected.starts_with(prefix);
    Some(match expected {
        "u8" => "a whole number from 0 to 255",
        "u16" => "a whole number from 0 to 65535",
        "u32" | "u64" | "usize" => "a whole number that is not negative",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
        "f32" | "f64" => "a number",
        "a boolean" => "true or false",
        "a sequence" => "an array",
        "unit" => "null",
        "a map" | "map" => "an object",
        "string or map" => "a string or an object",
        _ if starts("struct ") || starts("internally tagged enum ") || starts("adjacently tagged enum ") => "an object",
        _ if starts("tuple ") || starts("an array of ") => "an array",
        _ if starts("enum ") || starts("variant ") || starts("variant of ") => "a string or an object with one field",
        _ => return None,
    })
}

/// Query parameters of known names. Repeated ones are for [`QueryPairs`].
#[derive(Debug)]
pub(crate) struct Query<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let pairs = pairs(parts)?;
        for (index, (name, _)) in pairs.iter().enumerate() {
            if pairs[..index].iter().any(|(other, _)| other == name) {
                return Err(ApiError::invalid("a query parameter is there twice"));
            }
        }
        // Through serde once more for types, defaults and unknown names.
        let deserializer =
            serde::de::value::MapDeserializer::new(pairs.into_iter().map(|(name, text)| (name, Text(text))));
        serde_path_to_error::deserialize(deserializer).map(Self).map_err(
            |error: serde_path_to_error::Error<serde::de::value::Error>| {
                let field = shown_field(&error.path().to_string());
                ApiError::invalid(format!("query: {field}{}", harmless(&error.inner().to_string())))
            },
        )
    }
}

/// Query parameters as they came, decoded.
#[derive(Debug)]
pub(crate) struct QueryPairs(pub(crate) Vec<(String, String)>);

impl<S: Send + Sync> FromRequestParts<S> for QueryPairs {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        pairs(parts).map(Self)
    }
}

fn pairs(parts: &Parts) -> Result<Vec<(String, String)>, ApiError> {
    let decode = |text: &str| {
        let spaced = text.replace('+', " ");
        let decoded = percent_encoding::percent_decode_str(&spaced).decode_utf8().map(|text| text.into_owned());
        decoded
            .map_err(|_| ApiError::invalid("the query is not valid UTF-8").hint("paths must be UTF-8, percent-encoded"))
    };
    let query = parts.uri.query().unwrap_or_default();
    let pairs = query.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        Ok((decode(name)?, decode(value)?))
    });
    pairs.collect()
}

/// A query value: text that becomes whatever the field's type asks for.
struct Text(String);

macro_rules! parse_text {
    ($($method:ident $visit:ident $type:ty, $expected:literal;)*) => {$(
        fn $method<V: serde::de::Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
            let value: $type = self.0.parse().map_err(|_| {
                serde::de::Error::custom(concat!("invalid value: a text, expected ", $expected))
            })?;
            visitor.$visit(value)
        }
    )*};
}

impl<'de> serde::Deserializer<'de> for Text {
    type Error = serde::de::value::Error;

    fn deserialize_any<V: serde::de::Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        visitor.visit_string(self.0)
    }

    fn deserialize_option<V: serde::de::Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        visitor.visit_some(self)
    }

    parse_text! {
        deserialize_bool visit_bool bool, "`true` or `false`";
        deserialize_u16 visit_u16 u16, "a number from 0 to 65535";
        deserialize_u32 visit_u32 u32, "a number that is not negative";
        deserialize_u64 visit_u64 u64, "a number that is not negative";
        deserialize_i64 visit_i64 i64, "a whole number";
    }

    fn deserialize_enum<V: serde::de::Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        visitor.visit_enum(serde::de::IntoDeserializer::<Self::Error>::into_deserializer(self.0))
    }

    fn deserialize_newtype_struct<V: serde::de::Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        visitor.visit_newtype_struct(self)
    }

    serde::forward_to_deserialize_any! {
        i8 i16 i32 i128 u8 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map struct identifier ignored_any
    }
}

impl<'de> serde::de::IntoDeserializer<'de> for Text {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

/// Parts of the path, decoded.
#[derive(Debug)]
pub(crate) struct Path<T>(pub(crate) T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Path<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let path = axum::extract::Path::from_request_parts(parts, state).await;
        path.map(|axum::extract::Path(value)| Self(value))
            .map_err(|error| ApiError::invalid("the path is not valid").caused_by(error))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only parsed")]
    struct Body {
        count: u32,
        #[serde(default)]
        env: BTreeMap<String, String>,
        #[serde(default)]
        kind: Option<Kind>,
        #[serde(default)]
        steps: Vec<Step>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "snake_case")]
    #[expect(dead_code, reason = "only parsed")]
    enum Step {
        Run { command: String },
    }

    #[derive(Debug, Deserialize, PartialEq)]
    #[serde(rename_all = "snake_case")]
    enum Kind {
        Small,
    }

    #[test]
    fn errors_name_the_field_or_the_place_and_never_the_content() {
        let cases = [
            (r#"{"count": "canary"}"#, "count: expected a whole number that is not negative"),
            (r#"{"count": 1, "env": "canary"}"#, "env: expected an object"),
            (r#"{"count": 1, "kind": 7}"#, "kind: expected"),
            (r#"{"count": 1, "steps": {"canary": 1}}"#, "steps: expected an array"),
            (r#"{"count": 1, "steps": ["canary"]}"#, "steps[0]: expected"),
            (r#"{"count": 1, "steps": [7]}"#, "steps[0]: expected an object with one field"),
            (r#"{"count": 1, "steps": [{"run": "canary"}]}"#, "steps[0].run: expected an object"),
            (r#"{"count": 1, "steps": [{"run": {"command": ["canary"]}}]}"#, "steps[0].run.command: expected a string"),
            (r#"{"count": 1, "steps": [{"run": {}}]}"#, "steps[0].run: field `command` is missing"),
            (r#"{"count": 1, "steps": [{"walk": {}}]}"#, "expected `run`"),
            (r#"{"count": 1, "env": {"A": {"canary": 1}}}"#, "env.A: expected a string"),
            (r#"{"count": 1, "kind": "canary, expected x"}"#, "kind: expected `small`"),
            (
                r#"{"count": 1, "extra": "canary"}"#,
                "unknown field `extra`, expected one of `count`, `env`, `kind`, `steps`",
            ),
            (r#"{"count": 1, "canary is a secret": 1}"#, "unknown field, expected one of"),
            (r#"{"env": {"A": "canary"}}"#, "field `count` is missing"),
            (r#"{"count": canary}"#, "count: the body is not valid JSON at line 1 column 11"),
            ("{\"count\": 1,\n \"canary", "the body is not valid JSON at line 2"),
            (r#"{"count": 1} canary"#, "the body is not valid JSON at line 1 column 14"),
            (r#""canary""#, "expected an object"),
            (r#"[1, {"canary": ""}]"#, "expected a JSON object"),
            (r#"{"count": 1, "count": 2}"#, "field `count` is there twice"),
            ("", "the body is not valid JSON"),
        ];
        for (text, expected) in cases {
            let error = parse_json::<Body>(text.as_bytes()).expect_err(text);
            assert_eq!(error.status, 400);
            assert!(error.message.contains(expected), "{text}: {}", error.message);
            assert!(!error.message.contains("canary"), "{text}: {}", error.message);
            for word in ["struct", "enum", "variant", "Body", "Step", "u32"] {
                assert!(!error.message.contains(word), "{text}: {}", error.message);
            }
            assert_eq!(error.code == "malformed_json", !is_json(text.as_bytes()), "{text}: {}", error.message);
        }
    }

    #[derive(Debug, Deserialize, PartialEq)]
    #[serde(deny_unknown_fields)]
    struct Params {
        path: String,
        #[serde(default)]
        recursive: bool,
        depth: Option<u32>,
        since: Option<i64>,
        kind: Option<Kind>,
    }

    async fn query(uri: &str) -> Result<Params, String> {
        let (mut parts, ()) = axum::http::Request::get(uri).body(()).expect("a request").into_parts();
        Query::from_request_parts(&mut parts, &()).await.map(|Query(params)| params).map_err(|error| error.message)
    }

    #[tokio::test]
    async fn query_parameters_become_their_types() {
        let path = "/a b+c/é".into();
        let expected = Params { path, recursive: true, depth: Some(3), since: Some(-1), kind: Some(Kind::Small) };
        let sent = "/?path=%2Fa+b%2Bc%2F%C3%A9&recursive=true&depth=3&since=-1&kind=small";
        assert_eq!(query(sent).await, Ok(expected));
        let bad = [
            ("/", "field `path` is missing"),
            ("/?path=x&path=y", "there twice"),
            ("/?path=%ff", "not valid UTF-8"),
            ("/?path=x&recursive=canary", "recursive: expected `true` or `false`"),
            ("/?path=x&depth=-1", "depth: expected a number"),
            ("/?path=x&since=canary", "since: expected a whole number"),
            ("/?path=x&kind=canary", "kind: expected `small`"),
            ("/?path=x&other=canary", "unknown field `other`"),
        ];
        for (uri, message) in bad {
            let error = query(uri).await.expect_err(uri);
            assert!(error.contains(message) && !error.contains("canary"), "{uri}: {error}");
        }
    }
}
