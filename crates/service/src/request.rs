//! What a client may ask for, checked before anything happens.

use std::{collections::BTreeMap, time::Duration};

use stockade_model::{IdleRules, LABEL_KEY, LifeRules, quoted};
use stockade_store::Store;

use crate::{CreateSandbox, ServiceError, error::check_name};

const LONGEST_KEY: usize = 255;
const METADATA_BYTES: usize = 64 << 10;
const ENV_BYTES: usize = 256 << 10;
const MOST_PAIRS: usize = 1000;

/// Why a request makes no sense, if it does not.
pub(crate) fn check(request: &CreateSandbox, longest: Duration) -> Result<(), ServiceError> {
    check_lifetime(request.lifetime, longest)?;
    check_idle(&request.idle)?;
    check_labels("metadata", &request.metadata)?;
    check_pairs("env", &request.env, ENV_BYTES)?;
    if let Some(name) = request.env.keys().find(|name| name.contains('=')) {
        return invalid("env", format!("has the name {}: a name cannot contain \"=\"", quoted(name)));
    }
    if let Some(used) =
        request.network.iter().flat_map(|spec| &spec.secrets).find(|used| request.env.contains_key(&used.env))
    {
        return invalid("env", format!("has a value for {}, which is to hold a secret's token", used.env));
    }
    match &request.idempotency_key {
        Some(key) if key.is_empty() || key.len() > LONGEST_KEY => {
            invalid("idempotency_key", format!("must have 1 to {LONGEST_KEY} bytes"))
        }
        _ => Ok(()),
    }
}

/// A lifetime that a new sandbox can have.
pub(crate) fn check_lifetime(lifetime: Duration, longest: Duration) -> Result<(), ServiceError> {
    if lifetime.is_zero() {
        return invalid("lifetime", "must be over zero".to_owned());
    }
    check_longest(lifetime, longest)
}

/// A lifetime that is not too long.
pub(crate) fn check_longest(lifetime: Duration, longest: Duration) -> Result<(), ServiceError> {
    if lifetime > longest {
        return invalid("lifetime", format!("is over this server's maximum of {} s", longest.as_secs_f64()));
    }
    Ok(())
}

/// Labels that can be kept.
pub(crate) fn check_labels(field: &'static str, labels: &BTreeMap<String, String>) -> Result<(), ServiceError> {
    check_pairs(field, labels, METADATA_BYTES)?;
    labels.keys().try_for_each(|key| check_name(field, LABEL_KEY, key))
}

/// Rules that go down in order.
pub(crate) fn check_idle(idle: &IdleRules) -> Result<(), ServiceError> {
    let steps = [idle.standby_after, idle.hibernate_after, idle.archive_after, idle.delete_after];
    let given: Vec<_> = steps.into_iter().flatten().collect();
    if given.iter().any(Duration::is_zero) {
        return invalid("idle", "has a time of zero: leave out what is not wanted".to_owned());
    }
    if !given.is_sorted() {
        return invalid(
            "idle",
            "must be in order: standby_after, hibernate_after, archive_after, delete_after".to_owned(),
        );
    }
    if idle.archive_after.is_some() && idle.hibernate_after.is_none() {
        return invalid("idle", "must have a hibernate_after with its archive_after".to_owned());
    }
    if idle.busy_percent.is_some_and(|percent| !(1..=100).contains(&percent)) {
        return invalid("idle", "must have a busy_percent of 1 to 100".to_owned());
    }
    Ok(())
}

fn check_pairs(field: &'static str, pairs: &BTreeMap<String, String>, most: usize) -> Result<(), ServiceError> {
    if pairs.len() > MOST_PAIRS {
        return invalid(field, format!("has {} entries, the most is {MOST_PAIRS}", pairs.len()));
    }
    let bytes: usize = pairs.iter().map(|(key, value)| key.len() + value.len()).sum();
    if bytes > most {
        return invalid(field, format!("has {bytes} bytes, the most is {most}"));
    }
    if pairs.keys().any(String::is_empty) {
        return invalid(field, "has an entry without a name".to_owned());
    }
    if let Some((key, _)) = pairs.iter().find(|(key, value)| key.contains('\0') || value.contains('\0')) {
        return invalid(field, format!("has a NUL byte in the entry {}", quoted(key)));
    }
    Ok(())
}

fn invalid(field: &'static str, problem: String) -> Result<(), ServiceError> {
    Err(ServiceError::Invalid { field, problem })
}

/// The same for the same request, whatever key it comes under.
pub(crate) fn digest(store: &Store, request: &CreateSandbox) -> Vec<u8> {
    let CreateSandbox {
        template,
        lifetime,
        metadata,
        env,
        on_timeout,
        auto_resume,
        idle,
        from_disk,
        network,
        idempotency_key: _,
    } = request;
    let mut canonical = serde_json::json!([template, lifetime.as_nanos().to_string(), metadata, env]);
    let rules = LifeRules { on_timeout: *on_timeout, auto_resume: *auto_resume, idle: *idle };
    // Digests of requests without rules stay those of a server that knew none.
    if rules != LifeRules::default() {
        canonical = serde_json::json!([canonical, rules]);
    }
    if *from_disk {
        canonical = serde_json::json!([canonical, "from_disk"]);
    }
    if let Some(network) = network {
        canonical = serde_json::json!([canonical, "network", network]);
    }
    store.request_digest(canonical.to_string().as_bytes())
}
