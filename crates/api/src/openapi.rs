//! The OpenAPI document, from the routes themselves. `crates/api/openapi.json` is its committed form.

use utoipa::openapi::{
    ContentBuilder, Info, OpenApi, OpenApiBuilder, Ref, RefOr, ResponseBuilder, SecurityRequirement,
    security::{ApiKey, ApiKeyValue, Http, HttpAuthScheme, SecurityScheme},
};

use crate::native;

/// The document of the native API.
pub fn document() -> OpenApi {
    let (_, document) = native::routes().split_for_parts();
    let mut info = Info::new("Stockade", env!("CARGO_PKG_VERSION"));
    info.description = Some(
        "Sandboxes for AI agents. Every error has the shape of `ErrorEnvelope`. Unknown fields are refused. \
         Times are RFC 3339 in UTC, durations are seconds."
            .to_owned(),
    );
    let security = [SecurityRequirement::new("bearer", [""; 0]), SecurityRequirement::new("api_key", [""; 0])];
    let mut components = document.components.unwrap_or_default();
    components.add_security_scheme("bearer", SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer)));
    components.add_security_scheme("api_key", SecurityScheme::ApiKey(ApiKey::Header(ApiKeyValue::new("X-API-Key"))));
    add_schemas(&mut components);
    let mut document = OpenApiBuilder::new()
        .info(info)
        .paths(document.paths)
        .components(Some(components))
        .security(Some(security))
        .build();
    add_error_responses(&mut document);
    document
}

fn add_schemas(components: &mut utoipa::openapi::Components) {
    use utoipa::PartialSchema as _;
    let schema = crate::error::ErrorEnvelope::<'static>::schema();
    components.schemas.insert("ErrorEnvelope".to_owned(), schema);
}

/// Every operation can fail, and all fail in one shape.
fn add_error_responses(document: &mut OpenApi) {
    for item in document.paths.paths.values_mut() {
        let operations = [&mut item.get, &mut item.put, &mut item.post, &mut item.delete, &mut item.patch];
        for operation in operations.into_iter().flatten() {
            let content =
                ContentBuilder::new().schema(Some(RefOr::Ref(Ref::from_schema_name("ErrorEnvelope")))).build();
            let error = ResponseBuilder::new()
                .description("What went wrong: `code` is stable, `hint` says what to do.")
                .content("application/json", content)
                .build();
            operation.responses.responses.insert("default".to_owned(), RefOr::T(error));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REGENERATE: &str = "STOCKADE_WRITE_OPENAPI=1 cargo test -p stockade-api the_committed_document";

    #[test]
    fn the_committed_document_is_that_of_the_routes() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/openapi.json");
        let mut now = document().to_pretty_json().expect("a document");
        now.push('\n');
        if std::env::var_os("STOCKADE_WRITE_OPENAPI").is_some() {
            std::fs::write(path, &now).expect("write openapi.json");
        }
        let committed = std::fs::read_to_string(path).unwrap_or_default();
        assert!(committed == now, "openapi.json is not that of the routes; regenerate it: {REGENERATE}");
    }
}
