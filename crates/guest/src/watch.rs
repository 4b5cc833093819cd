//! placeholder
use crate::{
    Agent,
    failure::{Result, invalid},
    http::Reply,
};
use hyper::Response;
use stockade_wire::files::WatchRequest;
pub(crate) async fn start(_agent: &Agent, _request: WatchRequest) -> Result<Response<Reply>> {
    Err(invalid("not yet"))
}
