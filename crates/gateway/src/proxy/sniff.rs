//! What a guest speaks, from its first bytes.

use super::hello::{self, Hello, HelloParse};

/// What the first bytes are.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Sniffed {
    /// A whole TLS hello.
    Tls(Hello),
    /// The start of an HTTP/1 request.
    Http,
    /// Anything else, and why.
    Other(&'static str),
}

const LONGEST_METHOD: usize = 24;

/// Says what `bytes` start; `None` while more are needed. `ended`: no more will come.
pub fn sniff(bytes: &[u8], ended: bool) -> Option<Sniffed> {
    let answer = match bytes.first() {
        None => None,
        Some(22) => match hello::parse(bytes) {
            HelloParse::More => None,
            HelloParse::Hello(hello) => Some(Sniffed::Tls(hello)),
            HelloParse::Bad(problem) => Some(Sniffed::Other(problem)),
        },
        Some(_) => http(bytes),
    };
    answer.or_else(|| ended.then_some(Sniffed::Other("the connection ended before it said what it is")))
}

/// `METHOD /`, `METHOD *`, `METHOD http://` and `CONNECT host`: what follows is the HTTP parser's to judge. Methods are
/// upper case in practice; anything looser would take other protocols for HTTP.
fn http(bytes: &[u8]) -> Option<Sniffed> {
    let method = bytes.iter().take(LONGEST_METHOD + 1).take_while(|byte| byte.is_ascii_uppercase() || **byte == b'-');
    let length = method.count();
    if length > LONGEST_METHOD {
        return Some(Sniffed::Other("neither TLS nor HTTP"));
    }
    let after = bytes.get(length)?;
    if length == 0 || *after != b' ' {
        return Some(Sniffed::Other("neither TLS nor HTTP"));
    }
    if &bytes[..length] == b"PRI" {
        return Some(Sniffed::Other("HTTP/2 without TLS"));
    }
    match bytes.get(length + 1) {
        None => None,
        Some(byte) if byte.is_ascii_graphic() => Some(Sniffed::Http),
        Some(_) => Some(Sniffed::Other("neither TLS nor HTTP")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_bytes_tell_tls_http_and_the_rest_apart() {
        let sniff = |text: &str| sniff(text.as_bytes(), false);
        for http in ["GET / HTTP/1.1\r\n", "POST http://a/ HTTP/1.1", "OPTIONS *", "CONNECT a:443", "M-SEARCH /"] {
            assert_eq!(sniff(http), Some(Sniffed::Http), "{http}");
        }
        for more in ["", "G", "GET", "GET "] {
            assert_eq!(sniff(more), None, "{more:?}");
        }
        for other in ["\r\nGET / HTTP/1.1", "SSH-2.0-x", "get / HTTP/1.1", "PRI * HTTP/2.0\r\n", " GET /", "\0\0\0\x10"]
        {
            assert!(matches!(sniff(other), Some(Sniffed::Other(_))), "{other:?}");
        }
        assert!(matches!(super::sniff(b"GE", true), Some(Sniffed::Other(_))));
    }
}
