//! The `metadata` filter of lists, which arrives encoded more than once: each key and value is
//! percent-encoded, the pairs are form-encoded, and the whole is encoded again as a query value.

use std::collections::BTreeMap;

use percent_encoding::percent_decode_str;

/// Reads the filter after the query's own decoding, which the router has done.
pub(super) fn metadata(text: &str) -> Result<BTreeMap<String, String>, String> {
    let mut filter = BTreeMap::new();
    for pair in text.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').ok_or_else(|| format!("'{pair}' is not of the form key=value"))?;
        filter.insert(unescape(&unescape(key)?)?, unescape(&unescape(value)?)?);
    }
    Ok(filter)
}

/// One layer of form encoding. The inner layer writes a space as `%20`, so a plus in it stays one: it
/// can only come from a `%2B`.
fn unescape(text: &str) -> Result<String, String> {
    let decoded = percent_decode_str(text).decode_utf8();
    decoded.map(|text| text.into_owned()).map_err(|_| format!("'{text}' is not UTF-8 once decoded"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_sdk_sends_reads_back_as_what_was_meant() {
        // urlencode({quote(k): quote(v)}) of {"a b": "c&d", "é": "1+1=2"} as the query's decoder leaves it.
        let filter = metadata("a%2520b=c%2526d&%25C3%25A9=1%252B1%253D2").expect("valid");
        let wanted = [("a b", "c&d"), ("é", "1+1=2")].map(|(key, value)| (key.to_owned(), value.to_owned()));
        assert_eq!(filter, BTreeMap::from(wanted));
    }

    #[test]
    fn plain_and_once_encoded_filters_are_read_too() {
        let wanted = BTreeMap::from([("user".to_owned(), "a b".to_owned())]);
        assert_eq!(metadata("user=a b"), Ok(wanted.clone()));
        assert_eq!(metadata("user=a%20b"), Ok(wanted));
        assert_eq!(metadata(""), Ok(BTreeMap::new()));
        assert!(metadata("user").is_err());
    }
}
