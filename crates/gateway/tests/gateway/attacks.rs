//! Attacks, row by row, and the test that shows what happens to each. Those without a file are in this one; files
//! are those beside it unless they have a directory.
//!
//! | attack | what has to happen | shown by |
//! |---|---|---|
//! | a name that leads to loopback, a private network or metadata (rebinding) | resolved, judged and dialled as one step | `tls::a_name_that_leads_to_a_closed_address_is_refused_with_the_reason` |
//! | `/etc/hosts`, a hard-coded address of an allowed site | reset: a name in a hello grants nothing | `tls::a_name_in_a_hello_grants_nothing_to_an_address` |
//! | addresses as such: metadata, the host, the gateway, neighbours | reset at the first packet | `flows::what_no_rule_allows_is_reset_at_once`, `flows::special_addresses_stay_closed_under_the_widest_policy`, `tls::the_hosts_own_addresses_are_closed` |
//! | ranges forgotten in a list | no policy opens a closed address | `../policy::no_policy_of_a_tenant_opens_a_closed_address` |
//! | a hello for another name than the resolved one, or for none | alert, end | `tls::a_hello_for_another_name_than_the_resolved_one_is_refused` |
//! | malformed, doubled, oversize, split hellos | read strictly or reset | `tls::odd_hellos_are_reset`, `tls::a_hello_in_many_pieces_is_read_as_one`, `../hostile::hellos` |
//! | another host inside intercepted TLS (fronting) | 421 | `requests::fronting_inside_intercepted_tls_is_refused_in_both_protocols` |
//! | fronting inside TLS that passes through | not seen; the named host's own address is dialled; `intercept.always` sees it | `tls::allowed_tls_passes_untouched`, as above |
//! | encrypted inner hellos | no keys for them are handed out; noted, or refused where asked | `names::an_allowed_name_has_no_other_records_and_must_exist`, `tls::an_encrypted_hello_is_noted_and_refused_where_the_policy_is_strict` |
//! | data in names (tunnelled DNS) | what is not allowed never leaves; no other records; rates | `names::a_name_that_is_not_allowed_never_leaves`, `names::resolving_on_connect_only_sends_no_query_for_a_lookup`, `names::a_flood_of_questions_is_bounded` |
//! | another name server, over UDP, TCP or TLS | we answer, or reset | `names::names_get_addresses_of_our_own_whoever_is_asked`, `names::tcp_serves_the_same_names`, `flows::what_no_rule_allows_is_reset_at_once` |
//! | several questions in one, odd packets | an error and no answer | `names::odd_questions_get_errors_and_answers_get_none`, `../hostile::questions` |
//! | QUIC and other UDP | refused at once; `alt-svc` taken out | `flows::udp_is_refused_at_once_so_that_clients_fall_back_to_tcp`, `requests::answers_come_as_they_are_without_the_way_to_udp` |
//! | UDP that a policy allows: to closed addresses, past the proxy, past conditions on requests | judged by name and by address as TCP; refused | `datagrams::no_policy_lets_datagrams_to_a_closed_address`, `datagrams::a_port_nobody_listens_on_is_refused_and_the_operators_proxy_is_not_passed_by`, `../policy::udp_is_open_where_it_is_named_and_closed_where_requests_are_read` |
//! | UDP: forged answers, floods, lengths that lie | one socket per flow, connected; bounded; dropped | `datagrams::nobody_but_the_one_that_was_asked_answers`, `datagrams::floods_and_hostile_datagrams_are_bounded_and_the_rest_goes_on` |
//! | IPv6 | frames dropped and counted, no addresses given | `flows::hostile_frames_are_dropped_and_counted_and_the_link_goes_on`, `names::an_allowed_name_has_no_other_records_and_must_exist` |
//! | other protocols on the web's ports, clients that wait | reset | `tls::other_protocols_and_silence_on_web_ports_are_reset` |
//! | CONNECT, targets at another host | 405, 421 | `requests::proxies_are_not_offered` |
//! | smuggling | refused, or framed anew | `requests::nothing_is_smuggled`, [`line_ends_of_other_kinds_smuggle_nothing`] |
//! | a second request to another host | judged on its own | `requests::clear_text_requests_reach_their_host_and_no_other` |
//! | HTTP/2: too many streams, resets in a row, large heads, heads without an end | bounded, the connection ends | [`floods_of_streams_and_heads_are_bounded`] |
//! | HTTP/2 in clear text | reset | `tls::other_protocols_and_silence_on_web_ports_are_reset` |
//! | WebSocket | the handshake is judged as a request, tokens in it too; ends with its rule | [`a_websockets_handshake_is_judged_as_a_request`], `requests::websockets_work_through_interception` |
//! | paths read in two ways | match no rule that gives something | `secrets::rules_inject_headers_on_their_path_only`, `requests::rules_on_method_path_and_headers_decide_in_order` |
//! | tokens in clear text, to other hosts | stopped and reported | `secrets::a_token_sent_elsewhere_is_stopped_and_reported` |
//! | tokens in other forms and places, cut apart | found if whole, else worthless | `secrets::headers_that_servers_echo_and_places_not_named_keep_the_token`, [`a_token_in_pieces_is_a_token`] |
//! | line breaks in values | refused when stored and when sent | `secrets::a_rotated_secret_counts_for_the_next_request_and_a_bad_one_is_not_sent`, unit tests of `broker` |
//! | servers that send values back | not put where they are known to do so; masked where asked, in every form that was sent | `secrets::an_echo_is_masked_where_asked`, [`an_echo_of_another_form_is_masked_too`] |
//! | redirects elsewhere | not followed | `requests::answers_come_as_they_are_without_the_way_to_udp`, `fetch::a_question_arrives_as_it_was_asked_and_redirects_are_not_followed` |
//! | large and slow heads, stalled handshakes | 431, the connection ends | `requests::large_and_slow_heads_are_cut_off`, [`handshakes_that_stop_half_way_end`] |
//! | floods of connections | bounded, others go on | `flows::a_syn_flood_is_bounded_and_leaves_room_for_the_honest`, `flows::more_flows_than_allowed_are_reset_with_a_record` |
//! | clients that pin certificates | the handshake fails, with a record and a hint | `requests::a_guest_that_does_not_trust_the_authority_leaves_a_record_with_a_hint` |
//! | a guest that does not trust the authority | it is in every store guests read | system test `network::a_secret_is_used_by_a_guest_that_never_has_it` |
//! | a stolen key of the authority | it signs hosts alone, for a month, and is trusted in guests alone | unit test of `proxy::authority` |
//! | frames no machine sends | dropped and counted, or the link ends | `flows::hostile_frames_are_dropped_and_counted_and_the_link_goes_on`, `flows::a_frame_no_machine_sends_ends_the_link_and_nothing_else`, `../hostile::frames` |
//! | a fault inside | closes what it touches and opens nothing | [`a_fault_closes_and_the_rest_goes_on`] |
//! | other sandboxes | no way there but through their ports, by policy | `flows::special_addresses_stay_closed_under_the_widest_policy` |
//! | packets before there is a policy | none is read | [`without_a_policy_nothing_is_read`], `names::names_survive_a_restore_and_old_addresses_still_work` |
//! | data to hosts that are allowed | methods, paths and byte counts; no name filter can do more | `requests::rules_on_method_path_and_headers_decide_in_order`, `flows::bytes_go_both_ways_and_ends_are_passed_on` |
//! | a policy that changes while a connection is open | judged again, reset | `flows::a_policy_change_ends_what_it_no_longer_allows_before_it_returns`, `flows::a_policy_change_during_a_dial_counts` |
//! | a proxy that resolves names itself | it is asked for addresses alone | `upstream::a_proxy_reaches_no_address_that_is_closed_and_is_not_passed_by_when_it_fails` |
//! | rules that forward inside | judged as the open internet, unless the operator's | `upstream::a_forward_opens_nothing_and_leads_a_sandboxs_requests_to_no_closed_address` |
//! | a value that cannot be made, or is old | 502, nothing is sent | system test `secrets::values_are_made_when_they_are_needed_and_a_request_without_one_is_not_sent` |

use std::sync::Arc;

use async_trait::async_trait;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::{Request, StatusCode, header};
use serde_json::json;
use stockade_gateway::{
    AttachError, AttachSpec,
    broker::{self, SecretError, SecretProvider, SecretRequest},
    policy::Policy,
};
use stockade_model::{SandboxId, Secret};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};

use super::{
    guest::Guest,
    servers::{Http1, Reply, full, get, http2},
    world::World,
};

const VALUE: &str = "sk-live-8f3b";

fn policy(token: &str, more: serde_json::Value) -> serde_json::Value {
    let mut substitution = json!({"placeholder": token, "secret": "API_KEY", "hosts": ["api.example"]});
    for (key, value) in more.as_object().unwrap() {
        substitution[key] = value.clone();
    }
    json!({"rules": [{"action": "allow", "names": ["*.example"]}], "substitutions": [substitution]})
}

#[tokio::test]
async fn line_ends_of_other_kinds_smuggle_nothing() {
    let world = World::new();
    let server = world.http("good.example", "93.184.216.34").await;
    let (guest, _attachment) = world.attach_with(json!({}), |spec| spec.limits.idle_timeout_ms = 300);
    for sent in [
        "GET /a HTTP/1.1\nHost: good.example\n\nGET /b HTTP/1.1\nHost: evil.example\n\n",
        "GET /a HTTP/1.1\r\nHost: good.example\r\nX: 1\rGET /b HTTP/1.1\r\n\r\n",
        "GET /a HTTP/1.1\r\nHost: good.example\r\nX: 1\n\nGET /b HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        "GET /a\u{b}HTTP/1.1\r\nHost: good.example\r\n\r\n",
    ] {
        let mut stream = guest.connect_name("good.example", 80).await.unwrap();
        stream.write_all(sent.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        // A reset is an answer too.
        let _ = stream.read_to_end(&mut answer).await;
    }
    for request in server.seen.lock().unwrap().iter() {
        assert_eq!((&request["path"], &request["headers"]["host"]), (&json!("/a"), &json!(["good.example"])));
    }
}

const HEADERS: u8 = 1;
const GOAWAY: u8 = 7;
const CONTINUATION: u8 = 9;
const ENHANCE_YOUR_CALM: u32 = 11;

/// A frame of HTTP/2.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Sends frames over a connection of their own until it ends, and returns the code of the GOAWAY that came before.
async fn flood(world: &World, guest: &Guest, frames: Vec<u8>) -> Option<u32> {
    let tls = world.connect_tls(guest, "good.example", true, &["h2"]).await.unwrap();
    let (mut reader, mut writer) = tokio::io::split(tls);
    let sending = tokio::spawn(async move {
        let preface = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &frame(4, 0, 0, &[])[..]].concat();
        // It breaks off when the other side has had enough.
        let _ = writer.write_all(&[preface, frames].concat()).await;
        writer
    });
    let mut said = Vec::new();
    let _ = reader.read_to_end(&mut said).await;
    drop(sending.await.unwrap());
    let (mut rest, mut code) = (&said[..], None);
    while let Some((head, more)) = rest.split_first_chunk::<9>() {
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        // The end may come in the middle of a frame.
        let Some((payload, more)) = more.split_at_checked(length) else { break };
        if head[3] == GOAWAY {
            code = Some(u32::from_be_bytes(payload[4..8].try_into().unwrap()));
        }
        rest = more;
    }
    code
}

#[tokio::test]
async fn floods_of_streams_and_heads_are_bounded() {
    let world = World::new();
    let server = world.https("good.example", "93.184.216.34", &["h2"]).await;
    let intercepted = json!({"intercept": {"always": ["good.example"]}});
    let (guest, _attachment) = world.attach_with(intercepted, |spec| spec.limits.http2_streams = 10);
    // More streams than are offered wait for their turn: the server never sees more at a time, and all are answered.
    let tls = world.connect_tls(&guest, "good.example", true, &["h2"]).await.unwrap();
    let mut http = http2(tls).await;
    let ask = |at: usize| Request::get(format!("https://good.example/{at}")).body(full("")).unwrap();
    // The first answer brings the offer along.
    assert_eq!(http.send_request(ask(0)).await.unwrap().status(), 200);
    let many: Vec<_> = (0..60).map(|at| http.send_request(ask(at))).collect();
    for response in futures::future::try_join_all(many).await.unwrap() {
        assert_eq!(response.status(), 200);
    }
    // A head beyond the limit.
    let mut large = ask(0);
    large.headers_mut().insert("x-large", "a".repeat(100 << 10).parse().unwrap());
    let answer = http.send_request(large).await;
    assert!(answer.is_err() || answer.is_ok_and(|answer| answer.status() == 431));
    // Streams that are opened and reset in a row end the connection.
    let before = server.count();
    // `:method GET`, `:scheme https`, `:path /` of the static table; `:authority` literal.
    let block = [&[0x82, 0x87, 0x84, 0x41, 12], &b"good.example"[..]].concat();
    let resets =
        (1..40_001).step_by(2).map(|id| [frame(HEADERS, 5, id, &block), frame(3, 0, id, &[0, 0, 0, 8])].concat());
    assert_eq!(flood(&world, &guest, resets.collect::<Vec<_>>().concat()).await, Some(ENHANCE_YOUR_CALM));
    let asked = server.count() - before;
    assert!(asked < 2_000, "{asked} of 20,000 requests got through");
    // A head without an end, in pieces with something in them and in empty ones.
    let before = server.count();
    for piece in [&[0x40, 1, b'x', 1, b'y'][..], &[]] {
        let pieces = (0..40_000).flat_map(|_| frame(CONTINUATION, 0, 1, piece));
        let sent = frame(HEADERS, 1, 1, &block).into_iter().chain(pieces).collect();
        assert_eq!(flood(&world, &guest, sent).await, Some(ENHANCE_YOUR_CALM), "pieces of {}", piece.len());
    }
    assert_eq!(server.count(), before);
    // Others are served as before.
    let reply = world.get_inside(&guest, Request::get("/").header(header::HOST, "good.example")).await;
    assert_eq!(reply.status, 200);
}

#[tokio::test]
async fn a_websockets_handshake_is_judged_as_a_request() {
    let world = World::new();
    world.secret("API_KEY", VALUE);
    let server = world.https("api.example", "93.184.216.34", &["http/1.1"]).await;
    let other = world.https("other.example", "93.184.216.35", &["http/1.1"]).await;
    let token = broker::placeholder();
    let mut policy = policy(&token, json!({}));
    policy["intercept"] = json!({"always": ["other.example"]});
    let (guest, _attachment) = world.attach(policy);
    let upgrade = async |name: &str, host: &str| {
        let tls = world.connect_tls(&guest, name, true, &["http/1.1"]).await.unwrap();
        let request = Request::get("/ws")
            .header(header::HOST, host)
            .header(header::AUTHORIZATION, format!("Bearer {token}"))
            .header(header::CONNECTION, "Upgrade")
            .header(header::UPGRADE, "websocket")
            .header("sec-websocket-version", "13")
            .header("sec-websocket-key", "AAAAAAAAAAAAAAAAAAAAAA==");
        let mut http = Http1::over(tls).await;
        http.0.send_request(request.body(full("")).unwrap()).await.unwrap().status()
    };
    assert_eq!(upgrade("api.example", "api.example").await, StatusCode::SWITCHING_PROTOCOLS);
    assert_eq!(server.last()["headers"]["authorization"], json!([format!("Bearer {VALUE}")]));
    assert_eq!(upgrade("api.example", "other.example").await, StatusCode::MISDIRECTED_REQUEST);
    assert_eq!(upgrade("other.example", "other.example").await, StatusCode::FORBIDDEN);
    assert_eq!((server.count(), other.count()), (1, 0));
}

#[tokio::test]
async fn a_token_in_pieces_is_a_token() {
    let world = World::new();
    world.secret("API_KEY", VALUE);
    let server = world.https("api.example", "93.184.216.34", &["http/1.1"]).await;
    world.https("other.example", "93.184.216.35", &["http/1.1"]).await;
    let token = broker::placeholder();
    let mut policy = policy(&token, json!({}));
    policy["intercept"] = json!({"always": ["other.example"]});
    let (guest, _attachment) = world.attach(policy);
    for (name, status) in [("api.example", "200"), ("other.example", "403")] {
        let mut tls = world.connect_tls(&guest, name, true, &["http/1.1"]).await.unwrap();
        let sent = format!("GET / HTTP/1.1\r\nHost: {name}\r\nX-Api-Key: {token}\r\nConnection: close\r\n\r\n");
        for byte in sent.as_bytes() {
            tls.write_all(&[*byte]).await.unwrap();
            tls.flush().await.unwrap();
        }
        let mut answer = String::new();
        let _ = tls.read_to_string(&mut answer).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{name}: {answer}");
    }
    assert_eq!(server.last()["headers"]["x-api-key"], json!([VALUE]));
}

#[tokio::test]
async fn an_echo_of_another_form_is_masked_too() {
    let world = World::new();
    world.secret("API_KEY", "a b&c-8f3b");
    world.https("api.example", "93.184.216.34", &["http/1.1"]).await;
    let token = broker::placeholder();
    let places = json!({"mask_echo": true, "in": {"headers": true, "basic": true, "query": true, "body": false}});
    let (guest, _attachment) = world.attach(policy(&token, places));
    // The server sends its head back in its answer: the credential is there in base64, the query escaped.
    let credential = |text: &str| format!("Basic {}", STANDARD.encode(format!("user:{text}")));
    let request = Request::get(format!("/?key={token}"))
        .header(header::HOST, "api.example")
        .header(header::AUTHORIZATION, credential(&token));
    let reply: Reply = world.get_inside(&guest, request).await;
    assert_eq!(reply.headers["x-echo"], credential(&token).as_str());
    assert_eq!(reply.json()["headers"]["authorization"], json!([credential(&token)]));
    assert_eq!(reply.json()["path"], format!("/?key={token}"));
}

#[tokio::test]
async fn handshakes_that_stop_half_way_end() {
    let world = World::new();
    world.https("good.example", "93.184.216.34", &["http/1.1"]).await;
    let intercepted = json!({"intercept": {"always": ["good.example"]}});
    let (guest, attachment) = world.attach_with(intercepted, |spec| spec.limits.head_timeout_ms = 200);
    // A hello that is cut, and one that is whole with nothing after it.
    let mut client =
        rustls::ClientConnection::new(Arc::new(world.client_tls(true, &[])), "good.example".try_into().unwrap())
            .unwrap();
    let mut hello = Vec::new();
    client.write_tls(&mut hello).unwrap();
    for sent in [&hello[..hello.len() / 2], &hello[..]] {
        let mut stream = guest.connect_name("good.example", 443).await.unwrap();
        stream.write_all(sent).await.unwrap();
        let mut answer = Vec::new();
        // However it ends, it does.
        let _ = stream.read_to_end(&mut answer).await;
    }
    while attachment.stats().flows > 0 {
        guest.settle().await;
    }
}

/// A provider with a bug.
struct Broken;

#[async_trait]
impl SecretProvider for Broken {
    async fn value(&self, request: &SecretRequest) -> Result<Secret, SecretError> {
        panic!("a bug on the way to {}", request.secret);
    }
}

#[tokio::test]
async fn a_fault_closes_and_the_rest_goes_on() {
    let world = World::with(|config| config.secrets = Arc::new(Broken));
    let server = world.https("api.example", "93.184.216.34", &["http/1.1"]).await;
    let plain = world.http("plain.example", "93.184.216.36").await;
    let token = broker::placeholder();
    let (guest, attachment) = world.attach(policy(&token, json!({})));
    let mut open = Http1::over(guest.connect_name("plain.example", 80).await.unwrap()).await;
    assert_eq!(open.send(get("plain.example", "/")).await.status, 200);
    let tls = world.connect_tls(&guest, "api.example", true, &["http/1.1"]).await.unwrap();
    let mut request = get("api.example", "/");
    request.headers_mut().insert("x-api-key", token.parse().unwrap());
    let mut http = Http1::over(tls).await;
    http.0.ready().await.unwrap();
    assert!(http.0.send_request(request).await.is_err(), "the connection ends");
    assert_eq!(server.count(), 0);
    assert_eq!(open.send(get("plain.example", "/")).await.status, 200);
    let reply = world.get_inside(&guest, Request::get("/").header(header::HOST, "api.example")).await;
    assert_eq!((reply.status.as_u16(), server.count(), plain.count()), (200, 1, 2));
    assert!(attachment.stats().flows > 0);
}

#[tokio::test]
async fn without_a_policy_nothing_is_read() {
    let world = World::new();
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(&[0, 0, 0, 60]).await.unwrap();
    theirs.write_all(&[0xff; 60]).await.unwrap();
    let bad: Policy =
        serde_json::from_value(json!({"rules": [{"action": "allow", "cidrs": ["300.0.0.0/8"]}]})).unwrap();
    let refused = world.gateway.attach(ours, AttachSpec::new(SandboxId::random(), bad));
    assert!(matches!(refused, Err(AttachError::Policy { .. })));
    // The frame lies there unread: the end is a reset, not an orderly close.
    let mut answer = Vec::new();
    let end = theirs.read_to_end(&mut answer).await;
    assert!(end.is_err() && answer.is_empty(), "{end:?}");
}
