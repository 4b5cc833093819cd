//! Files of a sandbox, streamed both ways.

use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use reqwest::{Body, Method};
use serde_json::json;

use super::{Client, types::Entry};
use crate::failure::Failure;

/// How to write a file.
#[derive(Clone, Debug, Default)]
pub(crate) struct WriteOptions {
    /// With whose rights.
    pub(crate) user: Option<String>,
    /// Permission bits.
    pub(crate) mode: Option<u32>,
    /// The body's length, where known.
    pub(crate) length: Option<u64>,
}

impl Client {
    fn file_request(
        &self,
        method: Method,
        id: &str,
        verb: Option<&str>,
        path: &str,
        user: Option<&str>,
    ) -> reqwest::RequestBuilder {
        let mut segments = vec!["v1", "sandboxes", id, "files"];
        segments.extend(verb);
        let mut pairs = vec![("path", path)];
        pairs.extend(user.map(|user| ("user", user)));
        self.request(method, &segments).query(&pairs)
    }

    /// What is at a path; `None`: nothing.
    pub(crate) async fn stat(&self, id: &str, path: &str, user: Option<&str>) -> Result<Option<Entry>, Failure> {
        match self.json(self.file_request(Method::GET, id, Some("stat"), path, user)).await {
            Ok(entry) => Ok(Some(entry)),
            Err(failure) if failure.code == "not_found" || failure.code == "file_not_found" => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// A file's bytes and their number, where the server tells it.
    pub(crate) async fn read_file(
        &self,
        id: &str,
        path: &str,
        user: Option<&str>,
    ) -> Result<(Option<u64>, impl Stream<Item = Result<Bytes, Failure>> + use<>), Failure> {
        let response = self.send(self.file_request(Method::GET, id, None, path, user)).await?;
        let length = response.content_length();
        let client = self.clone();
        Ok((length, response.bytes_stream().map(move |chunk| chunk.map_err(|error| client.transport(&error)))))
    }

    /// Replaces a file as a whole: readers see the old one or the new one.
    pub(crate) async fn write_file(
        &self,
        id: &str,
        path: &str,
        options: &WriteOptions,
        body: Body,
    ) -> Result<(), Failure> {
        let mut request = self.file_request(Method::PUT, id, None, path, options.user.as_deref());
        request = request.query(&[("atomic", "true")]);
        if let Some(mode) = options.mode {
            request = request.query(&[("mode", format!("{mode:04o}"))]);
        }
        if let Some(length) = options.length {
            request = request.header(reqwest::header::CONTENT_LENGTH, length);
        }
        self.send(request.body(body)).await.map(drop)
    }

    /// Makes a directory and its parents.
    pub(crate) async fn make_dir(&self, id: &str, path: &str, user: Option<&str>) -> Result<(), Failure> {
        let mut body = json!({"path": path, "parents": true});
        if let Some(user) = user {
            body["user"] = json!(user);
        }
        self.send(self.request(Method::POST, &["v1", "sandboxes", id, "files", "mkdir"]).json(&body)).await.map(drop)
    }
}
